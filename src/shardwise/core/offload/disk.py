"""Bytes on a disk, in regions of one file per rank. The file has no name, so it is gone when the process ends.

A request is cut into parts that threads move in parallel, around the page cache where the file system allows it. It
waits for earlier requests for the same blocks, unless all of them read. A checksum of each block is computed when it
is written and compared whenever it is read. The first failure is stored, and every later call raises it again, so that
training never continues with lost state.
"""

import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryFile
from typing import NoReturn

from torch import Tensor

from ...base.errors import NoRoomError, PlaceError, StoreError
from ...base.files import ALIGNMENT, enable_direct_io, is_direct
from ...base.intervals import round_up
from ..native.checked_io import CHECK_BYTES, checked_io

PART_BYTES = 16 << 20  # the most that a thread reads or writes at once
_NUM_THREADS = 8  # readers, and as many writers: while some compute checksums, others keep the disk busy
_FIXES = {
    errno.ENOSPC: "make room there, or name a folder on another disk",
    errno.EDQUOT: "raise the quota, or name a folder on another disk",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
}
_FIX = "replace the disk, or name a folder on another one"
Jobs = SimpleQueue[Callable[[], None] | None]


class Pending:
    """A put or a fetch that was started. Until it is done, its tensor must not be used."""

    def __init__(self, start: int, stop: int, is_put: bool, num_parts: int) -> None:
        # Whole blocks: to write a part of a block, the rest of the block is read.
        self.start = start // CHECK_BYTES * CHECK_BYTES
        self.stop = round_up(stop, CHECK_BYTES)
        self.is_put = is_put
        self.parts = [Future[None]() for _ in range(num_parts)]

    @property
    def is_done(self) -> bool:
        return all(map(Future.done, self.parts))

    def wait(self) -> None:
        for failure in [part.exception() for part in self.parts]:  # of all parts: none may run afterwards
            if failure is not None:
                _raise(failure)


@dataclass(slots=True, eq=False)
class Region:
    """A named row of bytes in the file."""

    what: str
    offset: int  # in the file
    num_bytes: int
    is_new: bool = True  # nothing was written to it
    sums: list[int | None] = field(init=False, repr=False)  # a checksum for each block; None before it is written
    _under_way: list[Pending] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.sums = [None] * (round_up(self.num_bytes, CHECK_BYTES) // CHECK_BYTES)

    def add(self, new: Pending) -> list[Pending]:
        """Register a request. Return the earlier requests that it has to wait for."""
        under_way, self._under_way, earlier = self._under_way, [], []
        for each in under_way:
            if not each.is_done:
                self._under_way.append(each)
                if new.start < each.stop and each.start < new.stop and (new.is_put or each.is_put):
                    earlier.append(each)
        self._under_way.append(new)
        return earlier

    def block_around(self, at: int) -> tuple[int, int]:
        start = at // CHECK_BYTES * CHECK_BYTES
        return start, min(start + CHECK_BYTES, self.num_bytes)

    def cuts(self, start: int, stop: int, address: int) -> Iterator[tuple[int, int, bool]]:
        """Cut bytes, whose memory begins at `address`, into parts for threads: begin, end, `RegionPart.is_whole`."""
        while start < stop:
            end = start
            if start % CHECK_BYTES == 0 and address % ALIGNMENT == 0:
                end = min(start + PART_BYTES, stop)
                if end != self.num_bytes or end % ALIGNMENT:
                    end = end // CHECK_BYTES * CHECK_BYTES
            is_whole = end > start
            end = end if is_whole else min(stop, self.block_around(start)[1])
            yield start, end, is_whole
            address += end - start
            start = end


@dataclass(frozen=True, slots=True)
class RegionPart:
    """Bytes that one thread moves: whole blocks directly from or to the tensor's memory, or at most one block through a
    bounce buffer, where a block is not complete or O_DIRECT cannot use the memory."""

    region: Region
    start: int
    memory: memoryview
    is_whole: bool
    is_put: bool
    tensor: Tensor  # keeps the memory alive


class Disk:
    """A file for `num_bytes` in an existing folder. The constructor reserves all of it.

    `library` is the compiled C code: threads need less processor time with it, and wait less for the interpreter's
    lock.
    """

    def __init__(self, folder: Path, num_bytes: int, library: ctypes.CDLL | None = None) -> None:
        self.folder = folder
        self.reserved_bytes = round_up(num_bytes, ALIGNMENT)
        self._taken_bytes = 0
        # Held while a request enters its region's list and the queue, so that both have the same order: no thread waits
        # for a request that is behind it in the queue.
        self._lock = threading.Lock()
        self._failures: list[StoreError] = []
        self._file = reserve(folder, self.reserved_bytes)
        self._write_blocks, self._read_blocks = checked_io(library)
        self._bounces: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(2 * _NUM_THREADS):
            self._bounces.put(memoryview(mmap.mmap(-1, CHECK_BYTES)))  # takes no memory until it is used
        self._to_read, self._to_write = Jobs(), Jobs()
        threads = [
            threading.Thread(target=_work, args=(jobs,), name=f"shardwise-{name}-{number}", daemon=True)
            for name, jobs in (("fetch", self._to_read), ("put", self._to_write))
            for number in range(_NUM_THREADS)
        ]
        for thread in threads:
            thread.start()
        # Runs when this object is freed, and also when the interpreter exits.
        queues = [self._to_read, self._to_write]
        self._end = weakref.finalize(self, _end, folder, self._failures, queues, threads, self._file)

    @property
    def is_direct(self) -> bool:
        """True if reads and writes go around the page cache."""
        return is_direct(self._file)

    def region(self, num_bytes: int, what: str) -> Region:
        """Reserve the next region; `what` names it in errors."""
        left = self.reserved_bytes - self._taken_bytes
        if num_bytes > left:
            room = f"{left} of the {self.reserved_bytes} reserved in {self.folder} are left"
            raise StoreError(f"{what} needs {num_bytes} bytes, and {room}: see padded_bytes")
        self._taken_bytes += round_up(num_bytes, ALIGNMENT)
        return Region(what, self._taken_bytes - round_up(num_bytes, ALIGNMENT), num_bytes)

    def put(self, region: Region, source: Tensor, at: int = 0) -> Pending:
        """Start to write a tensor to a region, from byte `at` on. The tensor must not change before that is done."""
        return self._start(region, source, at, is_put=True)

    def fetch(self, region: Region, into: Tensor, at: int = 0) -> Pending:
        """Start to read a region, from byte `at` on, into a tensor."""
        return self._start(region, into, at, is_put=False)

    def close(self) -> None:
        """Release the space. Parts that a thread has begun are finished, the rest is dropped."""
        self._end()

    def _start(self, region: Region, tensor: Tensor, at: int, is_put: bool) -> Pending:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            strides = f"shape {tuple(tensor.shape)} and strides {tensor.stride()} on {tensor.device}"
            raise StoreError(f"{region.what}: only contiguous tensors on the host are moved, not one of {strides}")
        stop = at + tensor.nbytes
        if not 0 <= at <= stop <= region.num_bytes:
            raise StoreError(f"bytes {at} to {stop} are not all in {region.what}, which has {region.num_bytes}")
        cuts = list(region.cuts(at, stop, tensor.data_ptr()))
        pending = Pending(at, stop, is_put, len(cuts))
        # This view does not keep the memory alive.
        memory = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
        with self._lock:
            if self._failures:
                _raise(self._failures[0])
            if region.is_new and not is_put and cuts:
                raise StoreError(f"{region.what} was not written yet: put something there before it is fetched")
            region.is_new = region.is_new and not (is_put and cuts)
            earlier = region.add(pending)
            jobs = self._to_write if is_put else self._to_read
            for (start, end, is_whole), done in zip(cuts, pending.parts, strict=True):
                part = RegionPart(region, start, memory[start - at : end - at], is_whole, is_put, tensor)
                jobs.put(partial(self._run, part, done, earlier))
        return pending

    def _run(self, part: RegionPart, done: Future[None], earlier: list[Pending]) -> None:
        """Move one part, in one of the threads. Any failure is stored for the callers that wait."""
        for each in earlier:
            futures.wait(each.parts)
        if not self._failures:
            try:
                self._move(part)
            except Exception as error:  # noqa: BLE001
                self._failures.append(self._failure(part, error))
        if self._failures:
            done.set_exception(self._failures[0])
        else:
            done.set_result(None)

    def _failure(self, part: RegionPart, error: Exception) -> StoreError:
        why, fix = repr(error), "report this, it is a bug"
        if isinstance(error, OSError):
            why, fix = error.strerror or str(error), _FIXES.get(error.errno or 0, _FIX)
        elif isinstance(error, StoreError):
            why, fix = str(error), _FIX
        failure = StoreError(
            f"{self.folder}: bytes {part.start} to {part.start + len(part.memory)} of {part.region.what} could not be "
            f"{'written' if part.is_put else 'read'}: {why}. The state on this disk is lost: {fix}, and resume from "
            "the last checkpoint, which is as it was"
        )
        failure.__cause__ = error
        return failure

    def _move(self, part: RegionPart) -> None:
        region, memory, is_put = part.region, part.memory, part.is_put
        if part.is_whole:
            (self._write if is_put else self._read)(region, part.start, memory)
            return
        start, stop = region.block_around(part.start)
        inside = slice(part.start - start, part.start - start + len(memory))
        bounce = self._bounces.get()
        try:
            block = bounce[: round_up(stop - start, ALIGNMENT)]
            if not is_put or (len(memory) < stop - start and region.sums[start // CHECK_BYTES] is not None):
                self._read(region, start, block)
            else:
                block[:] = bytes(len(block))  # also the padding after the region's end
            if is_put:
                block[inside] = memory
                self._write(region, start, block)
            else:
                memory[:] = block[inside]
        finally:
            self._bounces.put(bounce)

    def _write(self, region: Region, start: int, memory: memoryview) -> None:
        region.sums[_blocks(start, memory)] = self._write_blocks(self._file, memory, region.offset + start)

    def _read(self, region: Region, start: int, memory: memoryview) -> None:
        sums = self._read_blocks(self._file, memory, region.offset + start)
        for number, (read, written) in enumerate(zip(sums, region.sums[_blocks(start, memory)], strict=True)):
            if read != written:
                begin, end = region.block_around(start + number * CHECK_BYTES)
                raise StoreError(f"the disk returned other bytes than were written, in bytes {begin} to {end}")


def _work(jobs: Jobs) -> None:
    """Run jobs in the order in which they were added.

    An executor is not used: it takes no more work once the main thread has ended, and a save may still run then.
    """
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds tensors, and the next one may not come for a long time


def _end(
    folder: Path, failures: list[StoreError], queues: list[Jobs], threads: list[threading.Thread], file: int
) -> None:
    failures.append(StoreError(f"{folder}: the disk was closed, and nothing of it can be read or written any more"))
    for jobs in queues:
        for _ in range(_NUM_THREADS):
            jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # the last job may hold the last reference to the disk
            thread.join()
    os.close(file)


def _raise(failure: BaseException) -> NoReturn:
    raise StoreError(str(failure)) from failure


def _blocks(start: int, memory: memoryview) -> slice:
    return slice(start // CHECK_BYTES, round_up(start + len(memory), CHECK_BYTES) // CHECK_BYTES)


def reserve(folder: Path, num_bytes: int) -> int:
    """Create an unnamed file of this size in an existing folder. Return a descriptor that bypasses the page cache."""
    if not folder.is_dir():
        raise PlaceError(f"{folder} is not a folder, and state is to be offloaded there: make it, or name another one")
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    try:
        if num_bytes > free and status.f_blocks:  # checked first: a trial would fill the disk; 0: unknown
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with TemporaryFile(dir=folder, buffering=0) as file:
            if num_bytes:
                # If the file system cannot do it, the C library writes single bytes, which O_DIRECT would refuse.
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            enable_direct_io(file.fileno())
            return os.dup(file.fileno())
    except OSError as error:
        if error.errno in _FIXES:
            raise NoRoomError(
                f"{folder}: {num_bytes} bytes are needed for state that is offloaded to disk, and {free} are free there"
                f" ({error.strerror}): make room, name a folder on a larger disk, or offload less to disk"
            ) from error
        raise PlaceError(
            f"{folder}: no file of {num_bytes} bytes can be made there, and state is to be offloaded there "
            f"({error.strerror}): let it be written to, or name another folder"
        ) from error
