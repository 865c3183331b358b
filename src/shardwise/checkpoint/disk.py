"""Bytes to the disk, in order, with a checksum of every block.

Blocks go around the page cache where the file system lets them (O_DIRECT): the disk is then as fast as it can be, the
processor has nothing to copy, and what the run keeps in the cache stays there. While one block is being written, the
next is filled and summed.
"""

import errno
import fcntl
import mmap
import os
import threading
import zlib
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from .index import Check

BLOCK_BYTES = 8 << 20
# What O_DIRECT asks of lengths and addresses, on every disk that is sold.
_ALIGNMENT = 4096


class Stream:
    """A new file that is written from its beginning to its end."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._file = os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._file = os.open(path, flags, 0o666)
        self._blocks = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(2)]  # of whole pages, as O_DIRECT wants them
        self._rows = [torch.frombuffer(block, dtype=torch.uint8) for block in self._blocks]
        self._writing: _Writing | None = None
        self._filled = 0
        self.num_bytes = 0
        self.checks: list[Check] = []

    def write(self, content: Tensor) -> None:
        """The bytes of a tensor, from whatever device it is on."""
        for row in content.reshape(-1).view(torch.uint8).split(BLOCK_BYTES) if content.numel() else ():
            begin = 0
            while begin < row.numel():
                num = min(row.numel() - begin, BLOCK_BYTES - self._filled)
                self._rows[0][self._filled : self._filled + num].copy_(row[begin : begin + num])
                begin, self._filled = begin + num, self._filled + num
                if self._filled == BLOCK_BYTES:
                    self._send()

    def finish(self) -> None:
        """Wait until the disk has everything."""
        if self._filled:
            self._send()
        self._wait()
        os.ftruncate(self._file, self.num_bytes)
        os.fsync(self._file)

    def _send(self) -> None:
        block, num = self._blocks[0], self._filled
        with memoryview(block) as view:
            self.checks.append(Check(self.num_bytes, num, zlib.crc32(view[:num])))
        self._wait()
        self._writing = _Writing(self._file, block, num, self.num_bytes)
        self.num_bytes, self._filled = self.num_bytes + num, 0
        self._blocks.reverse()
        self._rows.reverse()

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.finish()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writing is not None:
            self._writing.join()
        os.close(self._file)


class _Writing(threading.Thread):
    """A block on its way to the disk. Not an executor's: those end with the main thread, and a save may outlive it."""

    def __init__(self, file: int, block: mmap.mmap, num_bytes: int, offset: int) -> None:
        super().__init__(name="shardwise-disk")
        self._write = partial(_write_at, file, block, num_bytes, offset)
        self._failure: OSError | None = None
        self.start()

    def run(self) -> None:
        try:
            self._write()
        except OSError as error:
            self._failure = error

    def finish(self) -> None:
        self.join()
        if self._failure is not None:
            raise self._failure


def _write_at(file: int, block: mmap.mmap, num_bytes: int, offset: int) -> None:
    # The end of the last block is filled up; the file is cut afterwards.
    end = min(-(-num_bytes // _ALIGNMENT) * _ALIGNMENT, len(block))
    done = 0
    with memoryview(block) as view:
        while done < end:
            try:
                done += os.pwrite(file, view[done:end], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
                    raise
                # Opened, but not written, this way.
                fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)


def write_pieces(path: Path, pieces: Iterable[tuple[int, Tensor]]) -> list[Check]:
    """Write into a file that is there, at these offsets, beside what others write into it."""
    checks = []
    staged = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
    file = os.open(path, os.O_WRONLY)
    try:
        for offset, content in pieces:
            for row in content.reshape(-1).view(torch.uint8).split(BLOCK_BYTES) if content.numel() else ():
                host = staged[: row.numel()].copy_(row).numpy().data
                checks.append(Check(offset, row.numel(), zlib.crc32(host)))
                done = 0
                while done < row.numel():
                    done += os.pwrite(file, host[done:], offset + done)
                offset += row.numel()
        os.fsync(file)
    finally:
        os.close(file)
    return checks
