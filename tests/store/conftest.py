"""Disks of our own, to be filled, shortened and broken."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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
