"""Every scenario under every strategy: equal to one process, or refused in one sentence; never a hang."""

import pytest

from tests.harness import Pool
from tests.loops import catalogue  # noqa: F401  registers all scenarios
from tests.loops.frame import SCENARIOS, SETTINGS, Frame

QUICK = ("zero3",)
# Their units behave as those of zero2, zero3 and ddp do: every third scenario, others under each.
THINNED = ("shard_grad_op", "mapping")
RUNS = [
    pytest.param(setting, name, marks=() if setting in QUICK else pytest.mark.slow)
    for setting in SETTINGS
    for number, name in enumerate(SCENARIOS)
    if setting not in THINNED or (number + THINNED.index(setting)) % 3 == 0
]


@pytest.fixture(scope="module")
def frame(run_ranks: Pool) -> Frame:
    return Frame(run_ranks)


@pytest.mark.parametrize(("setting", "name"), RUNS)
def test_loop(frame: Frame, setting: str, name: str) -> None:
    outcome = frame.run(name, setting, sure=True)
    assert outcome.passes, f"{outcome}\n{outcome.detail}"
