"""Models under `torch.autocast`, by the user around the model or by `precision="bf16-autocast"`: as in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests.engine.test_models import Block, Stack
from tests.harness import Pool
from tests.support.trainee import LAYOUTS, Trainee, check, features, tell_sharded

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

    def forward(self, x: Tensor) -> Tensor:
        with under_autocast(trainee):
            return super().forward(x) + super().forward(2 * x)


def plain_loop(trainee: Trainee) -> list[float]:
    values = []
    for step in range(NUM_STEPS):
        loss = loss_on(trainee, step)
        loss.backward()
        values.append(trainee.mean(loss))
        trainee.step()
    return values


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_around_the_model(run_ranks: Pool, story: Any) -> None:
    check(run_ranks, story, Stack, EVERYWHERE, tolerance=TOLERANCE)
