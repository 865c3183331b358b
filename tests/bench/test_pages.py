"""Pages of the benchmarks: the text, the JSON next to it, and the names of the files."""

import datetime
import json
import sys
from pathlib import Path

import pytest

from benchmarks.pages import benchmark_page, show, spread, table, write
from shardwise.bench.pages import Page

BEGAN = datetime.datetime(2026, 3, 4, 5, 6)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    monkeypatch.setattr(sys, "argv", ["disk_store.py", "--folder", "my disk"])
    return benchmark_page(
        "disk_store",
        "Disks",
        BEGAN,
        machine={"cores": 2, "torch": "2.13"},
        figures={"runs": [1, 2]},
        before=["How to read it."],
        after=["| a |\n|---|\n| 1 |", "The end."],
    )


def test_a_page_has_the_command_and_the_machine(page: Page) -> None:
    assert str(page) == (
        "# Disks, 2026-03-04 05:06\n\nHow to read it.\n\n    python -m benchmarks.disk_store --folder 'my disk'\n\n"
        "cores 2, torch 2.13\n\n| a |\n|---|\n| 1 |\n\nThe end.\n"
    )


def test_files_are_named_after_date_and_benchmark(page: Page, tmp_path: Path) -> None:
    path = write(page, tmp_path / "new", "cpu")
    assert path == tmp_path / "new" / "2026-03-04-0506-disk-store-cpu.md"
    assert path.read_text() == str(page)
    assert json.loads(path.with_suffix(".json").read_text()) == {
        "schema": 1,
        "command": "python -m benchmarks.disk_store --folder 'my disk'",
        "date": "2026-03-04 05:06",
        "machine": {"cores": 2, "torch": "2.13"},
        "runs": [1, 2],
    }


def test_nothing_is_written_without_a_folder(page: Page, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(page, None)
    assert capsys.readouterr().out == f"{page}\n"
    show(page, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_tables_and_spreads() -> None:
    assert table(("a", "b"), [(1, "x"), (2, "y")]) == "| a | b |\n|---|---|\n| 1 | x |\n| 2 | y |"
    assert spread([3.0, 1.0, 2.0]) == "2.00 (1.00-3.00)"
    assert spread(iter([0.25]), digits=1) == "0.2 (0.2-0.2)"
