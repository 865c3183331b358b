"""The frame says what came out of a scenario, and nothing passes that should not."""

import pytest
import torch

from tests.harness import Ending
from tests.loops import catalogue  # noqa: F401  registers all scenarios
from tests.loops.frame import KINDS, SCENARIOS, Kind, Outcome, Raised, Record, judge, place, table

ALONE = Record(losses=[1.0, 0.5], values=[torch.tensor(2.0)], weights={"0:w": torch.ones(3)})
OURS = Raised("ours", "StateError: parameters cannot be written here: use sw.whole", "...")
THEIRS = Raised("other", "TypeError: 'NoneType' object is not callable", "...")
USERS = Raised("user", "UserError: a file could not be read", "...")


def record(losses: tuple[float, ...] = (1.0, 0.5), value: float = 2.0, weight: float = 1.0) -> Record:
    return Record(list(losses), [torch.tensor(value)], [], {"0:w": torch.full((3,), weight)})


def ended(*values: Record | Raised | str) -> list[Ending]:
    """One ending for each rank: a value that came back, or how the rank was lost."""
    return [
        Ending(rank, value, 1.0, detail='File "/x/src/shardwise/wire.py", line 3 in wait')
        if isinstance(value, str)
        else Ending(rank, "returned", 1.0, value=value)
        for rank, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("endings", "kind"),
    [
        (ended(record(), record()), "equal"),
        (ended(record((1.5, 0.5)), record((0.5, 0.5))), "equal"),  # losses are averaged over the ranks
        (ended(record((1.5, 0.5)), record()), "wrong"),
        (ended(record((1.0,)), record((1.0,))), "wrong"),
        (ended(record(value=2.1), record()), "wrong"),
        (ended(record(), record(weight=1.001)), "wrong"),
        (ended(record(), record(weight=float("nan"))), "wrong"),
        (ended(OURS, OURS), "refused"),
        (ended(OURS, USERS), "refused"),
        (ended(OURS, record()), "wrong"),  # some ranks go on
        (ended(OURS, THEIRS), "obscure"),
        (ended(Raised("ours", "StateError: no", ""), OURS), "obscure"),  # no sentence
        (ended(OURS, "hung"), "hang"),
        (ended(record(), "died"), "abort"),
    ],
)
def test_judgement(endings: list[Ending], kind: Kind) -> None:
    assert judge(endings, ALONE, 1e-5)[0] == kind


def test_what_must_be_equal_may_not_be_refused() -> None:
    by_must = {bool(chosen.must_equal): name for name, chosen in SCENARIOS.items()}
    for must, name in by_must.items():
        passing = [kind for kind in KINDS if Outcome(name, "zero3", kind).passes]
        assert passing == (["equal"] if must else ["equal", "refused"])


def test_table_lists_all_that_is_not_equal() -> None:
    outcomes = [Outcome("plain", "ddp", "equal"), Outcome("plain", "zero3", "hang", "rank 0 in wire.py:3 wait")]
    text = table(outcomes)
    assert "rank 0 in wire.py:3 wait" in text
    assert [line.split()[1:] for line in text.splitlines() if line.startswith("all")] == [list("1000101")]


def test_place_is_the_innermost_line_of_ours() -> None:
    stacks = (
        'Thread 0x1:\n  File "/a/src/other.py", line 1 in idle\nCurrent thread 0x2:\n'
        '  File "/lib/torch/wait.py", line 9 in wait\n  File "/a/src/shardwise/wire.py", line 3 in finish\n'
    )
    assert place(stacks) == "src/shardwise/wire.py:3 finish"
