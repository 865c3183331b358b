"""How the benches end when they are told to."""

import signal
from pathlib import Path

import pytest

from shardwise.cli.bench_end import end_on_sigterm, interrupted


def test_an_interruption_tells_where_the_results_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    assert interrupted(page).exit_code == 130
    assert capsys.readouterr().err.endswith("stopped, and nothing was written\n")
    page.write_text("")
    assert interrupted(page).exit_code == 130
    assert capsys.readouterr().err.endswith(f"what was seen is in {page}\n")


def test_sigterm_is_an_exception() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        end_on_sigterm()
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 143
