"""Layers of many experts whose parts are units: training is that of one process."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.engine.guards import engine_of
from shardwise.core.schedule import model as limits
from shardwise.planner.events import step_events
from tests.harness import Pool
from tests.support.models import INIT, SEQ, VOCAB, tokens
from tests.support.trainee import Story, Told, Trainee, assert_told_alike, features, tell_alone, tell_sharded

STRATEGIES = ["ddp", "zero2", "shard_grad_op", "zero3", "zero3_offload"]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 33)
        self.down = nn.Linear(33, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Layer(nn.Module):
    """Every expert is called, with the tokens whose turn it is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mix = nn.Linear(16, 16)
        self.router = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        normed = self.norm(x)
        shares = self.router(normed).softmax(-1)
        turns = torch.arange(len(x)) % 4
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = turns == index
            out[chosen] = shares[chosen, index, None] * expert(normed[chosen])
        return x + out


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def mixtral() -> nn.Module:
    """All experts in two tensors, as transformers keeps them."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCAB, initializer_range=INIT, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
            max_position_embeddings=SEQ, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


@contextmanager
def lowered(block: int, part: int) -> Iterator[None]:
    before = limits.LARGE_BLOCK, limits.LARGE_PART
    limits.LARGE_BLOCK, limits.LARGE_PART = block, part
    try:
        yield
    finally:
        limits.LARGE_BLOCK, limits.LARGE_PART = before


def loss_of(trainee: Trainee, step: int, rank: int) -> Tensor:
    if isinstance(trainee.model, Listed):
        return trainee.model(features(step, rank, num_samples=8)).square().mean()
    batch = tokens(step, rank, trainee.world)
    return F.cross_entropy(trainee.model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())


def train(trainee: Trainee) -> list[float]:
    seen = []
    for step in range(3):
        with trainee.accumulate():
            trainee.share(lambda rank, step=step: loss_of(trainee, 2 * step, rank)).backward()
        loss = trainee.share(lambda rank, step=step: loss_of(trainee, 2 * step + 1, rank))
        loss.backward()
        seen += [trainee.mean(loss), trainee.clip(1.0)]
        trainee.step()
    return seen


UNITS = {
    "listed": ["mix", "experts.0", "experts.1", "experts.2", "experts.3"],
    "mixtral": ["self_attn", "mlp.experts"],
}
BUILDS: dict[str, Any] = {"listed": Listed, "mixtral": mixtral}
LIMITS = {"listed": (2000, 250), "mixtral": (3000, 500)}


def train_in_parts(trainee: Trainee) -> list[float]:
    """The parts are units, and the last step's collectives are the planned ones."""
    losses = train(trainee)
    if trainee.is_sharded:
        engine = engine_of(trainee.model)
        layer, *parts = (plan for plan in engine.schedule.units if "layers.1" in plan.name)
        kind = "listed" if isinstance(trainee.model, Listed) else "mixtral"
        assert [plan.name.removeprefix(f"{layer.name}.") for plan in parts] == UNITS[kind]
        assert layer.holds_units
        assert not any(plan.holds_units for plan in parts)
        calls = [call for call in engine.mesh.ledger.last_step or () if call.dtype != "float64"]
        planned = [call for event in step_events(engine.schedule, 2) for call in event.calls]
        assert Counter(calls) == Counter(planned)
    return losses


def told(story: Story, kind: str, strategies: list[str], options: dict[str, Any]) -> list[Told]:
    """Runs on every rank."""
    with lowered(*LIMITS[kind]):
        return [tell_sharded(story, BUILDS[kind], strategy, **options) for strategy in strategies]


@pytest.mark.quick("listed")
@pytest.mark.parametrize("kind", BUILDS)
def test_experts_that_are_units(run_ranks: Pool, kind: str) -> None:
    expected = tell_alone(train, BUILDS[kind], 2)
    for seen in zip(STRATEGIES, *run_ranks(2, told, train_in_parts, kind, STRATEGIES, {}), strict=True):
        strategy, *ranks = seen
        for rank in ranks:
            assert_told_alike(rank, expected, label=strategy)


@pytest.mark.slow
def test_experts_that_are_units_on_nodes(run_ranks: Pool) -> None:
    expected = tell_alone(train, Listed, 4)
    for rank in run_ranks(4, told, train_in_parts, "listed", ["hsdp"], {"node_size": 2}):
        assert_told_alike(rank[0], expected)
