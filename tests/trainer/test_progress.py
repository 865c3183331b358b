"""What is shown while a run goes on, on a terminal and in a log."""

import io
import sys
import time

import pytest

from shardwise.trainer import metrics as module
from shardwise.trainer.metrics import REFRESHES_PER_S, Progress

ROW = {
    "step": 10,
    "loss": 2.5,
    "learning_rate": 3e-4,
    "grad_norm": 0.75,
    "tokens_per_s": 12345.6,
    "mfu": 0.421,
    "memory_now": 1.2e9,
    "memory_peak": 1.35e9,
    "memory_planned": 1.1e9,
    "epoch": 0.3,  # nobody's business
}


class Clock:
    """Stands for time.monotonic."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(module.time, "monotonic", found)
    return found


def test_a_plain_line_for_each_row(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    with Progress(200, is_terminal=False) as progress:
        progress.advance(1)
        clock.seconds = 9.0
        progress.update(ROW)
        progress.update({"step": 10, "eval_loss": 2.25, "eval_perplexity": 9.4877})
        progress.say("saved [here]")
        progress.update({"step": 200, "loss": 12.25, "mfu": None})
    assert capsys.readouterr().out.splitlines() == [
        "step  10/200  loss  2.5000  lr 3.00e-04  norm   0.750   12,346 tok/s  MFU 42.1%  peak 1.35 GB  3:10 left",
        "step  10/200  eval loss 2.2500  perplexity 9.49",
        "saved [here]",
        "step 200/200  loss 12.2500",
    ]


def test_time_left_is_that_of_this_start_without_its_first_step(clock: Clock) -> None:
    progress = Progress(100, first_step=50, is_terminal=False)
    assert progress._time_left() == []
    clock.seconds = 60.0  # compiling
    progress.advance(51)
    assert progress._time_left() == []
    clock.seconds = 70.0
    progress.advance(61)
    assert progress._time_left() == ["0:39 left"]
    progress.advance(100)
    assert progress._time_left() == []


def test_numbers_that_come_late_do_not_turn_the_bar_back() -> None:
    progress = Progress(100, is_terminal=False, is_shown=False)
    progress.advance(12)
    progress.update({"step": 10, "loss": 1.0})
    assert progress._step == 12


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(200, is_terminal=True, is_shown=False) as progress:
        progress.update(ROW)
        progress.say("hello")
    assert capsys.readouterr() == ("", "")


def test_a_live_block_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(200, is_terminal=True) as progress:
        for step in range(1, 301):
            progress.advance(min(step, 100))
            time.sleep(0.001)
        progress.update({**ROW, "step": 100, "eval_loss": 2.0})
        progress.say("saved [here]")
        print("printed by somebody else")
    out = capsys.readouterr().out
    for words in (
        "step 100/200", "50%", "loss  2.5000", "eval loss 2.0000", "12,346 tok/s", "MFU 42.1%", "saved [here]",
        "now 1.20 GB  peak 1.35 GB  planned 1.10 GB", "printed by somebody else",
    ):  # fmt: skip
        assert words in out
    # The first, the last, what was said above it, and four a second between: not one for each of 300 steps.
    assert out.count("/200") < 10 * REFRESHES_PER_S


def test_ascii_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal in (False, True):
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
        with Progress(200, is_terminal=is_terminal) as progress:
            progress.update(ROW)
            progress.say("größer …")
        sys.stdout.flush()
        assert b"gr??er ?" in written.getvalue()


def test_a_row_that_is_not_a_number_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    Progress(9, is_terminal=False).update({"step": 9, "loss": float("nan"), "grad_norm": float("inf")})
    assert capsys.readouterr().out == "step 9/9  loss     nan  norm     inf\n"
