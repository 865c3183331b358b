"""Disks of our own, to be filled, shortened and broken."""

import subprocess
from collections.abc import Callable, Iterator
from ctypes import CDLL
from pathlib import Path

import pytest

from shardwise.base.files import ALIGNMENT
from shardwise.core.native import checked_io
from shardwise.core.native import library as compiler
from shardwise.core.offload import disk

Mount = Callable[..., Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """`mount(kind, options, what)` makes a file system, which is gone after the test; only root may."""
    mounted: list[Path] = []

    def mount(kind: str, options: str = "", what: Path | str = "none") -> Path:
        place = tmp_path / f"{kind}-{len(mounted)}"
        place.mkdir()
        words = ["mount", "-t", kind, *(["-o", options] if options else []), str(what), str(place)]
        try:
            subprocess.run(words, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"mounting needs root: {error}")
        mounted.append(place)
        return place

    yield mount
    for place in reversed(mounted):
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    """So that a few pages are many blocks; returns what has one checksum."""
    for module in (checked_io, disk):
        monkeypatch.setattr(module, "CHECK_BYTES", 2 * ALIGNMENT)
    monkeypatch.setattr(disk, "PART_BYTES", 6 * ALIGNMENT)
    return 2 * ALIGNMENT


@pytest.fixture(params=["python", "c"])
def library(request: pytest.FixtureRequest) -> CDLL | None:
    if request.param == "python":
        return None
    built = compiler.library()
    if built is None:
        pytest.skip("there is no C compiler")
    return built
