"""A rank that announces an event is apart from a rank with another event there, and from no other."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.base.processes import state_of
from shardwise.core.wire.collective_order import Event
from shardwise.core.wire.ledger import Call
from shardwise.core.wire.rank_watch import DEAD, Doing, State, checksum_of, describe, difference_from

SMALL: Event = (Call("all_gather", "world", "bfloat16", 1024, 2), "layers.0", 0)
LARGE: Event = (Call("all_gather", "world", "bfloat16", 2048, 2), "layers.0", 0)
STEP: Event = ("optimizer.step()", 0)
AT = 7  # events that the asking rank has passed


def peer(passed: list[Event], doing: Doing = "code", announces: Event | None = None) -> State:
    """A rank that has passed these events from number AT on."""
    recent = [(AT + index, checksum_of(AT + index, event), describe(event)) for index, event in enumerate(passed)]
    number = AT + len(passed)
    announced = 0 if announces is None else checksum_of(number, announces)
    what = "" if announces is None else describe(announces)
    return State(1, doing, what, 0.0, announced, number, recent, "", 0.0, [], [])


# It has passed many more events than it can name.
FAR_AHEAD = replace(peer([]), passed=AT + 500, recent=[(AT + 499, checksum_of(AT + 499, STEP), describe(STEP))])


@pytest.mark.parametrize(
    "state",
    [
        peer([]),
        peer([], "announcing", SMALL),
        peer([SMALL]),  # all have announced it; the asking rank had no processor since then
        peer([SMALL, STEP], "announcing", LARGE),
        FAR_AHEAD,
    ],
)
def test_ranks_that_do_the_same(state: State) -> None:
    assert not difference_from(checksum_of(AT, SMALL), AT, {1: state}, is_overdue=False)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (peer([], "announcing", STEP), "rank 1 wants to continue with optimizer.step()"),
        (peer([], "announcing", LARGE), "rank 1 wants to continue with all_gather of layers.0"),
        (peer([STEP]), "rank 1 went on with optimizer.step()"),
        (peer([LARGE, SMALL], "collective"), "rank 1 went on with all_gather of layers.0"),
    ],
)
def test_ranks_that_differ(state: State, words: str) -> None:
    assert words in difference_from(checksum_of(AT, SMALL), AT, {1: state}, is_overdue=False)


def test_a_rank_far_ahead_differs_from_one_that_has_waited_long() -> None:
    assert "rank 1 went on with something else" in difference_from(checksum_of(AT, SMALL), AT, {1: FAR_AHEAD}, True)
    assert not difference_from(checksum_of(AT, SMALL), AT, {1: peer([SMALL])}, True)
    assert not difference_from(checksum_of(AT, SMALL), AT, {1: peer([])}, True)


def test_a_process_whose_state_cannot_be_read_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert state_of(os.getpid()) in ("R", "S")
    assert state_of(2**30) == ""

    def no_descriptor_is_left(*_: object) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_text", no_descriptor_is_left)
    assert state_of(os.getpid()) not in DEAD
