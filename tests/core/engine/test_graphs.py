"""Forward and backward as users write them: whatever the graph, the result is that of one process."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

import shardwise as sw
from shardwise.core.engine.guards import engine_of
from shardwise.core.layout import Strategy
from tests.harness import Pool
from tests.support.trainee import LAYOUTS, NODES, ONE_OF_EACH, Block, Trainee, check, check_refused, features

NUM_STEPS = 3


class Stack(nn.Module):
    """Five blocks: more than there are gather slots. The root keeps `scale`."""

    block: Callable[[], nn.Module] = Block

    def __init__(self, num_blocks: int = 5) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.layers = nn.ModuleList(self.block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def loss_on(trainee: Trainee, step: int) -> Tensor:
    return trainee.share(lambda rank: trainee.model(features(step, rank)).square().mean())


def train(trainee: Trainee, num_steps: int = NUM_STEPS, first: int = 0) -> list[float]:
    """Plain training; what a story goes on with to show that nothing was left behind."""
    losses = []
    for step in range(first, first + num_steps):
        loss = loss_on(trainee, step)
        loss.backward()
        losses.extend([trainee.mean(loss), trainee.clip(0.5)])
        trainee.step()
    return losses


def refused(trainee: Trainee, call: Callable[[], Any], *words: str) -> None:
    """When sharded, the call must raise a StateError that says all these words."""
    if not trainee.is_sharded:
        return
    with pytest.raises(sw.StateError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


# ---------------------------------------------------------------------------------------------------------
# modules and calls


def test_plain(run_ranks: Pool) -> None:
    check(run_ranks, train, Stack, ONE_OF_EACH)


@pytest.mark.slow
def test_plain_on_nodes(run_ranks: Pool) -> None:
    check(run_ranks, train, Stack, NODES, world=4, node_size=2)


class CalledTwice(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[0], self.layers[2], self.layers[2]):
            x = layer(x)
        return x * self.scale


def test_a_module_called_twice(run_ranks: Pool) -> None:
    check(run_ranks, train, CalledTwice, ONE_OF_EACH)


class CallsItself(Block):
    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = super().forward(x)
        return self(x, depth=depth - 1) if depth else x


def recursive() -> nn.Module:
    model = Stack()
    model.layers = nn.ModuleList(CallsItself() for _ in range(4))
    return model


def test_a_module_that_calls_itself(run_ranks: Pool) -> None:
    check(run_ranks, train, recursive, ["zero2", "shard_grad_op", "zero3"])


class OneObjectTwice(nn.Module):
    """The same block object under several names."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third = Block(), Block(), Block()
        self.layers = nn.ModuleList([first, second, first, third, first])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_one_module_under_several_names(run_ranks: Pool) -> None:
    check(run_ranks, train, OneObjectTwice, ["ddp", "zero3"])


class Discards(Stack):
    """Calls a block for nothing; a unit whose only call of a step is thrown away gets no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        self.layers[3](x)
        for layer in self.layers[:3]:
            x = layer(x)
        self.layers[4](x)
        return self.layers[4](x) * self.scale


def test_a_call_whose_result_is_discarded(run_ranks: Pool) -> None:
    check(run_ranks, train, Discards, ONE_OF_EACH)


class Nested(nn.Module):
    """Units inside units: the outer has parameters before, between and after those of the inner ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((16,), 0.9))
        self.inner = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner[0](x * self.first)
        return x + self.last(self.inner[1](x * self.first))


def nested() -> nn.Module:
    model = Stack()
    model.layers = nn.ModuleList(Nested() for _ in range(3))
    return model


@pytest.mark.quick("units1", "300")
@pytest.mark.parametrize("units", [("Nested", "Block"), ("Nested",), ("Block",), ("Linear", "LayerNorm"), 300, 1])
def test_nested_units_and_other_cuts(run_ranks: Pool, units: Any) -> None:
    check(run_ranks, train, nested, ONE_OF_EACH, units=units if isinstance(units, int) else list(units))


@pytest.mark.slow
def test_nested_units_on_nodes(run_ranks: Pool) -> None:
    check(run_ranks, train, nested, NODES, world=4, node_size=2, units=["Nested", "Block"])


def test_a_layout_per_unit(run_ranks: Pool) -> None:
    strategy: Strategy = {
        "layers.0": "ddp",
        "layers.1*": "zero3",
        "layers.2": "shard_grad_op",
        "layers.2.*": "zero1",
        "layers.*": "hpz",
        "*": "zero2",
    }
    check(run_ranks, train, nested, strategy, world=4, node_size=2, units=["Nested", "Block"])


# ---------------------------------------------------------------------------------------------------------
# order


class Backwards(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x * self.scale


class Shuffled(Stack):
    """Another order in each forward, the same on all ranks; by the data, so that one process sees it too."""

    num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        order = torch.randperm(5, generator=torch.Generator().manual_seed(self.num_forwards // self.per_step))
        self.num_forwards += 1
        for index in order.tolist():
            x = self.layers[index](x)
        return x * self.scale


def train_shuffled(trainee: Trainee) -> list[float]:
    trainee.model.per_step = 1 if trainee.is_sharded else trainee.world
    return train(trainee, 6)


def test_blocks_that_run_in_another_order_than_registered(run_ranks: Pool) -> None:
    check(run_ranks, train, Backwards, ONE_OF_EACH)


def test_another_order_in_every_forward(run_ranks: Pool) -> None:
    check(run_ranks, train_shuffled, Shuffled, ["zero1", "shard_grad_op", "zero3"])


def num_gathers(build: Callable[[], nn.Module], num_steps: int) -> list[int]:
    """All-gathers in each step under zero3."""
    sw.init()
    model = build()
    model, optimizer = sw.shard(model, sgd(list(model.parameters())), "zero3", precision="fp32")
    calls = []
    for step in range(num_steps):
        model(features(step, dist.get_rank())).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        calls.append(sum(row.num_calls for row in sw.traffic(model).rows if row.kind == "all_gather"))
    return calls


def test_the_order_seen_in_the_first_step_becomes_the_plan(run_ranks: Pool) -> None:
    in_order = run_ranks(2, num_gathers, Stack, 4)[0]
    assert run_ranks(2, num_gathers, Backwards, 4)[0][2:] == in_order[2:]


def order_after_overflow() -> tuple[list[tuple[int, ...]], list[bool]]:
    """The units that run one after the other as planned, and whether the weights moved, after each step."""
    sw.init()
    model = Backwards()
    model, optimizer = sw.shard(model, sgd(list(model.parameters())), "zero3", precision="fp16")
    orders, moved = [engine_of(model).schedule.leaves], []
    for step, factor in enumerate([1e9, 1.0]):
        before = sw.full_state_dict(model)["layers.0.up.weight"].clone()
        (model(features(step, dist.get_rank())).square().mean() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        orders.append(engine_of(model).schedule.leaves)
        moved.append(not torch.equal(sw.full_state_dict(model)["layers.0.up.weight"], before))
    return orders, moved


def test_the_order_becomes_the_plan_after_a_first_step_that_overflowed(run_ranks: Pool) -> None:
    for orders, moved in run_ranks(2, order_after_overflow):
        assert orders[1:] == [orders[0][::-1]] * 2
        assert moved == [False, True]


class Branches(Stack):
    """Blocks side by side on one input, and a skip over all of them."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth, last = self.layers
        left, right = first(x), second(x)
        middle = third(left + right)
        return last(left * 0.5 + fourth(middle) - right + x) * self.scale


def test_parallel_branches(run_ranks: Pool) -> None:
    check(run_ranks, train, Branches, ONE_OF_EACH)


class TwoInputs(Block):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x + y), super().forward(y) * 0.5


class Crossed(Stack):
    block = TwoInputs

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        for layer in self.layers:
            y, x = layer(x, y)
        return (x - y) * self.scale


def test_blocks_of_two_inputs_and_two_outputs(run_ranks: Pool) -> None:
    check(run_ranks, train, Crossed, ["zero2", "shard_grad_op", "zero3"])


class InPlace(Block):
    """Writes into its own input first, as models that save memory do."""

    def forward(self, x: Tensor) -> Tensor:
        x += 0.25
        return super().forward(x)


class WritesInPlace(Stack):
    block = InPlace

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
            x *= 1.5  # into the output of a block
        return x


def test_in_place_operations_between_blocks_and_in_them(run_ranks: Pool) -> None:
    check(run_ranks, train, WritesInPlace, ["ddp", "zero3"])


# ---------------------------------------------------------------------------------------------------------
# several forwards and backwards


def several_forwards_one_backward(trainee: Trainee) -> list[float]:
    losses = []
    for step in range(NUM_STEPS):
        loss = loss_on(trainee, 3 * step) + 2 * loss_on(trainee, 3 * step + 1) - loss_on(trainee, 3 * step + 2)
        loss.backward()
        losses.append(trainee.mean(loss))
        trainee.step()
    return losses


def forwards_then_backwards(trainee: Trainee, in_order: bool, accumulate: bool) -> list[float]:
    values = []
    for step in range(NUM_STEPS):
        losses = [loss_on(trainee, 3 * step + part) for part in range(3)]
        values.extend(trainee.mean(loss) for loss in losses)
        for index, loss in enumerate(losses if in_order else losses[::-1]):
            if accumulate and index < 2:
                with trainee.accumulate():
                    loss.backward()
            else:
                loss.backward()
        values.append(trainee.clip(0.3))
        trainee.step()
    return values


def in_order(trainee: Trainee) -> list[float]:
    return forwards_then_backwards(trainee, in_order=True, accumulate=False)


def in_order_accumulated(trainee: Trainee) -> list[float]:
    return forwards_then_backwards(trainee, in_order=True, accumulate=True)


def reversed_accumulated(trainee: Trainee) -> list[float]:
    return forwards_then_backwards(trainee, in_order=False, accumulate=True)


def interleaved(trainee: Trainee) -> list[float]:
    """A forward between the forward and the backward of another."""
    values = []
    for step in range(NUM_STEPS):
        first = loss_on(trainee, 2 * step)
        second = loss_on(trainee, 2 * step + 1)
        with trainee.accumulate():
            first.backward()
        third = loss_on(trainee, 2 * step + 100)
        second.backward()
        with trainee.accumulate():  # also after one that was not: the step brings it home
            third.backward()
        values.append(trainee.clip(0.3))
        trainee.step()
    return values


def never_zeroed(trainee: Trainee) -> list[float]:
    """Gradients go on adding up over steps when nobody clears them."""
    values = []
    for step in range(4):
        loss = loss_on(trainee, step)
        loss.backward()
        values.append(trainee.mean(loss))
        trainee.optimizer.step()
        if step == 2:
            trainee.optimizer.zero_grad()
    return values


@pytest.mark.quick("several_forwards_one_backward", "reversed_accumulated", "never_zeroed")
@pytest.mark.parametrize(
    "story",
    [
        several_forwards_one_backward,
        in_order,
        in_order_accumulated,
        reversed_accumulated,
        interleaved,
        never_zeroed,
    ],
)
def test_several_forwards_and_backwards(run_ranks: Pool, story: Any) -> None:
    check(run_ranks, story, Stack, ONE_OF_EACH)


@pytest.mark.slow
@pytest.mark.parametrize("story", [in_order, interleaved])
def test_several_forwards_and_backwards_on_nodes(run_ranks: Pool, story: Any) -> None:
    check(run_ranks, story, Stack, NODES, world=4, node_size=2)


def without_backward(trainee: Trainee) -> list[float]:
    """Forwards whose graph is thrown away, and steps without any gradient."""
    values = train(trainee, 1)
    loss_on(trainee, 50)
    loss_on(trainee, 51)
    values += train(trainee, 2, first=1)
    loss_on(trainee, 52)
    trainee.step()
    trainee.step()
    return values + train(trainee, 2, first=3)


def test_forwards_without_backward_and_steps_without_gradient(run_ranks: Pool) -> None:
    check(run_ranks, without_backward, Stack, ONE_OF_EACH)


def retained(trainee: Trainee) -> list[float]:
    values = []
    for step in range(NUM_STEPS):
        loss = loss_on(trainee, step)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        with trainee.accumulate():
            loss.backward()
        values.append(trainee.clip(0.3))
        trainee.step()
    return values + train(trainee, 2, first=10)


def test_retained_graphs(run_ranks: Pool) -> None:
    check(run_ranks, retained, Stack, ONE_OF_EACH)


def retained_crosswise(trainee: Trainee) -> list[float]:
    """Two graphs alive, each run through twice."""
    values = []
    for step in range(NUM_STEPS):
        first, second = loss_on(trainee, 2 * step), loss_on(trainee, 2 * step + 1)
        first.backward(retain_graph=True)
        second.backward(retain_graph=True)
        third = loss_on(trainee, 2 * step + 50)
        first.backward()
        third.backward()
        second.backward()
        values.append(trainee.clip(0.3))
        trainee.step()
    return values


@pytest.mark.quick("Stack")
@pytest.mark.parametrize("build", [Stack, Backwards])
def test_retained_graphs_of_several_forwards(run_ranks: Pool, build: Any) -> None:
    check(run_ranks, retained_crosswise, build, ["zero2", "shard_grad_op", "zero3"])


def gradients_only(trainee: Trainee) -> list[float]:
    """Gradients of the inputs, without touching the parameters' (and before a backward that does)."""
    values = []
    for step in range(NUM_STEPS):
        sizes = []

        def loss_of(rank: int, step: int = step, sizes: list[Tensor] = sizes) -> Tensor:
            x = features(step, rank).requires_grad_()
            loss = trainee.model(x).square().mean()
            (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
            sizes.append(grad.norm())
            return loss

        loss = trainee.share(loss_of)
        values.append(trainee.mean(torch.stack(sizes).mean()))
        loss.backward()
        values.append(trainee.clip(0.3))
        trainee.step()
    return values


def test_gradients_of_inputs_without_those_of_parameters(run_ranks: Pool) -> None:
    check(run_ranks, gradients_only, Stack, ONE_OF_EACH)


def inputs_with_gradients(trainee: Trainee) -> list[float]:
    values = []
    for step in range(NUM_STEPS):
        inputs: list[Tensor] = []

        def loss_of(rank: int, step: int = step, inputs: list[Tensor] = inputs) -> Tensor:
            inputs.append(features(step, rank).requires_grad_())
            return trainee.model(inputs[-1]).square().mean()

        loss = trainee.share(loss_of)
        loss.backward()
        scale = 1 if trainee.is_sharded else trainee.world
        norms = torch.stack([x.grad.norm() * scale for x in inputs if x.grad is not None])
        values.append(trainee.mean(norms.mean()))
        trainee.step()
    return values


def test_inputs_that_require_gradients(run_ranks: Pool) -> None:
    check(run_ranks, inputs_with_gradients, Stack, ONE_OF_EACH)


def penalised(trainee: Trainee) -> list[float]:
    """A gradient penalty: backward through a backward."""
    values = []
    for step in range(NUM_STEPS):

        def loss_of(rank: int, step: int = step) -> Tensor:
            x = features(step, rank).requires_grad_()
            loss = trainee.model(x).square().mean()
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            return loss + grad.square().sum()

        loss = trainee.share(loss_of)
        loss.backward()
        values.append(trainee.clip(0.3))
        trainee.step()
    return values


def test_a_backward_through_a_backward_is_right_or_refused(run_ranks: Pool) -> None:
    """Whole parameters need no gather in the backward."""
    dropping = ["shard_grad_op", "zero3"]
    check(run_ranks, penalised, Stack, ["ddp", "zero2", *dropping], may_refuse=dropping)


# ---------------------------------------------------------------------------------------------------------
# parameters that get no gradient


class Choosy(Block):
    """One of two branches, by the data; the other one's parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(16, 16)

    def forward(self, x: Tensor, use_other: bool = False) -> Tensor:
        return x + self.other(x) if use_other else super().forward(x)


class Chooses(Stack):
    block = Choosy

    def forward(self, x: Tensor, others: tuple[int, ...] = ()) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, use_other=index in others)
        return x * self.scale


def train_with(trainee: Trainee, others_of: Callable[[int, int], tuple[int, ...]]) -> list[float]:
    """`others_of` gives the blocks that take their other branch, by step and rank."""
    losses = []
    for step in range(5):
        loss = trainee.share(
            lambda rank, step=step: trainee.model(features(step, rank), others_of(step, rank)).square().mean()
        )
        loss.backward()
        losses.extend([trainee.mean(loss), trainee.clip(0.5)])
        trainee.step()
    return losses


def unused_on_some_ranks(trainee: Trainee) -> list[float]:
    return train_with(trainee, lambda step, rank: (0, 3) if rank == 0 else (3, 4))


def unused_on_all_ranks(trainee: Trainee) -> list[float]:
    return train_with(trainee, lambda step, rank: (1, 2))


def unused_now_and_then(trainee: Trainee) -> list[float]:
    """Everything is used in the first step, on one rank or the other; later something is missing everywhere."""
    return train_with(
        trainee,
        lambda step, rank: ((0, 1, 2, 3, 4) if rank == 0 else ()) if step in (0, 3) else (0, 1, step),
    )


def unused_in_accumulation(trainee: Trainee) -> list[float]:
    losses = []
    for step in range(4):
        for micro in range(2):
            loss = trainee.share(
                lambda rank, step=step, micro=micro: (
                    trainee.model(features(2 * step + micro, rank), (micro, step)).square().mean()
                )
            )
            if micro == 0 or step == 1:  # in step 1 none is the last
                with trainee.accumulate():
                    loss.backward()
            else:
                loss.backward()
            losses.append(trainee.mean(loss))
        trainee.step()
    return losses


@pytest.mark.quick("unused_on_some_ranks", "unused_in_accumulation")
@pytest.mark.parametrize(
    "story", [unused_on_some_ranks, unused_on_all_ranks, unused_now_and_then, unused_in_accumulation]
)
def test_unused_parameters(run_ranks: Pool, story: Any) -> None:
    check(run_ranks, story, Chooses, ONE_OF_EACH)


@pytest.mark.slow
def test_unused_parameters_on_nodes(run_ranks: Pool) -> None:
    check(run_ranks, unused_now_and_then, Chooses, NODES, world=4, node_size=2)


class Skips(Stack):
    def forward(self, x: Tensor, skipped: tuple[int, ...] = ()) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index not in skipped:
                x = layer(x)
        return x * self.scale


def skipped_on_all_ranks(trainee: Trainee) -> list[float]:
    """Layer dropping: whole units left out, others in every step, none in the first."""
    return train_with(trainee, lambda step, rank: ((), (1, 2), (0,), (3, 4), (0, 1, 2, 3, 4))[step])


def skipped_on_one_rank(trainee: Trainee) -> list[float]:
    return train_with(trainee, lambda step, rank: () if rank else ((2,), (1,), (0,), (4,), (3,))[step])


def run_of_units_skipped_on_one_rank(trainee: Trainee) -> list[float]:
    return train_with(trainee, lambda step, rank: () if rank else (1, 2, 3))


def test_units_skipped_on_all_ranks(run_ranks: Pool) -> None:
    check(run_ranks, skipped_on_all_ranks, Skips, ONE_OF_EACH)


@pytest.mark.quick("run_of_units_skipped_on_one_rank")
@pytest.mark.parametrize("story", [skipped_on_one_rank, run_of_units_skipped_on_one_rank])
def test_units_skipped_on_one_rank(run_ranks: Pool, story: Any) -> None:
    check(run_ranks, story, Skips, ONE_OF_EACH)


# ---------------------------------------------------------------------------------------------------------
# what a unit takes and returns


class Point(NamedTuple):
    x: Tensor
    label: str


@dataclasses.dataclass
class Record:
    x: Tensor
    parts: list[Tensor]
    label: str = "a record"


@cache
def model_output() -> type[Any]:
    """A Hugging Face output: a dict and a dataclass at once. Imported late, because it takes seconds."""
    from transformers.utils import ModelOutput

    @dataclasses.dataclass
    class Output(ModelOutput):
        x: Tensor | None = None
        parts: tuple[Tensor, ...] | None = None

    return Output


class Opaque:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Wraps(Block):
    """Returns its result in something, and takes it out of the same."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, value: Any) -> Any:
        x = self.taken(value)
        y = super().forward(x)
        match self.kind:
            case "tuple":
                return (y, None, 3)
            case "list":
                return [y]
            case "nested":
                return {"a": [({"b": y},)]}
            case "dict":
                return {"x": y, "half": y / 2}
            case "ordered":
                return OrderedDict(x=y)
            case "named tuple":
                return Point(y, "here")
            case "dataclass":
                return Record(y, [y / 2])
            case "ModelOutput":
                return model_output()(x=y, parts=(y / 2, y))
            case _:
                return Opaque(y)

    @staticmethod
    def taken(value: Any) -> Tensor:
        match value:
            case Tensor():
                return value
            case {"a": [({"b": x},)]}:
                return x
            case Record():
                return value.x + value.parts[0]
            case {"x": x, **others}:  # a ModelOutput too
                return x + others["half"] if "half" in others else x + others.get("parts", (0.0,))[0]
            case Point() | Opaque():
                return value.x
            case _:
                return value[0]


class Wrapped(nn.Module):
    kind = "opaque"

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wraps(self.kind) for _ in range(5))

    def forward(self, x: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return Wraps.taken(x)


KINDS = ["tuple", "list", "nested", "dict", "ordered", "named tuple", "dataclass", "ModelOutput"]


class Wrapping:
    """Builds a model whose blocks return this kind of thing; an object, so that it travels to the ranks."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self) -> nn.Module:
        model = Wrapped()
        model.layers = nn.ModuleList(Wraps(self.kind) for _ in range(5))
        return model


@pytest.mark.quick("tuple", "nested", "dict", "dataclass")
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_outputs(run_ranks: Pool, kind: str) -> None:
    check(run_ranks, train, Wrapping(kind), ["zero2", "shard_grad_op", "zero3"])


def test_a_plain_object_as_output(run_ranks: Pool) -> None:
    check(run_ranks, train, Wrapping("opaque"), ONE_OF_EACH)


def opaque_without_grad(strategy: str) -> Tensor:
    sw.init()
    torch.manual_seed(0)
    model, _ = sw.shard(Wrapping("opaque")(), None, strategy, precision="fp32")
    with torch.no_grad():
        return model(features(0, 0))


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_an_opaque_output_is_no_matter_without_gradients(run_ranks: Pool, strategy: str) -> None:
    torch.manual_seed(0)
    expected = Wrapping("opaque")()(features(0, 0)).detach()
    torch.testing.assert_close(run_ranks(2, opaque_without_grad, strategy)[0], expected)


class Leaks(Block):
    """Leaves something on itself that the loss is made of, beside what it returns (auxiliary losses do)."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.auxiliary = self.router(x).square().mean()
        return y


class WithAuxiliaryLoss(Stack):
    block = Leaks

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + torch.stack([layer.auxiliary for layer in self.layers]).sum()


# Enough for one gathered block of any of these models: no slot for a block gathered ahead.
ONE_SLOT = 13_000


def test_an_auxiliary_loss_left_on_the_module_is_right_or_refused(run_ranks: Pool) -> None:
    dropping = ["shard_grad_op", "zero3"]
    check(run_ranks, train, WithAuxiliaryLoss, ["ddp", "zero2", *dropping], may_refuse=dropping)
    for memory_budget in (ONE_SLOT, 10**6):
        check(run_ranks, train, WithAuxiliaryLoss, ["zero3"], may_refuse=["zero3"], memory_budget=memory_budget)


@pytest.mark.quick("Stack-13000", "CalledTwice-25000", "Backwards-13000", "Crossed-1000000")
@pytest.mark.parametrize("memory_budget", [ONE_SLOT, 25_000, 10**6])
@pytest.mark.parametrize("build", [Stack, CalledTwice, Discards, Backwards, Branches, Crossed])
def test_other_numbers_of_gather_slots(run_ranks: Pool, build: Any, memory_budget: int) -> None:
    check(run_ranks, train, build, "zero3", memory_budget=memory_budget)


class Returns(Block):
    """Returns one of its own weights as well, for a penalty."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.up.weight


class Penalises(Stack):
    block = Returns

    def forward(self, x: Tensor) -> Tensor:
        penalty = torch.zeros(())
        weights = []
        for layer in self.layers:
            x, weight = layer(x)
            weights.append(weight)
        for weight in weights:
            penalty = penalty + weight.square().mean()
        return x * self.scale + penalty


def test_a_weight_that_a_unit_returns_is_right_or_refused(run_ranks: Pool) -> None:
    dropping = ["shard_grad_op", "zero3"]
    check(run_ranks, train, Penalises, ["ddp", "zero2", *dropping], may_refuse=dropping)


def regularised(trainee: Trainee) -> list[float]:
    """A penalty on what `parameters()` shows between forward and backward: parts, on a rank that has parts."""
    losses = []
    for step in range(NUM_STEPS):
        loss = loss_on(trainee, step) + 0.01 * sum(param.square().sum() for param in trainee.model.parameters())
        loss.backward()
        losses.append(trainee.clip(0.5))
        trainee.step()
    return losses


def test_a_penalty_on_parameters_is_right_where_they_are_whole(run_ranks: Pool) -> None:
    check(run_ranks, regularised, Stack, ["ddp"])
    check_refused(run_ranks, regularised, Stack, [name for name in LAYOUTS if name != "ddp"], ["parameter"])


class Given(Block):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x * scale)


class GivesItsOwn(Stack):
    """The root hands a parameter of its own to its blocks."""

    block = Given

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.scale)
        return x


def test_a_parameter_handed_to_blocks(run_ranks: Pool) -> None:
    check(run_ranks, train, GivesItsOwn, ONE_OF_EACH)


class CallsSibling(Block):
    """Calls another unit, which does not lie inside it."""

    siblings: tuple[nn.Module, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        for sibling in self.siblings:
            x = x + 0.5 * sibling(x)
        return super().forward(x)


class Siblings(Stack):
    block = CallsSibling

    def __init__(self, calls: tuple[tuple[int, int], ...]) -> None:
        super().__init__()
        for caller, called in calls:
            self.layers[caller].siblings += (self.layers[called],)

    def forward(self, x: Tensor) -> Tensor:
        called = {id(sibling) for layer in self.layers for sibling in layer.siblings}
        for layer in self.layers:
            if id(layer) not in called:
                x = layer(x)
        return x * self.scale


def siblings_of_other_slots() -> nn.Module:
    return Siblings(((1, 2), (3, 4)))


def siblings_of_one_slot() -> nn.Module:
    return Siblings(((2, 0), (3, 1)))


def one_sibling_of_all() -> nn.Module:
    return Siblings(((0, 4), (1, 4), (2, 4), (3, 4)))


@pytest.mark.quick("siblings_of_one_slot")
@pytest.mark.parametrize("build", [siblings_of_other_slots, siblings_of_one_slot, one_sibling_of_all])
def test_units_that_call_other_units(run_ranks: Pool, build: Any) -> None:
    check(run_ranks, train, build, ONE_OF_EACH, may_refuse=["zero3"] if build is one_sibling_of_all else [])


class ByKeyword(Block):
    def forward(self, *, hidden: Tensor, options: dict[str, Any], scale: float = 1.0) -> Tensor:
        options["num_calls"] = options.get("num_calls", 0) + 1
        return super().forward(hidden) * scale + options["bias"]


class TakesKeywords(Stack):
    block = ByKeyword

    def forward(self, *, x: Tensor, bias: Tensor | None = None) -> Tensor:
        options: dict[str, Any] = {"bias": 0.0 if bias is None else bias}
        for layer in self.layers:
            x = layer(options=options, hidden=x, scale=0.9)
        assert options["num_calls"] == len(self.layers)
        return x * self.scale


def train_by_keyword(trainee: Trainee) -> list[float]:
    losses = []
    for step in range(NUM_STEPS):
        loss = trainee.share(
            lambda rank, step=step: trainee.model(x=features(step, rank), bias=features(9, rank)).square().mean()
        )
        loss.backward()
        losses.append(trainee.mean(loss))
        trainee.step()
    return losses


def test_keyword_only_arguments(run_ranks: Pool) -> None:
    check(run_ranks, train_by_keyword, TakesKeywords, ["ddp", "shard_grad_op", "zero3"])


class Reads(nn.Module):
    """The output projection is the embedding's weight, read without calling the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 64, bias=False)
        self.layers = nn.ModuleList(Block(64, 31) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x @ self.embed.weight


def test_a_weight_read_outside_its_own_unit_is_right_or_refused(run_ranks: Pool) -> None:
    """Under zero3 its unit has run before, and a backward needs its place."""
    check(run_ranks, train, Reads, ONE_OF_EACH, may_refuse=["zero3"], units=["Linear", "Block"])


def test_a_weight_of_the_root_may_be_read_anywhere_in_it(run_ranks: Pool) -> None:
    check(run_ranks, train, Reads, ONE_OF_EACH, units=["Block"])


class CallsChildren(nn.Module):
    """Goes through its blocks' parts, and never calls a block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for linear, norm in self.layers:
            x = norm(linear(x))
        return x


def test_children_called_without_their_unit(run_ranks: Pool) -> None:
    check(run_ranks, train, CallsChildren, ONE_OF_EACH)


# ---------------------------------------------------------------------------------------------------------
# parts of a model called by hand


def by_parts(trainee: Trainee) -> list[float]:
    """The user runs the parts and never the model."""
    losses = []
    for step in range(NUM_STEPS):

        def loss_of(rank: int, step: int = step) -> Tensor:
            x = trainee.model.stem(features(step, rank))
            x = trainee.model.body(x)
            return trainee.model.head(x).square().mean()

        loss = trainee.share(loss_of)
        loss.backward()
        losses.extend([trainee.mean(loss), trainee.clip(0.5)])
        trainee.step()
    return losses


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.body = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(16, 3)


def head_only(trainee: Trainee) -> list[float]:
    """A backward that meets no unit but the one around it."""
    losses = []
    for step in range(NUM_STEPS):
        loss = trainee.share(lambda rank, step=step: trainee.model.head(features(step, rank)).square().mean())
        loss.backward()
        losses.extend([trainee.mean(loss), trainee.clip(0.5)])
        trainee.step()
    return losses


@pytest.mark.parametrize("story", [by_parts, head_only])
def test_parts_called_without_the_model(run_ranks: Pool, story: Any) -> None:
    check(run_ranks, story, Parts, ONE_OF_EACH)


# ---------------------------------------------------------------------------------------------------------
# several models


def adversaries(models: tuple[nn.Module, nn.Module], optimizers: Any, share: Any, mean: Any) -> list[float]:
    """Two models in one graph: one learns to fool the other, which learns not to be fooled."""
    generator, critic = models
    losses = []
    for step in range(NUM_STEPS):

        def critic_loss(rank: int, step: int = step) -> Tensor:
            fake = generator(features(step, rank)).detach()
            return critic(fake).mean() - critic(features(step + 50, rank)).square().mean()

        loss = share(critic_loss)
        loss.backward()
        losses.append(mean(loss))
        optimizers[1].step()
        optimizers[1].zero_grad()
        loss = share(lambda rank, step=step: critic(generator(features(step, rank))).square().mean())
        loss.backward()
        losses.append(mean(loss))
        optimizers[0].step()
        optimizers[0].zero_grad()
        optimizers[1].zero_grad()  # it got gradients as well
    return losses


def two_models() -> tuple[tuple[nn.Module, nn.Module], list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    models = Stack(4), Stack(5)
    return models, [sgd(list(model.parameters())) for model in models]


def play_sharded(strategies: tuple[str, str]) -> tuple[list[float], dict[str, Tensor]]:
    sw.init()
    models, optimizers = two_models()
    sharded = [
        sw.shard(model, optimizer, strategy, precision="fp32")
        for model, optimizer, strategy in zip(models, optimizers, strategies, strict=True)
    ]
    trainee = Trainee(models[0], None, dist.get_world_size(), dist.get_rank())
    losses = adversaries(models, [optimizer for _, optimizer in sharded], trainee.share, trainee.mean)
    return losses, sw.full_state_dict(models[0])


@pytest.mark.quick("strategies0", "strategies3")
@pytest.mark.parametrize(
    "strategies", [("zero3", "zero3"), ("zero2", "zero3"), ("shard_grad_op", "ddp"), ("zero3", "zero1")]
)
def test_two_models_in_one_graph(run_ranks: Pool, strategies: tuple[str, str]) -> None:
    models, optimizers = two_models()
    alone = Trainee(models[0], None, 2, None)
    losses = adversaries(models, optimizers, alone.share, alone.mean)
    for seen, weights in run_ranks(2, play_sharded, strategies):
        assert seen == pytest.approx(losses, rel=1e-5)
        for name, value in models[0].state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------
# evaluation


def evaluated_in_between(trainee: Trainee) -> list[float]:
    values = train(trainee, 2)
    trainee.model.eval()
    with torch.no_grad():
        values.append(trainee.mean(loss_on(trainee, 70)))
    with torch.inference_mode():
        values.append(trainee.mean(loss_on(trainee, 71)))
    trainee.model.train()
    values += train(trainee, 2, first=2)
    # Between a forward and its backward, and inside an accumulation.
    first = loss_on(trainee, 40)
    with torch.no_grad():
        values.append(trainee.mean(loss_on(trainee, 72)))
    with trainee.accumulate():
        first.backward()
    with torch.inference_mode():
        values.append(trainee.mean(loss_on(trainee, 73)))
    second = loss_on(trainee, 41)
    second.backward()
    values.append(trainee.clip(0.5))
    with torch.no_grad():  # between backward and step
        values.append(trainee.mean(loss_on(trainee, 74)))
    trainee.step()
    return values + train(trainee, 2, first=4)


@pytest.mark.quick("Backwards")
@pytest.mark.parametrize("build", [Stack, Backwards])
def test_evaluation_in_the_middle_of_training(run_ranks: Pool, build: Any) -> None:
    check(run_ranks, evaluated_in_between, build, ONE_OF_EACH)


@pytest.mark.slow
def test_evaluation_in_the_middle_of_training_on_nodes(run_ranks: Pool) -> None:
    check(run_ranks, evaluated_in_between, Stack, NODES, world=4, node_size=2)


def evaluated_first(trainee: Trainee) -> list[float]:
    """Everything the engine makes lazily is made in inference mode, and must serve training all the same."""
    with torch.inference_mode():
        values = [trainee.mean(loss_on(trainee, 70)), trainee.mean(loss_on(trainee, 71))]
    return values + train(trainee)


@pytest.mark.quick("nested")
@pytest.mark.parametrize("build", [Stack, Backwards, nested])
def test_inference_mode_before_training(run_ranks: Pool, build: Any) -> None:
    check(
        run_ranks,
        evaluated_first,
        build,
        ["ddp", "zero1", "shard_grad_op", "zero3"],
        units=["Block", "Nested"] if build is nested else "auto",
    )


class WithDropout(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x))


def flipped(trainee: Trainee) -> list[float]:
    """`eval` and `train` reach the modules: dropout is off, on, and off again."""
    zeros = []
    for mode in (True, False, True, False):
        trainee.model.train(mode)
        out = trainee.model(features(0, 0, num_samples=64))
        zeros.append(float((out == 0).any()))
        assert trainee.model.layers[0].training == mode
    return zeros


def test_training_flipped_on_and_off(run_ranks: Pool) -> None:
    told = check(run_ranks, flipped, WithDropout, ["ddp", "zero3"])
    assert all(found.values == [1.0, 0.0, 1.0, 0.0] for ranks in told.values() for found in ranks)


def evaluate_only(precision: str, num_rounds: int) -> dict[str, list[Tensor]]:
    sw.init()
    found = {}
    for strategy in LAYOUTS:
        torch.manual_seed(0)
        model, optimizer = sw.shard(Stack(), None, strategy, precision=precision)
        assert optimizer is None
        with torch.no_grad():
            found[strategy] = [model(features(step, dist.get_rank())) for step in range(num_rounds)]
    return found


@pytest.mark.quick("bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluation_without_an_optimizer(run_ranks: Pool, precision: str) -> None:
    torch.manual_seed(0)
    model = Stack()
    dtype = torch.float32
    if precision == "bf16":
        model, dtype = model.bfloat16(), torch.bfloat16
    for rank, found in enumerate(run_ranks(2, evaluate_only, precision, 3)):
        for outputs in found.values():
            for step, output in enumerate(outputs):
                with torch.no_grad():
                    expected = model(features(step, rank).to(dtype))
                assert output.dtype == dtype
                torch.testing.assert_close(output, expected, rtol=1e-5 if precision == "fp32" else 2e-2, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------
# errors on the way


class Trap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("trapped in the backward")


class Trapped(Stack):
    """Raises in front of, inside or behind a block, in forward or backward, when told to."""

    trap: tuple[str, int] | None = None

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if self.trap == ("forward", index):
                raise ValueError("trapped in the forward")
            x = layer(x)
            if self.trap == ("backward", index):
                x = Trap.apply(x)
        return x * self.scale


class TrappedBlock(Block):
    trap = ""

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        if self.trap == "forward":
            raise ValueError("trapped in the forward")
        if self.trap == "backward":
            y = Trap.apply(y)
        return x + self.down(y.tanh())


class TrappedInside(Stack):
    block = TrappedBlock


def spring(trainee: Trainee, step: int) -> None:
    with pytest.raises(ValueError, match="trapped"):
        loss_on(trainee, step).backward()


def survives_trap(trainee: Trainee, direction: str, index: int, inside: bool) -> list[float]:
    values = train(trainee, 2)
    target = trainee.model.layers[index] if inside else trainee.model
    target.trap = direction if inside else (direction, index)
    before = trainee.weights()
    spring(trainee, 33)
    # Nothing of the broken pass may be seen.
    after = trainee.weights()
    assert list(after) == list(before)
    for name in before:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name], before[name]), name
    target.trap = "" if inside else None
    trainee.optimizer.zero_grad()
    return values + train(trainee, 3, first=2)


class Surviving:
    def __init__(self, direction: str, index: int, inside: bool) -> None:
        self.case = direction, index, inside

    def __call__(self, trainee: Trainee) -> list[float]:
        return survives_trap(trainee, *self.case)


@pytest.mark.quick("False-forward", "True-backward")
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("inside", [False, True])
def test_training_goes_on_after_an_error(run_ranks: Pool, direction: str, inside: bool) -> None:
    for index in (0, 2, 4):
        build = TrappedInside if inside else Trapped
        check(run_ranks, Surviving(direction, index, inside), build, ONE_OF_EACH)


@pytest.mark.parametrize("strategy", ["shard_grad_op", "zero3"])
def test_weights_after_an_error_are_the_masters(run_ranks: Pool, strategy: str) -> None:
    """In bf16 a compute copy that were still shown would be seen by its dtype and its rounding."""
    for direction in ("forward", "backward"):
        run_ranks(2, trap_in_bf16, strategy, direction)


def trap_in_bf16(strategy: str, direction: str) -> None:
    sw.init()
    torch.manual_seed(0)
    model = TrappedInside()
    model, optimizer = sw.shard(model, sgd(list(model.parameters())), strategy, precision="bf16")
    trainee = Trainee(model, optimizer, dist.get_world_size(), dist.get_rank())
    survives_trap(trainee, direction, 2, inside=True)


def error_then_accumulate(trainee: Trainee) -> list[float]:
    """Gradients of complete backwards survive a forward that fails afterwards."""
    train(trainee, 1)
    with trainee.accumulate():
        loss_on(trainee, 20).backward()
    trainee.model.trap = ("forward", 3)
    spring(trainee, 21)
    trainee.model.trap = None
    loss_on(trainee, 22).backward()
    values = [trainee.clip(0.5)]
    trainee.step()
    return values + train(trainee, 2, first=1)


def test_a_failed_forward_keeps_gradients_that_were_complete(run_ranks: Pool) -> None:
    check(run_ranks, error_then_accumulate, Trapped, ONE_OF_EACH)


def freed(trainee: Trainee) -> list[float]:
    values = train(trainee, 1)
    loss = loss_on(trainee, 20)
    loss.backward()
    with pytest.raises(RuntimeError, match=r"second time|freed"):
        loss.backward()
    values.append(trainee.clip(0.5))
    trainee.step()
    return values + train(trainee, 2, first=1)


def test_backward_through_a_freed_graph(run_ranks: Pool) -> None:
    check(run_ranks, freed, Stack, ONE_OF_EACH)


def freed_then_another(trainee: Trainee) -> list[float]:
    """The failed backward is followed at once by a good one, with no forward between them."""
    values = train(trainee, 1)
    first, second = loss_on(trainee, 20), loss_on(trainee, 21)
    first.backward()
    with pytest.raises(RuntimeError, match=r"second time|freed"):
        first.backward()
    second.backward()
    values.append(trainee.clip(0.5))
    trainee.step()
    return values + train(trainee, 2, first=1)


def test_a_good_backward_right_after_one_through_a_freed_graph(run_ranks: Pool) -> None:
    check(run_ranks, freed_then_another, Stack, ONE_OF_EACH)


def stale(trainee: Trainee) -> list[float]:
    values = train(trainee, 1)
    if trainee.is_sharded:  # one process notices only what it saved itself
        old = loss_on(trainee, 20)
        values += train(trainee, 1, first=1)
        refused(trainee, old.backward, "optimizer.step()", "run the forward again")
        trainee.optimizer.zero_grad()
    else:
        values += train(trainee, 1, first=1)
    return values + train(trainee, 2, first=2)


def test_backward_of_a_forward_before_the_step_is_refused(run_ranks: Pool) -> None:
    check(run_ranks, stale, Stack, ONE_OF_EACH)


def overflowing(trainee: Trainee) -> list[float]:
    """A NaN in a gradient is the user's: it arrives, and it does not outlive zero_grad."""
    loss = loss_on(trainee, 5) * float("nan")
    loss.backward()
    assert trainee.clip(1.0) != trainee.clip(1.0)
    trainee.optimizer.zero_grad()
    return train(trainee)


def test_a_nan_does_not_outlive_zero_grad(run_ranks: Pool) -> None:
    check(run_ranks, overflowing, Stack, ONE_OF_EACH)


# ---------------------------------------------------------------------------------------------------------
# other ways to run a model


def under_autocast(trainee: Trainee) -> list[float]:
    values = []
    for step in range(NUM_STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = trainee.share(lambda rank, step=step: trainee.model(features(step, rank)).float().square().mean())
        loss.backward()
        values.append(trainee.mean(loss))
        trainee.step()
    return values


def test_autocast_by_the_user(run_ranks: Pool) -> None:
    # The mean is over other sizes of batch, and autocast rounds what it multiplies to 8 bits.
    check(run_ranks, under_autocast, Stack, ["ddp", "zero3"], tolerance=1e-2)


def halved(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    assert module.up.weight.shape == (37, 16)
    return output * 0.5 + module.up.weight.mean()


def raised(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] + module.up.bias.mean(),)


def with_hooks() -> nn.Module:
    model = Stack()
    model.layers[1].register_forward_hook(halved)
    model.layers[2].register_forward_pre_hook(raised)
    return model


def hooked_later(trainee: Trainee) -> list[float]:
    """Hooks put on after sw.shard see whole parameters before the forward, and what it returned after it."""
    trainee.model.layers[1].register_forward_hook(lambda module, args, output: output * 0.5)
    trainee.model.layers[2].register_forward_pre_hook(raised)
    return train(trainee)


def test_hooks_of_the_user(run_ranks: Pool) -> None:
    check(run_ranks, train, with_hooks, ONE_OF_EACH)
    check(run_ranks, hooked_later, Stack, ONE_OF_EACH)
