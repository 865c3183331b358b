"""Activation checkpointing and per-block compilation: the same losses, no double gathers, no recompiles."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.core.engine.guards import engine_of
from shardwise.core.wire.ledger import Row, add_up
from shardwise.planner.events import step_events
from tests.harness import Pool
from tests.support.models import MODELS, tokens
from tests.support.trainee import LAYOUTS, NODES, ONE_OF_EACH, Block, Trainee, check, features
from tests.support.training import adamw

NUM_STEPS = 4


class Stack(nn.Module):
    """`around` is what a block is called through."""

    def __init__(self, num_blocks: int = 5) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.layers = nn.ModuleList(Block() for _ in range(num_blocks))

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = self.run(layer, x)
        return x * self.scale


class Checkpointed(Stack):
    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False)


class CheckpointedInside(Stack):
    """The block checkpoints parts of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Inside() for _ in range(5))


class Inside(Block):
    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda x: self.up(self.norm(x)).tanh(), x, use_reentrant=False)
        return x + checkpoint(self.down, hidden, use_reentrant=False)


class EveryOther(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if index % 2 else layer(x)
        return x * self.scale


class NestedCheckpoints(Stack):
    """A checkpointed pass over blocks that are checkpointed themselves."""

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(lambda x: checkpoint(layer, x, use_reentrant=False), x, use_reentrant=False)


class Segments(Stack):
    """Two blocks to a checkpoint: as many as there are gather slots."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for first in range(0, 4, 2):
            pair = self.layers[first : first + 2]
            x = checkpoint(lambda x, pair=pair: pair[1](pair[0](x)), x, use_reentrant=False)
        return self.layers[4](x) * self.scale


def loss_on(trainee: Trainee, step: int) -> Tensor:
    return trainee.share(lambda rank: trainee.model(features(step, rank)).square().mean())


def train(trainee: Trainee, num_steps: int = NUM_STEPS) -> list[float]:
    losses = []
    for step in range(num_steps):
        loss = loss_on(trainee, step)
        loss.backward()
        losses.extend([trainee.mean(loss), trainee.clip(0.5)])
        trainee.step()
    return losses


def train_with_micro_batches(trainee: Trainee) -> list[float]:
    losses = []
    for step in range(NUM_STEPS):
        first, second = loss_on(trainee, 2 * step), loss_on(trainee, 2 * step + 1)
        with trainee.accumulate():
            first.backward()
        with torch.no_grad():
            losses.append(trainee.mean(loss_on(trainee, 50)))
        second.backward()
        losses.append(trainee.clip(0.5))
        trainee.step()
    return losses


# ---------------------------------------------------------------------------------------------------------
# checkpointing


@pytest.mark.quick("CheckpointedInside", "NestedCheckpoints")
@pytest.mark.parametrize("build", [Checkpointed, CheckpointedInside, EveryOther, NestedCheckpoints])
def test_checkpointed_blocks_equal_one_process(run_ranks: Pool, build: Any) -> None:
    check(run_ranks, train, build, ONE_OF_EACH)
    check(run_ranks, train_with_micro_batches, build, ONE_OF_EACH)


@pytest.mark.slow
def test_checkpointed_blocks_equal_one_process_on_nodes(run_ranks: Pool) -> None:
    check(run_ranks, train, Checkpointed, NODES, world=4, node_size=2)


def test_segments_of_several_blocks(run_ranks: Pool) -> None:
    check(run_ranks, train, Segments, ["ddp", "zero2", "shard_grad_op"])


def test_segments_of_several_blocks_are_right_or_refused_where_blocks_share_slots(run_ranks: Pool) -> None:
    check(run_ranks, train, Segments, ["zero3"], may_refuse=["zero3"])


class Segmented(Stack):
    """All blocks in one checkpoint: the recompute needs every one of them while the last is open."""

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

        return checkpoint(run, x * self.scale, use_reentrant=False) * self.scale


def test_a_larger_budget_serves_one_checkpoint_around_all_blocks(run_ranks: Pool) -> None:
    check(run_ranks, train, Segmented, "zero3", memory_budget=10**6)


def traffic_rows(build: Callable[[], nn.Module], strategy: str, node_size: int | None) -> list[tuple[Row, ...]]:
    """What moved in each step, and what the plan says of the last; norms aside."""
    sw.init()
    torch.manual_seed(0)
    model = build()
    model, optimizer = sw.shard(model, adamw(list(model.parameters())), strategy, precision="fp32", node_size=node_size)
    rows = []
    for step in range(NUM_STEPS):
        model(features(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        rows.append(sw.traffic(model).rows)
    calls = [call for event in step_events(engine_of(model).schedule) for call in event.calls]
    return [*rows, add_up(calls).rows]


@pytest.mark.quick("Checkpointed-*", "*-zero3")
@pytest.mark.parametrize("strategy", LAYOUTS)
@pytest.mark.parametrize("build", [Checkpointed, CheckpointedInside, EveryOther, NestedCheckpoints])
def test_checkpointing_gathers_nothing_twice(run_ranks: Pool, build: Any, strategy: str) -> None:
    plain = run_ranks(2, traffic_rows, Stack, strategy, None)[0]
    seen = run_ranks(2, traffic_rows, build, strategy, None)[0]
    assert seen == plain
    assert plain[-2] == plain[-1], "the last step is not what the schedule says"


class HuggingFaceStory:
    def __init__(self, name: str, num_steps: int) -> None:
        self.name, self.num_steps = name, num_steps

    def __call__(self, trainee: Trainee) -> list[float]:
        losses = []
        for step in range(self.num_steps):
            loss = trainee.share(
                lambda rank, step=step: MODELS[self.name].loss(trainee.model, tokens(step, rank, trainee.world))
            )
            loss.backward()
            losses.extend([trainee.mean(loss), trainee.clip(0.5)])
            trainee.step()
        return losses


class HuggingFace:
    """Builds one with gradient checkpointing on, the way their users switch it on."""

    def __init__(self, name: str, checkpointed: bool) -> None:
        self.name, self.checkpointed = name, checkpointed

    def __call__(self) -> nn.Module:
        model = MODELS[self.name].fresh()
        if self.checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model


@pytest.mark.quick("t5")
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_gradient_checkpointing_of_hugging_face(run_ranks: Pool, name: str) -> None:
    check(run_ranks, HuggingFaceStory(name, 3), HuggingFace(name, True), ["shard_grad_op", "zero3"])


def hugging_face_calls(name: str, checkpointed: bool) -> list[int]:
    sw.init()
    model = HuggingFace(name, checkpointed)()
    model, optimizer = sw.shard(model, adamw(list(model.parameters())), "zero3", precision="fp32")
    calls = []
    for step in range(3):
        MODELS[name].loss(model, tokens(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        calls.append(sw.traffic(model).num_calls)
    return calls


@pytest.mark.quick("llama")
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_gradient_checkpointing_of_hugging_face_gathers_nothing_twice(run_ranks: Pool, name: str) -> None:
    assert run_ranks(2, hugging_face_calls, name, True) == run_ranks(2, hugging_face_calls, name, False)


class Reentrant(Stack):
    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=True)


def test_reentrant_checkpointing_is_right_or_refused(run_ranks: Pool) -> None:
    dropping = ["shard_grad_op", "zero3"]
    check(run_ranks, train, Reentrant, ["ddp", "zero2", *dropping], may_refuse=dropping)


# ---------------------------------------------------------------------------------------------------------
# compilation


WAYS = ["block.compile before", "block.compile after", "torch.compile of each block"]


def compiled(way: str, backend: str, model: Stack) -> Stack:
    """What is done before sw.shard."""
    if way == "block.compile before":
        for layer in model.layers:
            layer.compile(backend=backend)
    elif way == "torch.compile of each block":
        for index, layer in enumerate(model.layers):
            model.layers[index] = torch.compile(layer, backend=backend)
    return model


def train_compiled(
    way: str, backend: str, strategy: str, checkpointed: bool, num_steps: int
) -> tuple[list[float], dict[str, Tensor], int, int]:
    """Losses, weights, and how many graphs were compiled until the second step and from then on."""
    sw.init()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model: Any = compiled(way, backend, Checkpointed() if checkpointed else Stack())
    model, optimizer = sw.shard(model, adamw(list(model.parameters())), strategy, precision="fp32")
    if way == "block.compile after":
        for layer in model.layers:
            layer.compile(backend=backend)
    trainee = Trainee(model, optimizer, dist.get_world_size(), dist.get_rank())
    losses = []
    num_graphs = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        for step in range(num_steps):
            if step == 2:
                torch._dynamo.config.error_on_recompile = True
            try:
                loss = loss_on(trainee, step)
                loss.backward()
            finally:
                torch._dynamo.config.error_on_recompile = False
            losses.extend([trainee.mean(loss), trainee.clip(0.5)])
            trainee.step()
            num_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    weights = {name.replace("_orig_mod.", ""): value for name, value in trainee.weights().items()}
    torch._dynamo.reset()
    return losses, weights, num_graphs[1], num_graphs[-1]


def check_compiled(run_ranks: Pool, way: str, backend: str, strategy: str, checkpointed: bool = False) -> None:
    torch.manual_seed(0)
    model = Stack()
    alone = Trainee(model, adamw(list(model.parameters())), 2, None)
    losses = train(alone)
    # Compiled code rounds otherwise than torch's own operators.
    tolerance = 1e-4 if backend == "inductor" else 1e-5
    ranks = run_ranks(2, train_compiled, way, backend, strategy, checkpointed, NUM_STEPS, deadline=300)
    for seen, weights, early, late in ranks:
        assert seen == pytest.approx(losses, rel=tolerance)
        for name, value in alone.weights().items():
            torch.testing.assert_close(weights[name], value, rtol=tolerance, atol=tolerance)
        assert early >= 1, "nothing was compiled"
        assert late == early, "compiled again after the warm-up"


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "shard_grad_op", "zero3"])
def test_compiled_blocks(run_ranks: Pool, way: str, strategy: str) -> None:
    check_compiled(run_ranks, way, "eager", strategy)


@pytest.mark.quick("shard_grad_op-block.compile before", "zero3-torch.compile of each block")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", ["shard_grad_op", "zero3"])
def test_compiled_blocks_with_compiled_backward(run_ranks: Pool, way: str, strategy: str) -> None:
    check_compiled(run_ranks, way, "aot_eager", strategy)


@pytest.mark.quick("block.compile after")
@pytest.mark.parametrize("way", WAYS)
def test_compiled_and_checkpointed_blocks(run_ranks: Pool, way: str) -> None:
    check_compiled(run_ranks, way, "aot_eager", "zero3", checkpointed=True)


@pytest.mark.slow
def test_blocks_compiled_with_inductor(run_ranks: Pool) -> None:
    check_compiled(run_ranks, "block.compile before", "inductor", "zero3")


def keys_of_wrapped_blocks() -> tuple[list[str], list[str]]:
    sw.init()
    model = compiled("torch.compile of each block", "eager", Stack())
    expected = list(model.state_dict())
    model, _ = sw.shard(model, None, "zero3", precision="fp32")
    return list(sw.full_state_dict(model)), expected


def test_keys_of_wrapped_blocks_are_the_models_own(run_ranks: Pool) -> None:
    for seen, expected in run_ranks(2, keys_of_wrapped_blocks):
        assert seen == expected


def count_graph_breaks_of_blocks(strategy: str) -> int:
    """Inside a block's own forward nothing may break the graph: the hooks lie around it."""
    sw.init()
    torch._dynamo.reset()
    model, _ = sw.shard(Stack(), None, strategy, precision="fp32")
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            model(features(step, dist.get_rank())).mean().backward()
    torch._dynamo.reset()
    return 0


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_the_forward_of_a_block_compiles_as_one_graph(run_ranks: Pool, strategy: str) -> None:
    assert run_ranks(2, count_graph_breaks_of_blocks, strategy) == [0, 0]
