"""Python calls that sharding adds to a step, per unit: a small batch is as fast as the host that queues its work."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.bench.case import SHAPES
from shardwise.bench.contenders import adamw, step_of
from shardwise.bench.measure import STEPS_BEFORE_CALLS, count_calls
from shardwise.bench.model import build
from shardwise.core.layout import PRESETS
from tests.harness import Pool
from tests.support.strategies import disk_for, slow_but

NUM_BLOCKS = (4, 8)
# The most calls per unit and step, in fp32 on two nodes of two CPU ranks. Python 3.11 counts list comprehensions, too.
# Updates on the host are counted as far as their thread gets during the step, so their limits have room for all of it.
MOST_CALLS = {
    "ddp": 110,
    "zero1": 110,
    "zero2": 115,
    "shard_grad_op": 120,
    "zero3": 135,
    "hsdp": 145,
    "hybrid_shard_zero2": 130,
    "hfsdp": 145,
    "hpz": 145,
    "zeropp": 190,
    "zero2_offload": 265,
    "zero3_offload": 290,
    "zero3_nvme": 520,
    "zero3+params_as=int8+grads_as=int8": 185,
    "hpz+params_as=int8+grads_as=int4:feedback": 195,
}


def num_calls(strategy: str | None, num_blocks: int) -> int:
    """Calls of one step of a sharded model, or of the plain one."""
    shape = replace(SHAPES["smoke"], layers=num_blocks)
    model: Any = build(shape, torch.device("cpu"), seed=0)
    optimizer: Any = adamw(model.parameters())
    if strategy is not None:
        model, optimizer = sw.shard(model, optimizer, strategy, precision="fp32", node_size=2, **disk_for(strategy))
    step = step_of(model, optimizer, clip=lambda: None)
    batch = torch.arange(shape.tokens + 1)[None] % shape.vocab
    for _ in range(STEPS_BEFORE_CALLS):
        step([batch])
    # A rank that waits for another one looks again and again.
    calls = count_calls(lambda: step([batch])).items()
    return round(sum(times for name, times in calls if not name.startswith("wire/rank_watch.py:")))


def calls_per_unit(strategies: Sequence[str]) -> dict[str, float]:
    sw.init()
    few, many = NUM_BLOCKS
    plain = {num: num_calls(None, num) for num in NUM_BLOCKS}
    added = {name: [num_calls(name, num) - plain[num] for num in NUM_BLOCKS] for name in strategies}
    return {name: (deep - shallow) / (many - few) for name, (shallow, deep) in added.items()}


@pytest.mark.parametrize("strategy", slow_but(("ddp", "zero3", "zeropp", "zero3_offload"), MOST_CALLS))
def test_a_unit_adds_few_calls(run_ranks: Pool, strategy: str) -> None:
    found = min(each[strategy] for each in run_ranks(4, calls_per_unit, [strategy]))
    assert 0 < found <= MOST_CALLS[strategy]


def test_every_preset_has_a_limit() -> None:
    assert not PRESETS.keys() - MOST_CALLS.keys()
