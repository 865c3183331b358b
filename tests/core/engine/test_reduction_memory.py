"""Reduction slots as a GPU has them: of the size of their unit, opened late, released early, with the same bits.

The ranks of these tests have no GPU. They are told to give memory back as if they had one, and that no slot is small.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.base.errors import StateError
from shardwise.core.engine.guards import engine_of
from shardwise.core.engine.runtime import Engine
from shardwise.core.schedule import step_schedule
from shardwise.core.unit.gradient import Gradient
from tests.core.engine.test_direct import batch, build
from tests.harness import Pool

STRATEGIES = ["zero3", "zero2", "zero1", "ddp", "shard_grad_op", "hsdp", "hpz", "zero3+grads_as=int8", "zero3_offload"]


def like_a_gpu(engine: Engine, min_late_bytes: int) -> None:
    engine.reductions.memory.gives_back = True
    step_schedule.MIN_LATE_BYTES = min_late_bytes


def sharded(strategy: str) -> tuple[Any, Any]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return sw.shard(model, optimizer, strategy, precision="fp32", node_size=1)


def part_of(step: int) -> Tensor:
    """Few rows, so that a slot is larger than what its gradients are computed from."""
    return batch(step)[torch.distributed.get_rank(), None, :1]


def train(strategy: str, min_late_bytes: int | None, num_micro: int) -> tuple[dict[str, Tensor], int, int, int]:
    """Weights after some steps, the number of gradients that were late, and the memory of slots: at its peak, now."""
    sw.init()
    model, optimizer = sharded(strategy)
    engine, num_late, put_late = engine_of(model), 0, Gradient.put_late
    if min_late_bytes is not None:
        like_a_gpu(engine, min_late_bytes)

    def counted(self: Gradient) -> None:
        nonlocal num_late
        num_late += len(self.late)
        put_late(self)

    Gradient.put_late = counted  # type: ignore[method-assign]
    try:
        for step in range(3):
            for index in range(num_micro - 1):
                with sw.accumulate(model):
                    model(part_of(10 * step + index)).square().mean().backward()
            model(part_of(step)).square().mean().backward()
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        Gradient.put_late = put_late  # type: ignore[method-assign]
    memory = engine.reductions.memory
    return sw.full_state_dict(model), num_late, memory.peak_bytes, sum(map(memory.num_bytes, range(2)))


@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_bits_do_not_depend_on_when_slots_are_opened(run_ranks: Pool, strategy: str, num_micro: int) -> None:
    kept = run_ranks(2, train, strategy, None, num_micro)
    sized = run_ranks(2, train, strategy, 1 << 40, num_micro)
    late = run_ranks(2, train, strategy, 0, num_micro)
    has_slots = strategy not in ("zero1", "ddp")
    for one, two, three in zip(kept, sized, late, strict=True):
        assert one[1] == two[1] == 0
        assert (three[1] > 0) == has_slots
        assert two[3] == three[3] == 0  # given back
        assert three[2] <= two[2] <= one[2]
        if has_slots:
            # The three blocks share one slot, instead of two.
            assert 0 < 1.9 * three[2] < two[2]
        for other in (two[0], three[0]):
            assert all(torch.equal(one[0][name], weight) for name, weight in other.items())


def broken_off() -> tuple[bool, bool]:
    """A backward that fails, and one that changes a gradient in place after the layer has seen it."""
    sw.init()
    model, optimizer = sharded("zero3")
    reference, _ = sharded("zero3")
    like_a_gpu(engine_of(model), 0)

    def fail(_: Tensor) -> None:
        raise ValueError("broken off")

    x = part_of(0).requires_grad_()
    x.register_hook(fail)
    with pytest.raises(ValueError, match="broken off"):
        model(x).square().mean().backward()
    optimizer.zero_grad()
    for each in (model, reference):
        each(part_of(1)).square().mean().backward()
    with sw.whole(model, grads=True), sw.whole(reference, grads=True):
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        is_equal = all(torch.equal(one.grad, other.grad) for one, other in pairs)
    optimizer.zero_grad()
    held: list[Tensor] = []

    def watch(_: nn.Module, args: object, out: Tensor) -> None:
        out.register_hook(held.append)

    def clear(_: Tensor) -> None:
        held[0].zero_()

    def change(_: nn.Module, args: object, out: Tensor) -> None:
        out.register_hook(clear)

    model.blocks[0].twice.register_forward_hook(watch)
    model.blocks[0].norm.register_forward_hook(change)
    try:
        model(part_of(2)).square().mean().backward()
        is_refused = False
    except StateError as error:
        is_refused = "in place" in str(error)
    return is_equal, is_refused


def test_late_gradients_of_a_backward_that_failed_are_forgotten(run_ranks: Pool) -> None:
    assert run_ranks(2, broken_off) == [(True, True)] * 2
