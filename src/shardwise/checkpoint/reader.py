"""Elements out of a checkpoint's files, whoever wrote them: only those that are wanted, and as they were written.

Where the index has checksums, bytes are read in the blocks that these were made of, and no block is used that has
changed. Memory: a block.
"""

import os
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from ..errors import DamageError
from ..shard import Interval
from .disk import BLOCK_BYTES
from .index import Check, File, Stored, parts_of

_MAX_OPEN = 64


class Reader:
    """The files of a checkpoint. They must be as long as the index says, or nothing of them is read."""

    def __init__(self, folder: Path, files: Sequence[File]) -> None:
        self._folder = folder
        self._files = files
        self._open: OrderedDict[int, int] = OrderedDict()  # descriptors, by number of file
        self._staged = bytearray(BLOCK_BYTES)
        self._row = torch.frombuffer(self._staged, dtype=torch.uint8)
        self._held: tuple[int, Check] | None = None  # the block that is staged, and was found good

    def read(self, stored: Stored, start: int, into: Tensor) -> None:
        """Fill the row `into` with elements of a tensor, from its element `start` on; dtypes are converted."""
        dtype = stored.torch_dtype
        for part in parts_of(stored, Interval(start, start + into.numel())):
            row = into[part.at : part.at + part.num_elems]
            at = 0
            for content in self._bytes(
                part.piece.file, part.piece.offset + part.first * dtype.itemsize, part.num_elems * dtype.itemsize
            ):
                if content.numel() % dtype.itemsize:
                    raise DamageError(f"{self._path(part.piece.file)}: a checksum ends inside an element")
                values = content.view(dtype) if _is_aligned(content, dtype) else content.clone().view(dtype)
                row[at : at + values.numel()].copy_(values)
                at += values.numel()

    def read_whole(self, stored: Stored) -> Tensor:
        row = torch.empty(stored.num_elems, dtype=stored.torch_dtype)
        self.read(stored, 0, row)
        return row.view(stored.shape)

    def require_good(self, number: int) -> None:
        """Read a file from its beginning to its end, and compare every block."""
        for _ in self._bytes(number, 0, self._files[number].num_bytes):
            pass

    def require_length(self, number: int) -> None:
        """That a file is there, as long as it was; without opening it."""
        try:
            self._compare_length(number, self._path(number).stat().st_size)
        except OSError as error:
            raise DamageError(f"cannot read {self._path(number)}: {error.strerror or error}") from error

    def _bytes(self, number: int, offset: int, num_bytes: int) -> Iterator[Tensor]:
        """Bytes of a file, a block or a part of one at a time; each is gone when the next is asked for."""
        end = offset + num_bytes
        while offset < end:
            block = self._block_at(number, offset, end)
            stop = min(end, block.offset + block.num_bytes)
            yield self._row[offset - block.offset : stop - block.offset]
            offset = stop

    def _block_at(self, number: int, offset: int, end: int) -> Check:
        """Stage the block that holds the byte at `offset`; without checksums, as much as fits."""
        checks = self._files[number].checks
        if not checks:
            block = Check(offset, min(end - offset, BLOCK_BYTES), 0)
            self._held = None
            self._stage(number, block)
            return block
        block = checks[bisect_right(checks, offset, key=lambda check: check.offset) - 1]
        if self._held != (number, block):
            self._held = None
            if zlib.crc32(self._stage(number, block)) != block.crc32:
                raise DamageError(
                    f"{self._path(number)} is damaged: bytes {block.offset} to {block.offset + block.num_bytes} are "
                    "not those that were written"
                )
            self._held = (number, block)
        return block

    def _stage(self, number: int, block: Check) -> memoryview:
        if block.num_bytes > len(self._staged):
            raise DamageError(f"{self._path(number)}: a checksum over {block.num_bytes} bytes; at most {BLOCK_BYTES}")
        view = memoryview(self._staged)[: block.num_bytes]
        done = 0
        try:
            file = self._opened(number)
            while done < len(view):
                num = os.preadv(file, [view[done:]], block.offset + done)
                if num == 0:
                    raise DamageError(f"{self._path(number)} ends at byte {block.offset + done}: it was truncated")
                done += num
        except OSError as error:
            raise DamageError(f"cannot read {self._path(number)}: {error.strerror or error}") from error
        return view

    def _opened(self, number: int) -> int:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        if len(self._open) == _MAX_OPEN:
            os.close(self._open.popitem(last=False)[1])
        file = self._open[number] = os.open(self._path(number), os.O_RDONLY)
        self._compare_length(number, os.fstat(file).st_size)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return file

    def _compare_length(self, number: int, seen: int) -> None:
        if seen != self._files[number].num_bytes:
            raise DamageError(
                f"{self._path(number)} is {seen} bytes long, and was written with {self._files[number].num_bytes}"
            )

    def _path(self, number: int) -> Path:
        return self._folder / self._files[number].name

    def __enter__(self) -> "Reader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def _is_aligned(content: Tensor, dtype: torch.dtype) -> bool:
    return content.data_ptr() % dtype.itemsize == 0 and content.storage_offset() % dtype.itemsize == 0
