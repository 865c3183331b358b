"""Optimizers that look at more than an element: refused by name where they would see shards, right elsewhere."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.harness import Pool
from tests.support.trainee import ONE_OF_EACH, Trainee, check, features

WHOLE = ["ddp", "ddp+optimizer=host", "ddp+optimizer=host:0.5"]
SPLIT = ["zero1", "zero2", "shard_grad_op", "zero3", "zero3_offload", {"layers.0": "ddp", "*": "zero3"}]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def train(trainee: Trainee, num_steps: int = 5) -> list[float]:
    found = []
    for step in range(num_steps):
        loss = trainee.share(lambda rank, step=step: trainee.model(features(step, rank)).square().mean())  # type: ignore[misc]
        loss.backward()
        found.append(trainee.mean(loss))
        trainee.step()
    return found


class Own(torch.optim.Optimizer):
    """A user's optimizer: one step of descent along what `direction` makes of a gradient."""

    def __init__(self, params: Any, lr: float = 0.05, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    @property
    def trained(self) -> list[nn.Parameter]:
        return [param for group in self.param_groups for param in group["params"] if param.grad is not None]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.prepare()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.direction(param, group), alpha=group["lr"])

    def prepare(self) -> None:
        pass

    def direction(self, param: nn.Parameter, group: dict[str, Any]) -> Tensor:
        assert param.grad is not None
        return param.grad


class Prodigious(Own):
    """Learns the size of its steps, from 1e-6 on, as Prodigy does: from products of all gradients and all ways made."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0, d=1e-6, above=0.0)

    def prepare(self) -> None:
        group = self.param_groups[0]
        below = 0.0
        for param in self.trained:
            state = self.state[param]
            if not state:
                state["start"], state["sum"] = param.clone(), torch.zeros_like(param)
            group["above"] += group["d"] * float((param.grad * (state["start"] - param)).sum())
            state["sum"].add_(param.grad, alpha=group["d"])
            below += float(state["sum"].abs().sum())
        group["d"] = max(group["d"] * 2, group["above"] / below)
        group["d"] = min(group["d"], 0.02)

    def direction(self, param: nn.Parameter, group: dict[str, Any]) -> Tensor:
        assert param.grad is not None
        return param.grad * group["d"]


class Adapting(Own):
    """The same in an attribute and as a tensor, as some D-Adaptations do: |g|^2 over all parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-9)
        self.squares = torch.zeros(())

    def prepare(self) -> None:
        self.squares += sum(param.grad.square().sum().cpu() for param in self.trained)  # type: ignore[union-attr,misc]


class ClipsInStep(Own):
    def prepare(self) -> None:
        nn.utils.clip_grad_norm_(self.trained, 0.05)


class ClipsLateInStep(Own):
    """Only gradients that are larger than those of most steps."""

    def prepare(self) -> None:
        nn.utils.clip_grad_norm_(self.trained, 1e4)


class ClipsItsOwnList(Own):
    def __init__(self, params: list[nn.Parameter]) -> None:
        self.list = list(params)
        super().__init__(params)

    def prepare(self) -> None:
        nn.utils.clip_grad_norm_(self.list, 0.05)


class Centred(Own):
    """Less the mean over all gradients."""

    def prepare(self) -> None:
        self.mean = torch.cat([param.grad.flatten() for param in self.trained]).mean()  # type: ignore[union-attr]

    def direction(self, param: nn.Parameter, group: dict[str, Any]) -> Tensor:
        assert param.grad is not None
        return param.grad - self.mean


class Around(torch.optim.Optimizer):
    """An optimizer around another one, which holds the groups."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.inside = inside
        super().__init__(inside.param_groups, {})
        self.param_groups = inside.param_groups

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inside.step()


def around_clipping(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Around(ClipsInStep(params))


def around_adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Around(torch.optim.AdamW(params, lr=1e-2, eps=1e-4))


MIXING: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "Prodigious": Prodigious,
    "Adapting": Adapting,
    "ClipsInStep": ClipsInStep,
    "ClipsLateInStep": ClipsLateInStep,
    "ClipsItsOwnList": ClipsItsOwnList,
    "Centred": Centred,
    "Around": around_clipping,
}


def refusals(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[str]:
    sw.init()
    said = []
    for strategy in SPLIT:
        model = Model()
        optimizer = make(list(model.parameters()))
        with pytest.raises(sw.ConfigurationError) as caught:
            sw.shard(model, optimizer, strategy, precision="fp32")
        said.append(str(caught.value))
        # The trial leaves no trace.
        assert not optimizer.state
        assert optimizer.param_groups[0].get("d", 1e-6) == 1e-6
        assert float(getattr(optimizer, "squares", 0.0)) == 0.0
    return said


@pytest.mark.quick("Prodigious", "ClipsLateInStep", "ClipsItsOwnList", "Centred", "Around")
@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_parameters_is_refused_where_they_are_split(run_ranks: Pool, name: str) -> None:
    for rank in run_ranks(2, refusals, MIXING[name]):
        assert len(rank) == len(SPLIT)
        assert all(name in sentence for sentence in rank)


@pytest.mark.parametrize("name", [name for name in MIXING if name != "ClipsItsOwnList"])
def test_what_mixes_parameters_works_where_they_are_whole(run_ranks: Pool, name: str) -> None:
    check(run_ranks, train, Model, WHOLE, make_optimizer=MIXING[name])


class Counting(Own):
    """Element by element, with what it writes to its groups."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__([{"params": params[:3]}, {"params": params[3:], "k": 5}], k=0)

    def prepare(self) -> None:
        for group in self.param_groups:
            group["k"] += 1

    def direction(self, param: nn.Parameter, group: dict[str, Any]) -> Tensor:
        assert param.grad is not None
        return param.grad / group["k"] ** 0.5


def count(trainee: Trainee) -> list[float]:
    found = train(trainee)
    return found + [group["k"] for group in trainee.optimizer.param_groups]


def test_what_a_step_writes_to_its_groups_is_there_in_the_next(run_ranks: Pool) -> None:
    check(run_ranks, count, Model, [*ONE_OF_EACH, *WHOLE, "zero3_offload"], make_optimizer=Counting)


def test_an_optimizer_around_an_elementwise_one(run_ranks: Pool) -> None:
    check(run_ranks, partial(train, num_steps=3), Model, [*ONE_OF_EACH, "zero3_offload"], make_optimizer=around_adamw)
