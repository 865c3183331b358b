"""A named row of bytes in a disk's file: where it lies, what of it was written, and the checksums of that."""

import threading
from dataclasses import dataclass, field

from ...base.direct_io import ALIGNMENT
from ...base.errors import StoreError
from ...base.intervals import round_up
from ..native.checksums import CHECK_BYTES

# What a thread reads or writes at once.
BLOCK_BYTES = 16 << 20


class Pending:
    """A put or a fetch that was started. Until it is done, its tensor's memory is the disk's."""

    def __init__(self, start: int, stop: int, is_put: bool, num_parts: int) -> None:
        # Of whole blocks: to write a part of one, the rest of it is read.
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
        """Wait, and leave it to others to ask how it went."""
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
class Part:
    """Bytes of a region that one thread moves: whole blocks, from where they are; or, when it is not all of a block or
    O_DIRECT cannot use the memory, at most one block, which is copied."""

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
        """Returns what it has to wait for."""
        earlier = [each for each in self.under_way() if pending.must_follow(each)]
        self._under_way.append(pending)
        return earlier

    def block_around(self, at: int) -> tuple[int, int]:
        start = at // CHECK_BYTES * CHECK_BYTES
        return start, min(start + CHECK_BYTES, self.num_bytes)

    def parts(self, start: int, stop: int, address: int) -> list[Part]:
        """These bytes, which lie in memory at this address, in pieces for threads."""
        found = []
        while start < stop:
            part = self._next_part(start, stop, address)
            found.append(part)
            address += part.stop - start
            start = part.stop
        return found

    def _next_part(self, start: int, stop: int, address: int) -> Part:
        if start % CHECK_BYTES == 0 and address % ALIGNMENT == 0:
            end = min(start + BLOCK_BYTES, stop)
            if end != self.num_bytes or end % ALIGNMENT:
                end = end // CHECK_BYTES * CHECK_BYTES
            if end > start:
                return Part(start, end, is_whole=True)
        return Part(start, min(stop, self.block_around(start)[1]), is_whole=False)
