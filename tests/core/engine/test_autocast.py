"""Models under `torch.autocast`, by the user around the model or by `precision="bf16-autocast"`: as in one process."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests.core.engine.test_models import Stack
from tests.harness import Pool
from tests.support.trainee import LAYOUTS, Trainee, check, features

NUM_STEPS = 3
EVERYWHERE = [*LAYOUTS, "zero3_offload"]

# Products are rounded to bf16 where sums of fp32 in another order may tip them over.
TOLERANCE = 1e-3


def under_autocast(trainee: Trainee) -> torch.autocast:
    """Without the cache in one process: there it would sum the gradients of all ranks' shares in bf16."""
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=trainee.is_sharded)


def loss_on(trainee: Trainee, step: int) -> Tensor:
    return trainee.share(lambda rank: trainee.model(features(step, rank)).float().square().mean())


def plain(trainee: Trainee) -> list[float]:
    values = []
    for step in range(NUM_STEPS):
        with under_autocast(trainee):
            loss = loss_on(trainee, step)
        loss.backward()
        values.append(trainee.mean(loss))
        trainee.step()
    return values


def all_inside(trainee: Trainee) -> list[float]:
    """Two forwards and their one backward, inside one context."""
    values = []
    for step in range(NUM_STEPS):
        with under_autocast(trainee):
            loss = loss_on(trainee, step) + loss_on(trainee, step + 10)
            loss.backward()
        values.append(trainee.mean(loss))
        trainee.step()
    return values


def accumulated(trainee: Trainee) -> list[float]:
    values = []
    for step in range(NUM_STEPS):
        with under_autocast(trainee):
            with trainee.accumulate():
                loss = loss_on(trainee, step)
                loss.backward()
            loss = loss_on(trainee, step + 10)
            loss.backward()
        values.append(trainee.mean(loss))
        trainee.step()
    return values


def evaluated(trainee: Trainee) -> list[float]:
    """An evaluation first, whose casts know of no gradient, in the context of the training forward."""
    values = []
    for step in range(NUM_STEPS):
        with under_autocast(trainee):
            with torch.no_grad():
                values.append(trainee.mean(loss_on(trainee, step + 10)))
            loss = loss_on(trainee, step)
        loss.backward()
        values.append(trainee.mean(loss))
        trainee.step()
    return values


def whole_loop(trainee: Trainee) -> list[float]:
    """Steps inside one context: casts of older weights must not be used again."""
    with under_autocast(trainee):
        values = []
        for step in range(NUM_STEPS):
            loss = loss_on(trainee, step)
            loss.backward()
            values.append(trainee.mean(loss))
            trainee.step()
        assert torch.is_autocast_cache_enabled() == trainee.is_sharded
    return values


STORIES: list[Callable[[Trainee], list[float]]] = [plain, all_inside, accumulated, evaluated, whole_loop]


class Checkpointed(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Own(Stack):
    """Asks for autocast itself, inside its forward."""

    caches: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=self.caches):
            return super().forward(x) + super().forward(2 * x)


def plain_loop(trainee: Trainee) -> list[float]:
    trainee.model.caches = None if trainee.is_sharded else False
    values = []
    for step in range(NUM_STEPS):
        loss = loss_on(trainee, step)
        loss.backward()
        values.append(trainee.mean(loss))
        trainee.step()
    return values


@pytest.mark.quick("all_inside", "evaluated", "whole_loop")
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_around_the_model(run_ranks: Pool, story: Any) -> None:
    check(run_ranks, story, Stack, EVERYWHERE, tolerance=TOLERANCE)


@pytest.mark.quick("accumulated", "whole_loop")
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_around_checkpointed_blocks(run_ranks: Pool, story: Any) -> None:
    check(run_ranks, story, Checkpointed, ["ddp", "zero2", "zero3"], tolerance=TOLERANCE)


@pytest.mark.slow
def test_on_nodes_and_in_mixed_layouts(run_ranks: Pool) -> None:
    check(run_ranks, all_inside, Stack, ["hsdp", "hpz"], world=4, node_size=2, tolerance=TOLERANCE)
    check(run_ranks, all_inside, Stack, {"layers.0": "ddp", "layers.1": "zero3", "*": "zero2"}, tolerance=TOLERANCE)


def test_inside_the_model(run_ranks: Pool) -> None:
    check(run_ranks, plain_loop, Own, EVERYWHERE, tolerance=TOLERANCE)


def test_around_a_model_in_bf16(run_ranks: Pool) -> None:
    """Products in bf16 as without it, what autocast wants in fp32 in fp32."""
    check(run_ranks, all_inside, Stack, EVERYWHERE, tolerance=5e-2, precision="bf16")


@pytest.mark.quick("Checkpointed")
@pytest.mark.parametrize("build", [Stack, Checkpointed])
def test_as_a_precision(run_ranks: Pool, build: Any) -> None:
    """The user's autocast in one process, and none of his on the ranks."""
    check(run_ranks, by_precision, build, EVERYWHERE, tolerance=TOLERANCE, precision="bf16-autocast")


def by_precision(trainee: Trainee) -> list[float]:
    values = []
    for step in range(NUM_STEPS):
        with nullcontext() if trainee.is_sharded else under_autocast(trainee):
            loss = loss_on(trainee, step)
        loss.backward()
        values.append(trainee.mean(loss))
        trainee.step()
    return values


def broken(strategy: str) -> bool:
    """An error in a forward leaves autocast as it was."""
    sw.init()
    model, _ = sw.shard(Stack(), None, strategy, precision="fp32")
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError):
            model(torch.ones(3, 5))
        return torch.is_autocast_cache_enabled()


def test_an_error_leaves_autocast_as_it_was(run_ranks: Pool) -> None:
    assert run_ranks(2, broken, "zero3") == [True, True]
