"""What the planner says of other engines, and what they need: FSDP1, FSDP2 and DeepSpeed on two ranks.

State at rest is exact but for padding. The peak before the optimizer's step is within 3 %: a bucket is full in the
middle of a unit, where fewer activations and gradients are left than the plan assumes. With small buckets, the peak of
DeepSpeed's step is that of the update, and exact.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.planner_engines import SMALL, WIDE_ENDS, case_of, peaks, planned_memory, tracked
from shardwise.bench.case import Case
from shardwise.planner.cost.peak import GRADS, OPTIMIZER, PARAMS, REDUCE, Memory
from tests.harness import Pool
from tests.support.deepspeed import DeepSpeed

pytestmark = [pytest.mark.slow, pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

EXACT, CLOSE = 0.002, 0.03


@pytest.fixture(scope="module")
def on_deepspeed() -> Iterator[DeepSpeed]:
    """Ranks of its own: DeepSpeed keeps tensors of engines that other tests have used."""
    world = DeepSpeed()
    yield world
    world.close()


# Stage 3 without room for the whole model: it gathers, releases and gathers again.
NARROW = {"stage3_max_live_parameters": 4 * 10**6, "stage3_max_reuse_distance": 4 * 10**6}


def resting_bytes(memory: Memory) -> int:
    first = memory.instants[0].num_bytes
    return sum(first[kind] for kind in (PARAMS, OPTIMIZER, GRADS, REDUCE))


def assert_as_planned(seen: dict[str, int], memory: Memory, rest: int = 0) -> None:
    before, peak = peaks(memory)
    assert resting_bytes(memory) + rest == pytest.approx(seen["rest"], rel=EXACT)
    assert before == pytest.approx(seen["before"], rel=CLOSE)
    assert peak == pytest.approx(seen["peak"], rel=EXACT if peak > before else CLOSE)


def small(contender: str, **settings: Any) -> Case:
    return case_of(contender, "cpu", SMALL, "", **settings)


@pytest.mark.parametrize("settings", [{}, {"reduce": "fp32"}, {"precision": "fp32", "reduce": "fp32"}], ids=str)
@pytest.mark.parametrize("contender", ["fsdp1", "fsdp2"])
def test_fsdp(run_ranks: Pool, contender: str, settings: dict[str, Any]) -> None:
    case = case_of(contender, "cpu", WIDE_ENDS, "", **settings)
    memory = planned_memory(case)
    # FSDP1 forgets gradients in the next forward, although `zero_grad` was called.
    rest = memory.instants[-1].num_bytes[GRADS] if contender == "fsdp1" else 0
    assert_as_planned(run_ranks(2, tracked, case)[0], memory, rest)


@pytest.mark.parametrize("settings", [{}, {"micro_batches": 2}, {"reduce": "fp32"}], ids=str)
@pytest.mark.parametrize("stage", range(4))
def test_deepspeed(on_deepspeed: DeepSpeed, stage: int, settings: dict[str, Any]) -> None:
    case = small(f"deepspeed:{stage}", **settings)
    assert_as_planned(on_deepspeed(tracked, case), planned_memory(case))


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_with_overlap(on_deepspeed: DeepSpeed, stage: int) -> None:
    case = small(f"deepspeed:{stage}")
    assert_as_planned(on_deepspeed(overlapping, case), planned_memory(case, overlaps=True))


def overlapping(case: Case) -> dict[str, int]:
    return tracked(case, overlap_comm=True)


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_in_fp32_has_every_weight_twice(on_deepspeed: DeepSpeed, stage: int) -> None:
    case = small(f"deepspeed:{stage}", precision="fp32", reduce="fp32")
    assert_as_planned(on_deepspeed(tracked, case), planned_memory(case))


def test_stage_3_gathers_what_it_is_allowed_to(on_deepspeed: DeepSpeed) -> None:
    case = replace(small("deepspeed:3"), shape=replace(SMALL, layers=8))
    assert_as_planned(on_deepspeed(narrow, case), planned_memory(case, max_live=4 * 10**6))


def narrow(case: Case) -> dict[str, int]:
    return tracked(case, **NARROW)
