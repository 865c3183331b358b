"""The end of a benchmark: what it prints and writes, complete or interrupted."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.bench.pages import Page, results_page
from shardwise.cli.bench import run_benchmark
from shardwise.cli.shared import exit_on_sigterm


def report(*problems: str) -> Page:
    return results_page("title", {"cores": 2}, {"rows": []}, [("a note", {"name": ["a"], "value": ["1"]})], problems)


def interrupted(*before: Page) -> Iterator[Page]:
    yield from before
    raise KeyboardInterrupt


def test_an_interrupted_benchmark_says_where_its_results_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    assert run_benchmark(interrupted(), lambda: page, as_json=False).exit_code == 130
    assert capsys.readouterr().err.endswith("stopped, and nothing was written\n")
    assert run_benchmark(interrupted(report()), lambda: page, as_json=False).exit_code == 130
    assert capsys.readouterr().err.endswith(f"the results so far are in {page}\n")
    assert page.read_text().startswith("# title")


def test_the_exit_code_tells_of_problems(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_benchmark([report()], None, as_json=True).exit_code == 0
    assert json.loads(capsys.readouterr().out)["note"] == "a note"
    assert run_benchmark([report("a failed")], None, as_json=False).exit_code == 1
    assert "a failed" in capsys.readouterr().out


def test_sigterm_is_an_exception() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        exit_on_sigterm()
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 143
