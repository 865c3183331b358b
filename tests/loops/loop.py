"""The context that a scenario runs in: one process with the whole batch, or one rank with its part of it.

A scenario is written once, as a user would write the loop for one process. Where a sharded loop must differ (the call
of `sw.shard`, clipping, whole weights), it asks the `Loop`, which does nothing special in one process.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.core.layout import Strategy


class UserError(Exception):
    """Raised by a scenario itself, as a data loader or a model would."""


@dataclass
class Record:
    """Everything a run is compared by.

    `losses` are averaged over the ranks, `values` must be those of one process on every rank, and `shared` must be the
    same on every rank, whatever it is.
    """

    losses: list[float] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    shared: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Loop:
    strategy: Strategy | None  # None: one process that has every rank's part of the batch
    rank: int
    world: int
    options: dict[str, Any] = field(default_factory=dict)
    record: Record = field(default_factory=Record)

    @property
    def is_sharded(self) -> bool:
        return self.strategy is not None

    @property
    def ranks(self) -> list[int]:
        """The ranks whose part of the batch is trained on here."""
        return [self.rank] if self.is_sharded else list(range(self.world))

    # --- the lines that a sharded loop has and one process has not

    def shard(self, model: nn.Module, optimizer: Any = None, **options: Any) -> tuple[Any, Any]:
        if self.strategy is None:
            return model, optimizer
        options = {"precision": "fp32", **self.options, **options}
        try:
            return sw.shard(model, optimizer, self.strategy, **options)
        except sw.ConfigurationError as error:
            if not isinstance(self.strategy, dict) or "matches no unit" not in str(error):
                raise
        return sw.shard(model, optimizer, self.strategy["*"], **options)  # a mapping for models with `layers`

    def clip(self, optimizer: Any, max_norm: float, **options: Any) -> Tensor:
        if self.is_sharded:
            return optimizer.clip_grad_norm(max_norm, **options)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return nn.utils.clip_grad_norm_(params, max_norm, **options)

    def whole(self, model: nn.Module, **options: Any) -> AbstractContextManager[Any]:
        return sw.whole(model, **options) if self.is_sharded else nullcontext()

    def accumulate(self, model: nn.Module) -> AbstractContextManager[Any]:
        return sw.accumulate(model) if self.is_sharded else nullcontext()

    # --- data

    def samples(self, step: int, rank: int, *shape: int) -> Tensor:
        """The samples of one rank in one step: the same numbers whoever asks for them."""
        generator = torch.Generator().manual_seed(1000 * step + rank + 1)
        return torch.randn(*(shape or (4, 8)), generator=generator)

    def inputs(self, step: int, *shape: int) -> Tensor:
        return torch.cat([self.samples(step, rank, *shape) for rank in self.ranks])

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs of width 8 and targets of width 4."""
        x = self.inputs(step)
        return x, torch.sin(3 * x[:, :4])

    def tokens(self, step: int, rank: int, vocab: int = 16) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank + 1)
        return torch.randint(0, vocab, (2, 5), generator=generator)

    def mean_of(self, loss_of: Callable[[int], Tensor]) -> Tensor:
        """This rank's loss, or the mean of all ranks' losses: for loops in which ranks do different things."""
        return torch.stack([loss_of(rank) for rank in self.ranks]).mean()

    # --- results

    def log(self, loss: Tensor | float) -> None:
        self.record.losses.append(float(loss))

    def check(self, *values: Any) -> None:
        """Every rank must find what one process finds."""
        self.record.values += [as_tensor(value) for value in values]

    def check_shared(self, *values: Any) -> None:
        """Every rank must find the same."""
        self.record.shared += [as_tensor(value) for value in values]

    def finish(self, models: Iterable[nn.Module]) -> None:
        for index, model in enumerate(models):
            state = sw.full_state_dict(model) if self.is_sharded else model.state_dict()
            self.record.weights |= {f"{index}:{name}": as_tensor(value) for name, value in state.items()}

    # --- the ordinary loop

    def train(
        self,
        model: nn.Module,
        optimizer: Any,
        steps: Iterable[int] = range(3),
        loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
        each: Callable[[int], None] | None = None,
    ) -> None:
        """Train with the mean squared error, or with `loss_of(model, x, y)`; `each(step)` runs after the update."""
        for step in steps:
            x, y = self.batch(step)
            loss = loss_of(model, x, y) if loss_of else F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.log(loss)
            if each is not None:
                each(step)


def as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return torch.tensor(value, dtype=torch.float64)
