"""Updates in parts, at the step or already during the backward, change nothing but when they happen."""

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.base.errors import ConfigurationError, StateError
from shardwise.core.optim import groups
from tests.harness import Pool
from tests.support.strategies import SOME, STRATEGIES, slow_but
from tests.support.training import Outcome, train_sharded

NUM_STEPS = 5


def train_in_parts(part_elems: int, strategy: Any, **options: Any) -> Outcome:
    before = groups.PART_ELEMS
    groups.PART_ELEMS = part_elems
    try:
        return train_sharded("in-tree tied", strategy, num_steps=NUM_STEPS, clip=None, precision="fp32", **options)
    finally:
        groups.PART_ELEMS = before


@pytest.mark.quick("zero2_offload")
@pytest.mark.parametrize(
    "strategy", slow_but(("zero3", "zero2_offload"), [*SOME, "hpz", "zero2_offload", "zero3_nvme", "mapping"])
)
def test_parts_and_early_updates_give_the_same_weights(run_ranks: Pool, strategy: str) -> None:
    chosen, num_micro = STRATEGIES[strategy], 2
    whole = run_ranks(2, train_in_parts, 1 << 40, chosen, num_micro=num_micro)[0]
    for part_elems, early in ((1, False), (1, True), (1 << 40, True)):
        seen = run_ranks(2, train_in_parts, part_elems, chosen, num_micro=num_micro, early_update=early)[0]
        assert seen.losses == whole.losses
        assert all(torch.equal(seen.weights[name], weight) for name, weight in whole.weights.items())


class Gated(nn.Module):
    """The second layer is left out by one rank in one step, and by both in another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, skip: bool) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = x if skip and index == 1 else layer(x)
        return x


def train_gated(early: bool) -> dict[str, torch.Tensor]:
    sw.init()
    groups.PART_ELEMS, before = 1, groups.PART_ELEMS
    torch.manual_seed(0)
    model = Gated()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = sw.shard(model, optimizer, "zero3", precision="fp32", units=["Linear"], early_update=early)
    rank = torch.distributed.get_rank()
    for step in range(4):
        model(torch.full((2, 8), 1.0 + rank), skip=step == 2 or (step == 1 and rank == 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    groups.PART_ELEMS = before
    return sw.full_state_dict(model)


def test_what_a_rank_left_out_waits_for_the_other_ranks(run_ranks: Pool) -> None:
    late, early = (run_ranks(2, train_gated, when)[0] for when in (False, True))
    assert all(torch.equal(early[name], weight) for name, weight in late.items())


def count_hooks() -> int:
    """A hook that expects to run once a step does."""
    sw.init()
    groups.PART_ELEMS, before = 1, groups.PART_ELEMS
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, optimizer = sw.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero2", units=["Linear"])
    calls: list[int] = []
    for step in range(3):
        if step == 1:
            optimizer.register_step_post_hook(lambda *_: calls.append(1))
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    groups.PART_ELEMS = before
    return len(calls)


def test_hooks_of_the_optimizer_run_once_a_step(run_ranks: Pool) -> None:
    assert run_ranks(2, count_hooks) == [2, 2]


def refusals() -> list[str]:
    sw.init()
    said = []

    def note(action: Any, error: type[Exception]) -> None:
        with pytest.raises(error) as caught:
            action()
        said.append(str(caught.value))

    def build(**options: Any) -> tuple[nn.Module, Any]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for param in model.parameters():
            nn.init.ones_(param)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return sw.shard(model, optimizer, "zero2", units=["Linear"], early_update=True, **options)

    note(lambda: build(precision="fp16"), ConfigurationError)
    model, optimizer = build(precision="fp32")

    def backward() -> None:
        model(torch.ones(1, 4)).sum().backward()

    note(lambda: optimizer.clip_grad_norm(1.0), StateError)
    backward()
    note(optimizer.zero_grad, StateError)
    note(backward, StateError)
    return said


def test_what_an_early_update_cannot_do_is_refused(run_ranks: Pool) -> None:
    fp16, clip, zero, twice = run_ranks(2, refusals)[0]
    assert "fp16" in fp16
    assert "clip_grad_norm" in clip
    assert "call optimizer.step() first" in zero
    assert "sw.accumulate" in twice


def changed_in_between() -> list[str]:
    sw.init()
    said = []

    def change_rate(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
        optimizer.param_groups[0]["lr"] = 0.2
        optimizer.step()

    def accumulate(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
        with sw.accumulate(model):
            loss.backward()

    for change in (change_rate, accumulate):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for param in model.parameters():
            nn.init.ones_(param)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = sw.shard(model, optimizer, "zero2", precision="fp32", units=["Linear"], early_update=True)
        loss = model(torch.ones(1, 4)).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(StateError) as caught:
            change(model, optimizer, loss)
        said.append(str(caught.value))
    return said


def test_what_would_come_too_late_for_an_early_update_is_refused(run_ranks: Pool) -> None:
    rate, accumulate = run_ranks(2, changed_in_between)[0]
    assert "between backward() and step()" in rate
    assert "call step() first" in accumulate
