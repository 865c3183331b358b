"""Every scenario under every kind of strategy: equal to one process, or refused in one sentence; never a hang."""

import pytest

from tests.harness import Pool
from tests.loops import catalogue  # noqa: F401  registers all scenarios
from tests.loops.frame import SCENARIOS, SETTINGS, Frame

QUICK = "zero3"  # every third scenario with every change
ALWAYS = ("zero3", "ddp")
# Strategies that share most of their code take turns: a scenario runs under one of the two, and under both where one
# of them may refuse what the other must do.
TURNS = (("zero1", "zero2"), ("shard_grad_op", "mapping"), ("hsdp", "zero3_offload"))


def settings_of(number: int, name: str) -> list[str]:
    must_equal = SCENARIOS[name].must_equal
    chosen = list(ALWAYS)
    for pair in TURNS:
        chosen += pair if len(must_equal & set(pair)) == 1 else [pair[number % 2]]
    return chosen


RUNS = [
    pytest.param(setting, name, marks=() if setting == QUICK and number % 3 == 0 else pytest.mark.slow)
    for setting in SETTINGS
    for number, name in enumerate(SCENARIOS)
    if setting in settings_of(number, name)
]


def test_every_strategy_has_its_turn() -> None:
    assert {*ALWAYS, *(setting for pair in TURNS for setting in pair)} == set(SETTINGS)


@pytest.fixture(scope="module")
def frame(run_ranks: Pool) -> Frame:
    return Frame(run_ranks)


@pytest.mark.parametrize(("setting", "name"), RUNS)
def test_loop(frame: Frame, setting: str, name: str) -> None:
    outcome = frame.run(name, setting, sure=True)
    assert outcome.passes, f"{outcome}\n{outcome.detail}"
