"""Every scenario under every strategy: equal to one process, or refused in one sentence; never a hang."""

import pytest

from tests.harness import Pool
from tests.loops import catalogue  # noqa: F401  registers all scenarios
from tests.loops.frame import SCENARIOS, SETTINGS, Frame

QUICK = ("zero3",)


@pytest.fixture(scope="module")
def frame(run_ranks: Pool) -> Frame:
    return Frame(run_ranks)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize(
    "setting", [pytest.param(s, marks=() if s in QUICK else pytest.mark.slow) for s in SETTINGS], scope="module"
)
def test_loop(frame: Frame, setting: str, name: str) -> None:
    outcome = frame.run(name, setting, sure=True)
    assert outcome.passes, f"{outcome}\n{outcome.detail}"
