"""Bytes are on the disk as they were given, whichever way the file system lets them go there."""

import errno
import fcntl
import mmap
import os
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.base.files import ALIGNMENT, enable_direct_io, read_at
from shardwise.checkpoint import tensor_files
from shardwise.checkpoint.index import Check, File
from shardwise.checkpoint.tensor_files import BLOCK_BYTES, check_bytes, write_pieces, write_stream
from tests.harness import num_open_files

BLOCK, CHECKED = 8192, 4096


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", BLOCK)


def stream(path: Path, rows: list[Tensor]) -> File:
    return write_stream(path, rows, CHECKED)


def summed(content: bytes) -> tuple[Check, ...]:
    blocks = [content[at : at + CHECKED] for at in range(0, len(content), CHECKED)]
    return tuple(Check(CHECKED * number, len(block), zlib.crc32(block)) for number, block in enumerate(blocks))


def bytes_of(rows: list[Tensor]) -> bytes:
    return b"".join(row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for row in rows if row.numel())


ROWS = [
    torch.arange(3),
    torch.rand(0),
    torch.rand(3 * BLOCK + 5),
    torch.tensor(True),
    torch.rand(77, 50).t(),
    torch.rand(BLOCK).to(torch.bfloat16),
]


def refuse_at_open(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def refusing(file: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(file, command, value)

    monkeypatch.setattr(fcntl, "fcntl", refusing)


def refuse_at_write(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def refusing(file: int, content: Any, offset: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(file, content, offset)

    monkeypatch.setattr(os, "pwrite", refusing)


def refuse_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def refusing(file: int, buffers: Any, offset: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing)


def write_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than was asked for, as a disk that is nearly full or a signal does it."""
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, content, offset: real(file, content[:4096], offset))


WAYS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "around the cache": lambda _: None,
    "refused at open": refuse_at_open,
    "refused at the first write": refuse_at_write,
    "little by little": write_little,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_file_is_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    WAYS[way](monkeypatch)
    written = stream(tmp_path / "file", ROWS)
    content = (tmp_path / "file").read_bytes()
    assert content == bytes_of(ROWS)
    assert written.num_bytes == len(content)
    assert written.checks == summed(content)


def test_threads_that_are_refused_at_once_all_go_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second finds that the first has turned to the cache already, and is refused for the same reason."""
    real, meet = os.pwrite, threading.Barrier(2, timeout=20)

    def is_direct(file: int) -> bool:
        return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)

    def refusing(file: int, content: Any, offset: int) -> int:
        if is_direct(file) and offset < 2 * BLOCK:
            is_second = meet.wait() == 1
            while is_second and is_direct(file):
                time.sleep(0.001)
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(file, content, offset)

    monkeypatch.setattr(os, "pwrite", refusing)
    row = torch.rand(BLOCK // 2)
    stream(tmp_path / "file", [row])
    assert (tmp_path / "file").read_bytes() == bytes_of([row])


def test_memory_is_a_file_system_too() -> None:
    """A tmpfs, which has no O_DIRECT on older kernels."""
    shm = Path("/dev/shm") / f"shardwise-test-{os.getpid()}"
    try:
        written = stream(shm, ROWS)
        assert shm.read_bytes() == bytes_of(ROWS)
        assert written.checks == summed(bytes_of(ROWS))
    finally:
        shm.unlink(missing_ok=True)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 3 * BLOCK), max_size=5))
def test_any_lengths(tmp_path_factory: pytest.TempPathFactory, lengths: list[int]) -> None:
    rows = [torch.randint(256, (length,), dtype=torch.uint8) for length in lengths]
    path = tmp_path_factory.getbasetemp() / "any"
    written = stream(path, rows)
    assert path.read_bytes() == bytes_of(rows)
    assert written.checks == summed(bytes_of(rows))


def test_what_was_there_before_is_gone(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(5 * BLOCK))
    stream(tmp_path / "file", [torch.ones(3)])
    assert (tmp_path / "file").stat().st_size == 12


@pytest.mark.parametrize("num_blocks", [1, 5])
def test_a_full_disk_is_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_blocks: int) -> None:
    """In the background as in the last block; and nothing stays open."""
    real = os.pwrite

    def full(file: int, content: Any, offset: int) -> int:
        if offset >= (num_blocks - 1) * BLOCK:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, content, offset)

    before = num_open_files()
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        stream(tmp_path / "file", [torch.rand(num_blocks * BLOCK // 4)])
    assert num_open_files() == before


def test_pieces_go_beside_what_others_write(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xff" * (5 * BLOCK))
    first, second = torch.rand(BLOCK // 2), torch.arange(5, dtype=torch.int16)
    checks = write_pieces(path, [(4 * BLOCK - 10, second), (3, first), (0, torch.empty(0))], BLOCK)
    content = path.read_bytes()
    assert len(content) == 5 * BLOCK
    assert content[3 : 3 + 2 * BLOCK] == bytes_of([first])
    assert content[4 * BLOCK - 10 : 4 * BLOCK] == bytes_of([second])
    assert set(content[:3] + content[3 + 2 * BLOCK : 4 * BLOCK - 10] + content[4 * BLOCK :]) == {0xFF}
    assert [(check.offset, check.num_bytes) for check in checks] == [
        (4 * BLOCK - 10, 10),
        (3, BLOCK),
        (3 + BLOCK, BLOCK),
    ]
    for check in checks:
        assert check.crc32 == zlib.crc32(content[check.offset : check.offset + check.num_bytes])


def test_there_are_many_checksums_but_never_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    sizes = [check_bytes(num_bytes) for num_bytes in (0, 1 << 20, 1 << 30, 3 << 30, 5 << 40)]
    assert [size >> 20 for size in sizes] == [1, 1, 1, 4, 8]
    assert all(BLOCK_BYTES % size == 0 and size % ALIGNMENT == 0 for size in sizes)


@pytest.mark.parametrize("refuse", [refuse_at_open, refuse_reads, lambda _: None])
def test_files_are_read_around_the_cache_or_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[pytest.MonkeyPatch], None]
) -> None:
    content = os.urandom(10_000)
    (tmp_path / "file").write_bytes(content)
    refuse(monkeypatch)
    file = os.open(tmp_path / "file", os.O_RDONLY)
    enable_direct_io(file)
    try:
        memory = mmap.mmap(-1, 4 * ALIGNMENT)
        with memoryview(memory) as view:
            assert read_at(file, view[:ALIGNMENT], ALIGNMENT) == ALIGNMENT
            assert view[:ALIGNMENT] == content[ALIGNMENT : 2 * ALIGNMENT]
            assert read_at(file, view, 0) == len(content)
            assert view[: len(content)] == content
            with pytest.raises(OSError, match="Invalid argument"):
                read_at(file, view, -ALIGNMENT)
    finally:
        os.close(file)
