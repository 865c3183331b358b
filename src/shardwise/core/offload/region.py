"""Regions of a disk's file, and the blocks they are made of.

A region is a named row of bytes. It knows where it lies, which of its bytes were written, and the checksums of its
blocks: each is computed when the block is written and compared whenever it is read.
"""

import ctypes
import mmap
import threading
from dataclasses import dataclass, field
from queue import SimpleQueue

from torch import Tensor

from ...base.direct_io import ALIGNMENT
from ...base.errors import StoreError
from ...base.intervals import round_up
from ..native.checked_io import CHECK_BYTES, CheckedIO

# Bytes that a thread reads or writes at once.
BLOCK_BYTES = 16 << 20


class Pending:
    """A put or a fetch that was started. Until it is done, its tensor must not be used."""

    def __init__(self, start: int, stop: int, is_put: bool, num_parts: int) -> None:
        # Whole blocks: to write a part of one, the rest of it is read.
        self.start = start // CHECK_BYTES * CHECK_BYTES
        self.stop = round_up(stop, CHECK_BYTES)
        self.is_put = is_put
        self._num_left = num_parts
        self._failure: StoreError | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()
        if num_parts == 0:
            self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self.settle()
        if self._failure is not None:
            raise StoreError(str(self._failure)) from self._failure

    def settle(self) -> None:
        """Wait without raising a failure."""
        self._done.wait()

    def end_part(self, failure: StoreError | None) -> None:
        with self._lock:
            self._failure = self._failure or failure
            self._num_left -= 1
            is_last = self._num_left == 0
        if is_last:
            self._done.set()

    def must_follow(self, earlier: "Pending") -> bool:
        return (self.is_put or earlier.is_put) and self.start < earlier.stop and earlier.start < self.stop


@dataclass(frozen=True, slots=True)
class RegionPart:
    """Bytes of a region that one thread moves: whole blocks directly from or to the tensor's memory, or at most one
    block through a bounce buffer, where a block is not complete or O_DIRECT cannot use the memory."""

    start: int
    stop: int
    is_whole: bool


@dataclass(slots=True, eq=False)
class Region:
    what: str
    offset: int  # in the file
    num_bytes: int
    sums: list[int | None] = field(init=False, repr=False)  # of block after block; None before one is written
    _written: list[tuple[int, int]] = field(default_factory=list, repr=False)  # in order, and apart from each other
    _under_way: list[Pending] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        num_blocks = round_up(self.num_bytes, CHECK_BYTES) // CHECK_BYTES
        self.sums = [None] * num_blocks

    def note_written(self, start: int, stop: int) -> None:
        touching = [each for each in self._written if each[0] <= stop and start <= each[1]]
        apart = [each for each in self._written if each not in touching]
        both = [(start, stop), *touching]
        self._written = sorted([*apart, (min(first for first, _ in both), max(last for _, last in both))])

    def require_written(self, start: int, stop: int) -> None:
        if start < stop and not any(first <= start and stop <= last for first, last in self._written):
            raise StoreError(
                f"bytes {start} to {stop} of {self.what} were not all written: put them there before they are fetched"
            )

    def under_way(self) -> list[Pending]:
        self._under_way = [pending for pending in self._under_way if not pending.is_done]
        return self._under_way

    def add(self, pending: Pending) -> list[Pending]:
        """Register a request; returns the earlier ones that it has to wait for."""
        earlier = [each for each in self.under_way() if pending.must_follow(each)]
        self._under_way.append(pending)
        return earlier

    def block_around(self, at: int) -> tuple[int, int]:
        start = at // CHECK_BYTES * CHECK_BYTES
        return start, min(start + CHECK_BYTES, self.num_bytes)

    def parts(self, start: int, stop: int, address: int) -> list[RegionPart]:
        """Cut these bytes, which lie in memory at this address, into parts for threads."""
        found = []
        while start < stop:
            part = self._next_part(start, stop, address)
            found.append(part)
            address += part.stop - start
            start = part.stop
        return found

    def _next_part(self, start: int, stop: int, address: int) -> RegionPart:
        if start % CHECK_BYTES == 0 and address % ALIGNMENT == 0:
            end = min(start + BLOCK_BYTES, stop)
            if end != self.num_bytes or end % ALIGNMENT:
                end = end // CHECK_BYTES * CHECK_BYTES
            if end > start:
                return RegionPart(start, end, is_whole=True)
        return RegionPart(start, min(stop, self.block_around(start)[1]), is_whole=False)


class Blocks:
    """The blocks of a file. `num_threads` threads may use them at once, but no block that another thread writes."""

    def __init__(self, file: int, io: CheckedIO, num_threads: int) -> None:
        self._file = file
        self._io = io
        self._bounces: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(num_threads):
            self._bounces.put(memoryview(mmap.mmap(-1, CHECK_BYTES)))  # takes no memory until it is used

    def put(self, region: Region, part: RegionPart, memory: memoryview) -> None:
        if part.is_whole:
            self._write(region, part.start, memory)
            return
        start, stop = region.block_around(part.start)
        bounce = self._bounces.get()
        try:
            block = bounce[: round_up(stop - start, ALIGNMENT)]
            if len(memory) < stop - start:
                if region.sums[start // CHECK_BYTES] is not None:
                    self._read(region, start, block)
                else:
                    block[:] = bytes(len(block))
            block[part.start - start : part.stop - start] = memory
            block[stop - start :] = bytes(len(block) - (stop - start))  # behind the region's end
            self._write(region, start, block)
        finally:
            self._bounces.put(bounce)

    def fetch(self, region: Region, part: RegionPart, memory: memoryview) -> None:
        if part.is_whole:
            self._read(region, part.start, memory)
            return
        start, stop = region.block_around(part.start)
        bounce = self._bounces.get()
        try:
            block = bounce[: round_up(stop - start, ALIGNMENT)]
            self._read(region, start, block)
            memory[:] = block[part.start - start : part.stop - start]
        finally:
            self._bounces.put(bounce)

    def _write(self, region: Region, start: int, memory: memoryview) -> None:
        region.sums[_blocks(start, memory)] = self._io.write(self._file, memory, region.offset + start)

    def _read(self, region: Region, start: int, memory: memoryview) -> None:
        sums = self._io.read(self._file, memory, region.offset + start)
        for number, (seen, written) in enumerate(zip(sums, region.sums[_blocks(start, memory)], strict=True)):
            if seen != written:
                begin = start + number * CHECK_BYTES
                end = min(begin + CHECK_BYTES, region.num_bytes)
                raise StoreError(f"the disk returned other bytes than were written, in bytes {begin} to {end}")


def memory_of(tensor: Tensor) -> memoryview:
    """A view of the bytes of a contiguous tensor on the host. The view does not keep the memory alive."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _blocks(start: int, memory: memoryview) -> slice:
    return slice(start // CHECK_BYTES, round_up(start + len(memory), CHECK_BYTES) // CHECK_BYTES)
