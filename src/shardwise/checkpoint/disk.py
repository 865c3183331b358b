"""Write bytes to the disk, with checksums.

The writes bypass the page cache where the file system allows it. While one block is being filled, others are summed and
written.
"""

import mmap
import os
import threading
import zlib
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from ..base.direct_io import ALIGNMENT, open_direct, write_at
from .index import Check

BLOCK_BYTES = 8 << 20
_NUM_BLOCKS = 4
_MIN_CHECK_BYTES, _MOST_CHECKS = 1 << 20, 1024


def check_bytes(num_bytes: int) -> int:
    """Return how many bytes of a file of this size share a checksum.

    All of them are read for a single element, so they should be few; but the index of a large file must stay short.
    """
    size = _MIN_CHECK_BYTES
    while size < BLOCK_BYTES and num_bytes > _MOST_CHECKS * size:
        size *= 2
    return min(size, BLOCK_BYTES)


class Stream:
    """A new file that is written from its beginning to its end. `check_bytes`: None writes no checksums."""

    def __init__(self, path: Path, check_bytes: int | None) -> None:
        self._check_bytes = check_bytes
        self._file = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        # The first is being filled, the second is the oldest.
        self._blocks = deque(_Block() for _ in range(_NUM_BLOCKS))
        self._filled = 0
        self.num_bytes = 0
        self.checks: list[Check] = []

    def write(self, content: Tensor) -> None:
        """Write the bytes of a tensor, which may be on any device."""
        for row in content.reshape(-1).view(torch.uint8).split(BLOCK_BYTES) if content.numel() else ():
            begin = 0
            while begin < row.numel():
                num = min(row.numel() - begin, BLOCK_BYTES - self._filled)
                self._blocks[0].row[self._filled : self._filled + num].copy_(row[begin : begin + num])
                begin, self._filled = begin + num, self._filled + num
                if self._filled == BLOCK_BYTES:
                    self._send()

    def finish(self) -> None:
        """Wait until the disk has everything."""
        if self._filled:
            self._send()
        for _ in range(len(self._blocks)):
            self._finish_oldest()
        os.ftruncate(self._file, self.num_bytes)
        os.fsync(self._file)

    def _send(self) -> None:
        self._blocks[0].start(self._file, self._filled, self.num_bytes, self._check_bytes)
        self.num_bytes, self._filled = self.num_bytes + self._filled, 0
        self._finish_oldest()

    def _finish_oldest(self) -> None:
        self._blocks.rotate(-1)
        self.checks += self._blocks[0].finish()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exception: object) -> None:
        for block in self._blocks:
            block.wait()
        os.close(self._file)


class _Block:
    """Memory for some bytes, and the thread that sums them and brings them to the disk.

    Not an executor's thread: those end with the main thread, and a save may outlive it.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, BLOCK_BYTES)  # of whole pages, as O_DIRECT wants them
        self.row = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._thread: threading.Thread | None = None
        self._checks: list[Check] = []
        self._failure: Exception | None = None

    def start(self, file: int, num_bytes: int, offset: int, check_bytes: int | None) -> None:
        thread = threading.Thread(
            target=self._write, args=(file, num_bytes, offset, check_bytes), name="shardwise-disk"
        )
        thread.start()
        self._thread = thread  # one that could not be started is not waited for

    def finish(self) -> list[Check]:
        """Wait for the write, and return the checksums since the last call."""
        self.wait()
        checks, self._checks = self._checks, []
        if self._failure is not None:
            raise self._failure
        return checks

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _write(self, file: int, num_bytes: int, offset: int, check_bytes: int | None) -> None:
        # The end of the last block is padded; the file is truncated afterwards.
        end = min(-(-num_bytes // ALIGNMENT) * ALIGNMENT, len(self._memory))
        with memoryview(self._memory) as view:
            try:
                if check_bytes is not None:
                    self._checks = [
                        Check(offset + at, len(part), zlib.crc32(part))
                        for at in range(0, num_bytes, check_bytes)
                        for part in (view[at : min(num_bytes, at + check_bytes)],)
                    ]
                write_at(file, view[:end], offset)
            except Exception as error:  # noqa: BLE001  whatever it is, it is raised where the file is finished
                self._failure = error


def write_pieces(path: Path, pieces: Iterable[tuple[int, Tensor]], check_bytes: int) -> list[Check]:
    """Write into an existing file at these offsets, while other ranks write elsewhere in it."""
    checks = []
    staged = torch.empty(check_bytes, dtype=torch.uint8)
    file = os.open(path, os.O_WRONLY)
    try:
        for offset, content in pieces:
            for row in content.reshape(-1).view(torch.uint8).split(check_bytes) if content.numel() else ():
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
