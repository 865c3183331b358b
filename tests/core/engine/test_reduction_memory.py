"""Reduction slots as a GPU has them: of the size of their unit, opened late, released early, with the same bits.

The ranks of these tests have no GPU. They are told to give memory back as if they had one, and that no slot is small.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.base.errors import StateError
from shardwise.core.engine import reductions
from shardwise.core.engine.guards import engine_of
from shardwise.core.engine.runtime import Engine
from shardwise.core.schedule import step_schedule
from shardwise.core.unit.gradient import Gradient
from tests.core.engine.test_direct import batch, build
from tests.harness import Pool

STRATEGIES = ["zero3", "zero2", "zero1", "ddp", "shard_grad_op", "hsdp", "hpz", "zero3+grads_as=int8", "zero3_offload"]


@contextmanager
def like_a_gpu(engine: Engine, min_late_bytes: int) -> Iterator[None]:
    """Give memory back as on a GPU. Slots of fewer bytes are not late; no gradient of autograd is small."""
    engine.reductions.memory.gives_back = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_schedule, "MIN_LATE_BYTES", min_late_bytes)
        patch.setattr(reductions, "MAX_HELD_BYTES", 0 if min_late_bytes == 0 else 1 << 40)
        yield


def sharded(strategy: str, precision: str = "fp32") -> tuple[Any, Any]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return sw.shard(model, optimizer, strategy, precision=precision, node_size=1)


def part_of(step: int) -> Tensor:
    """Few rows, so that a slot is larger than what its gradients are computed from."""
    return batch(step)[torch.distributed.get_rank(), None, :1]


class Seen(NamedTuple):
    """Weights after some steps, the number of gradients that were late, and the bytes of slots: at their peak, now."""

    weights: dict[str, Tensor]
    num_late: int
    peak_bytes: int
    num_bytes: int


def train(strategy: str, min_late_bytes: int | None, num_micro: int, precision: str = "fp32") -> Seen:
    sw.init()
    model, optimizer = sharded(strategy, precision)
    engine, num_late, put_late = engine_of(model), 0, Gradient.put_late

    def counted(self: Gradient) -> None:
        nonlocal num_late
        num_late += len(self.late)
        put_late(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gradient, "put_late", counted)
        with nullcontext() if min_late_bytes is None else like_a_gpu(engine, min_late_bytes):
            for step in range(3):
                for index in range(num_micro - 1):
                    with sw.accumulate(model):
                        model(part_of(10 * step + index)).square().mean().backward()
                model(part_of(step)).square().mean().backward()
                optimizer.clip_grad_norm(1.0)
                optimizer.step()
                optimizer.zero_grad()
    memory = engine.reductions.memory
    return Seen(sw.full_state_dict(model), num_late, memory.peak_bytes, sum(map(memory.num_bytes, range(2))))


@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_bits_do_not_depend_on_when_slots_are_opened(run_ranks: Pool, strategy: str, num_micro: int) -> None:
    kept, sized, late = (run_ranks(2, train, strategy, least, num_micro) for least in (None, 1 << 40, 0))
    has_slots = strategy not in ("zero1", "ddp")
    for one, two, three in zip(kept, sized, late, strict=True):
        assert one.num_late == two.num_late == 0
        assert (three.num_late > 0) == has_slots
        check(one, two, three, has_slots)


def check(kept: Seen, sized: Seen, late: Seen, has_slots: bool) -> None:
    assert sized.num_bytes == late.num_bytes == 0  # given back
    assert late.peak_bytes <= sized.peak_bytes <= kept.peak_bytes
    if has_slots:
        # The three blocks share one slot, instead of two.
        assert 0 < 1.9 * late.peak_bytes < sized.peak_bytes
    for other in (sized, late):
        assert all(torch.equal(kept.weights[name], weight) for name, weight in other.weights.items())


@pytest.mark.parametrize("strategy", ["zero3", "zero3_offload"])
def test_copied_gradients_of_the_first_units_share_a_slot(run_ranks: Pool, strategy: str) -> None:
    kept, sized, late = (run_ranks(2, train, strategy, least, 2, "bf16") for least in (None, 1 << 40, 0))
    for one, two, three in zip(kept, sized, late, strict=True):
        assert one.num_late == two.num_late == three.num_late == 0  # a CPU writes no product of bf16 in fp32
        check(one, two, three, has_slots=True)


def broken_off() -> bool:
    """A backward fails, and then another one runs. True if that has the gradients of a model that did not fail."""
    sw.init()
    (model, optimizer), (reference, _) = sharded("zero3"), sharded("zero3")

    def fail(_: Tensor) -> None:
        raise ValueError("broken off")

    x = part_of(0).requires_grad_()
    x.register_hook(fail)
    with like_a_gpu(engine_of(model), 0):
        with pytest.raises(ValueError, match="broken off"):
            model(x).square().mean().backward()
        optimizer.zero_grad()
        for each in (model, reference):
            each(part_of(1)).square().mean().backward()
    with sw.whole(model, grads=True), sw.whole(reference, grads=True):
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        return all(torch.equal(one.grad, other.grad) for one, other in pairs)


def test_late_gradients_of_a_backward_that_failed_are_forgotten(run_ranks: Pool) -> None:
    assert run_ranks(2, broken_off) == [True] * 2


def change_a_gradient() -> None:
    """A hook changes the gradient of a layer's output in place, after the layer's backward."""
    sw.init()
    model, _ = sharded("zero3")
    held: list[Tensor] = []

    def watch(_: nn.Module, args: object, out: Tensor) -> None:
        out.register_hook(held.append)

    def clear(_: Tensor) -> None:
        held[0].zero_()

    def change(_: nn.Module, args: object, out: Tensor) -> None:
        out.register_hook(clear)

    model.blocks[0].twice.register_forward_hook(watch)
    model.blocks[0].norm.register_forward_hook(change)
    with like_a_gpu(engine_of(model), 0), pytest.raises(StateError, match=r"blocks\.0\.twice\.weight.* in place"):
        model(part_of(2)).square().mean().backward()


def test_a_gradient_that_is_changed_before_it_is_used_is_refused(run_ranks: Pool) -> None:
    run_ranks(2, change_a_gradient)


class Inverted(torch.autograd.Function):
    """Holds its output only, and turns it back into its input in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x * 2
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        ctx.saved_tensors[0].div_(2)
        return grads[0] * 2


class InvertedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(Inverted.apply(self.one(x)))


def change_an_input() -> None:
    sw.init()
    model = nn.Sequential(InvertedBlock(), InvertedBlock())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = sw.shard(model, optimizer, "zero3", precision="fp32", units=["InvertedBlock"])
    with like_a_gpu(engine_of(model), 0), pytest.raises(StateError, match=r"changed the input of '1\.two\.weight'"):
        model(torch.ones(4, 8)).square().mean().backward()


def test_an_input_that_is_changed_before_it_is_used_is_refused(run_ranks: Pool) -> None:
    run_ranks(2, change_an_input)


class Queries(nn.Module):
    """A layer whose input is a part of another weight, directly or behind `detach`."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(6, 8))
        self.one, self.two, self.three = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.three(x) + self.one(self.queries[:4]).mean(0) + self.two(self.queries.data[None]).mean(1)


def train_queries(min_late_bytes: int) -> dict[str, Tensor]:
    sw.init()
    model: Any = nn.Sequential(*(Queries() for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = sw.shard(model, optimizer, "zero3", precision="fp32", units=["Queries"])
    with like_a_gpu(engine_of(model), min_late_bytes):
        for _ in range(2):
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return sw.full_state_dict(model)


def test_a_layer_may_read_another_weight(run_ranks: Pool) -> None:
    """Its late gradient must not read memory that other units have by then."""
    for one, other in zip(run_ranks(2, train_queries, 1 << 40), run_ranks(2, train_queries, 0), strict=True):
        assert all(torch.equal(one[name], value) for name, value in other.items())


def fail_while_finishing() -> None:
    """An error of a reduction that a layer's backward finishes is not taken for a weight without a direct gradient."""
    sw.init()
    model, _ = sharded("zero3")

    def fail() -> None:
        raise StateError("a reduction that fails")

    for state in engine_of(model).trainable_states[1:]:
        state.gradient.finish_reduction = fail
    with pytest.raises(StateError, match="a reduction that fails"):
        model(part_of(1)).square().mean().backward()


def test_an_error_while_memory_is_opened_is_raised(run_ranks: Pool) -> None:
    run_ranks(1, fail_while_finishing)
