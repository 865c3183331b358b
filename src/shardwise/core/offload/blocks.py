"""A file in blocks, each with a checksum that is made when it is written and compared whenever it is read."""

import ctypes
import mmap
from queue import SimpleQueue

from torch import Tensor

from ...base.direct_io import ALIGNMENT
from ...base.errors import StoreError
from ...base.intervals import round_up
from ..native.block_moves import Moves
from ..native.checksums import CHECK_BYTES
from .region import Part, Region


class Blocks:
    """`num_threads` threads may use it at once, none of them a block that another one writes."""

    def __init__(self, file: int, moves: Moves, num_threads: int) -> None:
        self._file = file
        self._moves = moves
        self._bounces: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(num_threads):
            self._bounces.put(memoryview(mmap.mmap(-1, CHECK_BYTES)))  # no memory before it is used

    def put(self, region: Region, part: Part, memory: memoryview) -> None:
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

    def fetch(self, region: Region, part: Part, memory: memoryview) -> None:
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
        region.sums[_blocks(start, memory)] = self._moves.write(self._file, memory, region.offset + start)

    def _read(self, region: Region, start: int, memory: memoryview) -> None:
        sums = self._moves.read(self._file, memory, region.offset + start)
        for number, (seen, written) in enumerate(zip(sums, region.sums[_blocks(start, memory)], strict=True)):
            if seen != written:
                begin = start + number * CHECK_BYTES
                end = min(begin + CHECK_BYTES, region.num_bytes)
                raise StoreError(f"the disk returned other bytes than were written, in bytes {begin} to {end}")


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host. The view does not keep them."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _blocks(start: int, memory: memoryview) -> slice:
    return slice(start // CHECK_BYTES, round_up(start + len(memory), CHECK_BYTES) // CHECK_BYTES)
