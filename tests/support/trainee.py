"""One story of training, told twice: by real ranks on shares of the batch, and by one process on all of it.

A story is a module-level function that takes a `Trainee`. It never asks whether it is sharded: it asks the trainee for
its share of a loss, for the mean of a value, for the weights. What it returns, and the weights at the end, must be the
same both times.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.core.layout import Strategy
from tests.harness import Pool
from tests.support.training import adamw, weight_error

# What a rank of two can tell apart. `hsdp` and its like need two nodes: `NODES`, on four ranks.
LAYOUTS = ["ddp", "zero1", "zero2", "shard_grad_op", "zero3"]
NODES = ["hsdp", "hfsdp", "hpz"]
# One for each time at which parameters are whole: always, from forward to backward, while a unit runs. The scenarios of
# `tests/loops` run under the others, too.
ONE_OF_EACH = ["zero2", "shard_grad_op", "zero3"]

# fp32 sums in another order: a few roundings of 6e-8 each, grown over a few steps.
TOLERANCE = 1e-5

Build = Callable[[], nn.Module]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Block(nn.Module):
    """A block for small models, with odd sizes, so that shards cut through parameters."""

    def __init__(self, width: int = 16, hidden: int = 37) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


@dataclass
class Trainee:
    model: nn.Module
    optimizer: Any
    world: int
    rank: int | None  # None: one process that does every rank's share

    @property
    def is_sharded(self) -> bool:
        return self.rank is not None

    def share(self, loss_of: Callable[[int], Tensor]) -> Tensor:
        """This rank's loss, or the mean over all ranks' losses."""
        if self.rank is not None:
            return loss_of(self.rank)
        return torch.stack([loss_of(rank) for rank in range(self.world)]).mean()

    def mean(self, loss: Tensor) -> float:
        """The mean over the ranks of a share."""
        value = loss.detach().clone().float()
        if self.is_sharded:
            dist.all_reduce(value)
            value /= self.world
        return float(value)

    def accumulate(self) -> AbstractContextManager[None]:
        return sw.accumulate(self.model) if self.is_sharded else nullcontext()

    def clip(self, max_norm: float) -> float:
        if self.is_sharded:
            return float(self.optimizer.clip_grad_norm(max_norm))
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        return float(nn.utils.clip_grad_norm_(params, max_norm))

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        if self.is_sharded:
            return sw.full_state_dict(self.model)
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


Story = Callable[[Trainee], Sequence[float] | None]


@dataclass(frozen=True)
class Told:
    values: list[float]
    weights: dict[str, Tensor]


def features(step: int, rank: int, num_samples: int = 4, width: int = 16) -> Tensor:
    """A rank's samples of a step: the same numbers whoever asks."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(num_samples, width, generator=generator)


def tell_sharded(
    story: Story,
    build: Build,
    strategy: Strategy,
    make_optimizer: MakeOptimizer = adamw,
    **options: Any,
) -> Told:
    """Runs on every rank."""
    sw.init()
    torch.manual_seed(0)
    model = build()
    model, optimizer = sw.shard(
        model, make_optimizer(list(model.parameters())), strategy, **{"precision": "fp32", **options}
    )
    trainee = Trainee(model, optimizer, dist.get_world_size(), dist.get_rank())
    torch.manual_seed(1)
    return Told(list(story(trainee) or []), trainee.weights())


def tell_each(
    story: Story,
    build: Build,
    strategies: Sequence[Strategy],
    may_refuse: Sequence[str],
    make_optimizer: MakeOptimizer,
    options: dict[str, Any],
) -> list[Told | str]:
    """Runs on every rank: one layout after the other. Where one may refuse, its words are what it told."""
    found: list[Told | str] = []
    for strategy in strategies:
        try:
            found.append(tell_sharded(story, build, strategy, make_optimizer, **options))
        except BaseException as error:
            if strategy not in may_refuse or not is_refusal(error):
                error.add_note(f"under {strategy}")
                raise
            found.append(str(error))
    return found


def is_refusal(error: BaseException) -> bool:
    """Ours, or autograd's own word that a weight its graph needs is not there any more."""
    return isinstance(error, sw.StateError) or "modified by an inplace operation" in str(error)


def tell_alone(story: Story, build: Build, world: int, make_optimizer: MakeOptimizer = adamw) -> Told:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks
    try:
        torch.manual_seed(0)
        model = build()
        trainee = Trainee(model, make_optimizer(list(model.parameters())), world, None)
        torch.manual_seed(1)
        return Told(list(story(trainee) or []), trainee.weights())
    finally:
        torch.set_num_threads(num_threads)


def assert_told_alike(seen: Told, expected: Told, tolerance: float = TOLERANCE, label: str = "") -> None:
    assert len(seen.values) == len(expected.values), label
    for index, (a, b) in enumerate(zip(seen.values, expected.values, strict=True)):
        assert abs(a - b) <= tolerance * max(abs(b), 1e-3), (
            f"{label}: value {index} is {a} sharded, {b} alone; all: {seen.values}, {expected.values}"
        )
    error = weight_error(seen.weights, expected.weights)
    assert error <= tolerance, f"{label}: weights differ by {error}"


def check(
    pool: Pool,
    story: Story,
    build: Build,
    strategies: Strategy | Sequence[str],
    *,
    world: int = 2,
    make_optimizer: MakeOptimizer = adamw,
    tolerance: float = TOLERANCE,
    deadline: float = 60.0,
    may_refuse: Sequence[str] = (),
    **options: Any,
) -> dict[str, list[Told | str]]:
    """The story must come out the same on every rank, under each of the layouts, as in one process.

    Layouts in `may_refuse` may refuse it with an error instead; its words are then what the ranks told. Returns what
    the ranks told, by layout.
    """
    each = list(strategies) if isinstance(strategies, (list, tuple)) else [strategies]
    expected = tell_alone(story, build, world, make_optimizer)
    ranks = pool(world, tell_each, story, build, each, may_refuse, make_optimizer, options, deadline=deadline)
    told: dict[str, list[Told | str]] = {}
    for index, strategy in enumerate(each):
        label = strategy if isinstance(strategy, str) else "these layouts"
        told[label] = [rank[index] for rank in ranks]
        refusals = [found for found in told[label] if isinstance(found, str)]
        assert len(refusals) in (0, world), f"{label}: refused by some ranks only: {refusals}"
        for found in told[label]:
            if isinstance(found, Told):
                assert_told_alike(found, expected, tolerance, label)
    return told


def check_refused(
    pool: Pool,
    story: Story,
    build: Build,
    strategies: Sequence[str],
    words: Sequence[str],
    **options: Any,
) -> None:
    """Under each of the layouts, every rank must raise a StateError that says all these words."""
    for label, ranks in check(pool, story, build, strategies, may_refuse=strategies, **options).items():
        for found in ranks:
            assert isinstance(found, str), f"{label}: nothing was refused"
            for word in words:
                assert word in found, f"{label}: {found!r} does not say {word!r}"
