"""One piece of memory, given out once, and pinned as a whole or not at all."""

import gc
import logging
import re
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardwise.base.errors import NoRoomError, StoreError
from shardwise.base.files import ALIGNMENT
from shardwise.core.offload import arena as arena_file
from shardwise.core.offload.arena import Arena
from shardwise.core.schedule.state_bytes import padded_bytes


def test_pieces_are_zero_aligned_and_apart() -> None:
    sizes = {torch.float32: 1025, torch.bfloat16: 3, torch.uint8: 0, torch.int64: 512}
    arena = Arena(padded_bytes(dtype.itemsize * num for dtype, num in sizes.items()), pin=False)
    pieces = [arena.take(num, dtype, f"{num} of {dtype}") for dtype, num in sizes.items()]
    assert arena.taken_bytes == arena.num_bytes
    for piece, (dtype, num) in zip(pieces, sizes.items(), strict=True):
        assert (piece.dtype, piece.shape) == (dtype, (num,))
        assert not piece.any()
        assert piece.data_ptr() % ALIGNMENT == 0 or not num
        assert arena.owns(piece)
        assert arena.owns(piece[1:])
    for number, piece in enumerate(pieces):
        piece.fill_(number + 1)
    assert [set(piece.tolist()) for piece in pieces] == [{1.0}, {2.0}, set(), {4}]
    assert not arena.is_pinned


def test_what_does_not_fit_is_named() -> None:
    arena = Arena(2 * ALIGNMENT, pin=False)
    arena.take(1, torch.float32, "gradients of layers.0")
    with pytest.raises(StoreError, match=r"moments of layers.0 needs 8192 bytes, and 4096 of 8192"):
        arena.take(1025, torch.float32, "moments of layers.0")
    arena.take(1024, torch.float32, "moments of layers.1")


def test_nothing_is_a_size_too() -> None:
    arena = Arena(0, pin=True)
    assert arena.take(0, torch.float32, "nothing").shape == (0,)
    assert not arena.owns(torch.empty(0))
    assert (arena.num_bytes, arena.taken_bytes, arena.is_pinned) == (0, 0, False)


def test_other_memory_is_not_its_own() -> None:
    arena = Arena(ALIGNMENT, pin=False)
    other = Arena(ALIGNMENT, pin=False)
    assert not arena.owns(other.take(5, torch.float32, "a piece"))
    assert not arena.owns(torch.ones(5))
    assert not arena.owns(torch.ones(5, device="meta"))


def test_its_tensors_outlive_it() -> None:
    piece = Arena(1 << 20, pin=False).take(1 << 18, torch.float32, "a piece")
    gc.collect()
    assert piece.fill_(3).sum() == 3 << 18


def test_memory_comes_with_its_use_in_huge_pages_and_not_to_children() -> None:
    arena = Arena(512 << 20, pin=False)
    piece = arena.take(128 << 20, torch.float32, "a piece")
    mapping = entry(piece.data_ptr())
    assert kilobytes(mapping, "Rss") == 0
    flags = re.search(r"^VmFlags: (.*)$", mapping, re.MULTILINE)
    assert flags is not None
    assert {"dc", "hg"} <= set(flags[1].split())
    piece[: 1 << 20].fill_(1)
    assert 4096 <= kilobytes(entry(piece.data_ptr()), "Rss") <= 6144


def entry(address: int) -> str:
    """What the kernel tells of the mapping that an address lies in."""
    entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    for each in entries[1:]:
        first, last = (int(bound, 16) for bound in each.split(maxsplit=1)[0].split("-"))
        if first <= address < last:
            return each
    raise AssertionError(f"{address:x} is not mapped")


def kilobytes(mapping: str, key: str) -> int:
    found = re.search(rf"^{key}: +(\d+) kB", mapping, re.MULTILINE)
    assert found is not None
    return int(found[1])


def test_a_refusal_of_the_system_says_how_much_was_asked_for() -> None:
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (num_pages * resource.getpagesize() + (1 << 30), before[1]))
    try:
        with pytest.raises(NoRoomError, match=r"refuses 17179869184 bytes of host memory .* \(ulimit -v\)"):
            Arena(1 << 34, pin=False)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# ---------------------------------------------------------------------------------------------------------
# pinning


class Runtime:
    """CUDA's, as far as it is asked."""

    cudaError = SimpleNamespace(success=0)  # noqa: N815

    def __init__(self, refuses: bool) -> None:
        self._refuses = refuses
        self.registered: list[tuple[int, int]] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        if self._refuses:
            return 2
        self.registered.append((address, num_bytes))
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.registered = [each for each in self.registered if each[0] != address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return f"error {error}"


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], Runtime]:
    def make(refuses: bool) -> Runtime:
        runtime = Runtime(refuses)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(arena_file, "_take_last_error", lambda: None)
        return runtime

    return make


def test_it_is_pinned_in_one_piece_until_it_is_forgotten(with_cuda: Callable[[bool], Runtime]) -> None:
    runtime = with_cuda(False)
    arena = Arena(3 * ALIGNMENT, pin=True)
    piece = arena.take(5, torch.float32, "a piece")
    assert arena.is_pinned
    assert runtime.registered == [(piece.data_ptr(), 3 * ALIGNMENT)]
    del arena
    gc.collect()
    assert runtime.registered == []


@pytest.mark.parametrize("has_cuda", [False, True])
def test_what_cannot_be_pinned_is_pageable_and_told_once(
    with_cuda: Callable[[bool], Runtime], caplog: pytest.LogCaptureFixture, has_cuda: bool
) -> None:
    if has_cuda:
        with_cuda(True)
    elif torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with caplog.at_level(logging.WARNING, "shardwise"):
        arena = Arena(3 * ALIGNMENT, pin=True)
    assert not arena.is_pinned
    arena.take(5, torch.float32, "a piece").fill_(1)
    (record,) = caplog.records
    told = record.getMessage()
    assert told.startswith("12288 bytes of host memory could not be pinned (")
    assert ("error 2" if has_cuda else "no CUDA device") in told
    assert "ulimit -l" in told


@pytest.mark.gpu
def test_copies_from_and_to_real_pinned_memory() -> None:
    arena = Arena(256 << 20, pin=True)
    assert arena.is_pinned
    row = arena.take(64 << 20, torch.float32, "a row")
    assert row.is_pinned()
    assert not row.any()
    there = torch.arange(row.numel(), device="cuda", dtype=torch.float32)
    row.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(row, torch.arange(row.numel(), dtype=torch.float32))
    del arena
    gc.collect()
    assert not row.is_pinned()
    assert row[-1] == row.numel() - 1


@pytest.mark.gpu
def test_a_real_refusal_leaves_no_error_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = torch.cuda.cudart()

    def twice(address: int, num_bytes: int, flags: int) -> int:
        runtime.cudaHostRegister(address, num_bytes, flags)
        return runtime.cudaHostRegister(address, num_bytes, flags)

    patched = SimpleNamespace(
        cudaHostRegister=twice, cudaError=runtime.cudaError, cudaGetErrorString=runtime.cudaGetErrorString
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: patched)
    arena = Arena(1 << 20, pin=True)
    assert not arena.is_pinned
    assert "could not be pinned" in caplog.text
    assert torch.ones(1000, device="cuda").sum() == 1000
    runtime.cudaHostUnregister(arena.take(1, torch.uint8, "a piece").data_ptr())
