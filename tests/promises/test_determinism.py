"""The same run twice is the same run: bit for bit, in one set of processes and in another."""

import pytest

from tests.harness import Pool
from tests.support.models import IN_TREE
from tests.support.strategies import SOME, STRATEGIES, slow_but
from tests.support.training import Outcome, assert_same, train_sharded

OPTIONS = {"precision": "bf16", "node_size": 2, "num_micro": 3, "num_steps": 3}


@pytest.mark.parametrize("strategy", slow_but(("mapping",), [*SOME, "hpz", "zero3_nvme", "mapping"]))
def test_twice_in_the_same_processes(run_ranks: Pool, strategy: str) -> None:
    """Four ranks in two nodes: here sums have an order, and it must be the same one every time."""
    first, again = (run_ranks(4, train_sharded, IN_TREE, STRATEGIES[strategy], **OPTIONS) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert_same(one, other)


def train_several(strategies: list[str]) -> list[Outcome]:
    return [train_sharded(IN_TREE, STRATEGIES[strategy], **OPTIONS) for strategy in strategies]


@pytest.mark.slow
def test_twice_in_different_processes(run_ranks: Pool) -> None:
    strategies = ["hpz", "ddp"]
    fresh = run_ranks.throwaway(4, train_several, strategies)
    for ending, outcomes in zip(fresh, run_ranks(4, train_several, strategies), strict=True):
        assert ending.kind == "returned", ending.detail
        for one, other in zip(ending.value, outcomes, strict=True):
            assert_same(one, other)
