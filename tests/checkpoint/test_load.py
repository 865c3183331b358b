"""What a load takes over from a checkpoint, and what it leaves as it is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.checkpoint.test_refusals import built, refused, step
from tests.harness import Pool


def in_two_groups(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    matrices = [param for param in params if param.ndim > 1]
    rest = [param for param in params if param.ndim <= 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.5}, {"params": rest}], lr=1e-2, betas=(0.5, 0.6))


def without_matrices(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in params if param.ndim <= 1], lr=1e-2)


def moments(optimizer: Any) -> list[tuple[str, torch.Tensor]]:
    return [(key, value) for state in optimizer.state.values() for key, value in state.items()]


def load_into_other_groups(path: Path) -> None:
    model, optimizer = built()
    step(model, optimizer)
    sw.save(path, model, optimizer)
    other, other_optimizer = built(make=in_two_groups, seed=1)
    refused(lambda: sw.load(path, other, other_optimizer), "has 1 groups, this one has 2")
    sw.load(path, other, other_optimizer, keep_groups=True)
    assert [group["weight_decay"] for group in other_optimizer.param_groups] == [0.5, 1e-2]
    assert {group["betas"] for group in other_optimizer.param_groups} == {(0.5, 0.6)}
    expected = sorted((key, float(value.sum())) for key, value in moments(optimizer))
    assert sorted((key, float(value.sum())) for key, value in moments(other_optimizer)) == expected
    weights = sw.full_state_dict(model)
    assert all(torch.equal(value, weights[name]) for name, value in sw.full_state_dict(other).items())
    step(other, other_optimizer)
    fewer, fewer_optimizer = built(make=without_matrices, seed=1)
    refused(
        lambda: sw.load(path, fewer, fewer_optimizer, keep_groups=True),
        r"'first.weight' was trained by its optimizer, and is in no group of this one",
    )


def test_groups_may_stay_as_they_are(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, load_into_other_groups, tmp_path / "here")


@pytest.mark.quick("3")
@pytest.mark.parametrize("world", [1, 3])
def test_a_missing_optimizer_is_told(run_ranks: Pool, tmp_path: Path, world: int) -> None:
    run_ranks(world, load_weights_alone, tmp_path / "here")


def load_weights_alone(path: Path) -> None:
    model, optimizer = built()
    step(model, optimizer)
    sw.save(path, model)
    other, other_optimizer = built(seed=1)
    refused(lambda: sw.load(path, other, other_optimizer), "holds no optimizer")
    sw.load(path, other)
    weights = sw.full_state_dict(model)
    assert all(torch.equal(value, weights[name]) for name, value in sw.full_state_dict(other).items())
    assert not moments(other_optimizer)
