"""After an error, or with gradients of zero, training goes on as one process would."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.core.engine.guards import engine_of
from tests.harness import Pool

HIDDEN = 8


class Fragile(torch.autograd.Function):
    """Its backward fails once."""

    fails = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Fragile.fails:
            raise ValueError("the backward fails here")
        return grad


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.spare = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1:
                x = Fragile.apply(x)
        return x


def build() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def sharded(strategy: str) -> tuple[nn.Module, Any]:
    sw.init()
    model, optimizer = build()
    return sw.shard(model, optimizer, strategy, precision="fp32", units=["Linear"])


def fail_then_go_on(model: nn.Module, optimizer: Any, forgets: bool) -> None:
    """Two forwards; the first one's backward breaks off, the second one's trains."""
    first, second = (model(torch.full((2, HIDDEN), value)).square().mean() for value in (1.0, 2.0))
    Fragile.fails = True
    with pytest.raises(ValueError, match="fails here"):
        first.backward()
    Fragile.fails = False
    if forgets:
        optimizer.zero_grad()
    second.backward()
    optimizer.step()


def weights_after_an_error(strategy: str) -> dict[str, Tensor]:
    model, optimizer = sharded(strategy)
    fail_then_go_on(model, optimizer, forgets=False)  # the engine forgets by itself what was not reduced yet
    return sw.full_state_dict(model)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_a_backward_after_one_that_failed(run_ranks: Pool, strategy: str) -> None:
    model, optimizer = build()
    fail_then_go_on(model, optimizer, forgets=True)
    for weights in run_ranks(2, weights_after_an_error, strategy):
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6)


def keep_zeros(model: nn.Module, optimizer: Any) -> None:
    for value in (1.0, 2.0):
        model(torch.full((2, HIDDEN), value)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    optimizer.step()  # momenta move on with gradients of zero


def weights_with_zeros(strategy: str) -> dict[str, Tensor]:
    model, optimizer = sharded(strategy)
    keep_zeros(model, optimizer)
    return sw.full_state_dict(model)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_zeros_are_no_gradients_for_what_had_none(run_ranks: Pool, strategy: str) -> None:
    model, optimizer = build()
    keep_zeros(model, optimizer)
    for weights in run_ranks(2, weights_with_zeros, strategy):
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6)


class TwoFlats(nn.Module):
    """One unit with two flats: the layer, and the table that stays in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        self.table = nn.Embedding(5, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.table(torch.arange(2))


def weights_after_sparse_gradients(strategy: str, fails: bool) -> tuple[dict[str, Tensor], bool]:
    """Also returns whether collectives stayed in flight."""
    sw.init()
    torch.manual_seed(0)
    model: Any = nn.Sequential(TwoFlats(), TwoFlats())
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    precision = sw.Precision("bf16", "fp32", "fp32", keep_fp32=("*.table",))
    model, optimizer = sw.shard(model, optimizer, strategy, precision=precision, units=["TwoFlats"])
    states = engine_of(model).units[0].states
    assert [len(state.flat.params) for state in states] == [2, 1]
    is_in_flight = False
    for step in range(3):
        if fails:
            model[0].table.sparse = True
            with pytest.raises(sw.ConfigurationError, match="sparse"):
                model(torch.ones(2, HIDDEN)).square().mean().backward()
            model[0].table.sparse = False
            optimizer.zero_grad()
            chains = [chain for state in states for chain, _ in state.gradient._chains.values()]
            is_in_flight = is_in_flight or any(chain.at < chain.end for chain in chains)
        model(torch.full((2, HIDDEN), float(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return sw.full_state_dict(model), is_in_flight


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "hpz", "zero3_offload"])
def test_sparse_gradients_leave_nothing_in_flight(run_ranks: Pool, strategy: str) -> None:
    expected, _ = run_ranks(2, weights_after_sparse_gradients, strategy, False)[0]
    for weights, is_in_flight in run_ranks(2, weights_after_sparse_gradients, strategy, True):
        assert not is_in_flight
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
