"""Nothing writes weights on the host while a copy to the device may still read them.

On a GPU these copies are asynchronous. Here they are simulated: a copy counts as running until somebody waits for a
point behind it on the lane of gathers, or a gradient that was computed with it has arrived on the host. Whoever waits,
and the test at the end, compares the copied memory with what it was.
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.core.engine.guards import engine_of
from shardwise.core.engine.streams import Lane
from shardwise.core.unit.carrier import Carrier
from tests.core.engine.test_offload import Stack, loss_of
from tests.core.engine.test_speculation import ENOUGH, NO_LIMIT, await_host
from tests.harness import Pool
from tests.support.strategies import disk_for
from tests.support.training import adamw

Act = Callable[[nn.Module, Any], object]


class Copies:
    """The copies from the host that run: the memory and its contents at the start."""

    def __init__(self) -> None:
        self.running: list[tuple[Tensor, Tensor]] = []
        self.num_started = self.num_ended = self.num_torn = 0
        self._lock = threading.Lock()

    def start(self, source: Tensor) -> None:
        with self._lock:
            self.num_started += 1
            self.running.append((source, source.clone()))

    def end(self, num_started: int) -> None:
        """End all copies but those after the first `num_started`."""
        with self._lock:
            ended = self.running[: max(num_started - self.num_ended, 0)]
            del self.running[: len(ended)]
            self.num_ended += len(ended)
            self.num_torn += sum(not torch.equal(source, before) for source, before in ended)


class Point:
    """A mark behind the copies that were started so far."""

    def __init__(self, copies: Copies) -> None:
        self.copies, self.num_started = copies, copies.num_started

    def query(self) -> bool:
        return self.copies.num_ended >= self.num_started

    def synchronize(self) -> None:
        self.copies.end(self.num_started)


class LateLane(Lane):
    """The lane of gathers (`mark`), or that of gradients to the host, which come after the gathers."""

    def __init__(self, copies: Copies) -> None:
        super().__init__(torch.device("cpu"))
        self.copies = copies

    def mark(self) -> Any:
        return Point(self.copies)

    def mark_for_host(self) -> None:
        self.copies.end(self.copies.num_started)

    def compute_waits_for(self, *marks: Any) -> None:
        pass


def nothing(model: nn.Module, optimizer: Any) -> None:
    pass


def evaluate(model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        loss_of(model, 50)


def step_again(model: nn.Module, optimizer: Any) -> None:
    """With the gradients of the last step: nothing arrives in between."""
    optimizer.step()
    evaluate(model, optimizer)


def write_in_parts(model: nn.Module, optimizer: Any) -> None:
    part = model.layers[1].up.weight.data
    evaluate(model, optimizer)
    part.mul_(0.9)


def load(model: nn.Module, optimizer: Any) -> None:
    weights = {name: value * 0.9 for name, value in sw.full_state_dict(model).items()}
    evaluate(model, optimizer)
    sw.load_full_state_dict(model, weights)


def num_torn(strategy: str, act: Act, speculation: int, precision: str) -> tuple[int, int]:
    """Runs on every rank. The copies that read memory while it was written, and all copies."""
    sw.init()
    torch.manual_seed(0)
    model: Any = Stack()
    options: dict[str, Any] = {"precision": precision, "speculation": speculation, **disk_for(strategy)}
    model, optimizer = sw.shard(model, adamw(list(model.parameters())), strategy, **options)
    engine, copies, copy = engine_of(model), Copies(), Carrier.copy

    def late_copy(self: Carrier, target: Tensor, source: Tensor) -> None:
        if engine.host.arena.owns(source) and target.numel():
            copies.start(source)
        copy(self, target, source)

    gathers, reductions = engine.gathers, engine.reductions
    gathers.lane = LateLane(copies)
    reductions._leave_lane = LateLane(copies)
    Carrier.copy = late_copy  # type: ignore[method-assign]
    try:
        for step in range(5):
            loss_of(model, step).backward()
            await_host(model)
            act(model, optimizer)
            if speculation:
                optimizer.clip_grad_norm(NO_LIMIT)
            optimizer.step()
            optimizer.zero_grad()
        engine.finish_updates()
    finally:
        Carrier.copy = copy  # type: ignore[method-assign]
    copies.end(copies.num_started)
    if speculation and act in (nothing, evaluate):
        assert engine.host_jobs.num_ahead["accepted"]
    return copies.num_torn, copies.num_started


@pytest.mark.parametrize("act", [nothing, evaluate, step_again, write_in_parts, load])
@pytest.mark.parametrize(
    ("strategy", "precision", "speculation"),
    [
        ("zero3_offload", "fp32", 0),
        ("zero3_offload", "bf16", 0),
        ("zero3_offload", "bf16", ENOUGH),
        ("zero2_offload", "bf16", 0),
        ("zero2_offload", "bf16", ENOUGH),
        ("zero3+optimizer=host", "bf16", ENOUGH),
    ],
)
def test_no_copy_is_torn(run_ranks: Pool, strategy: str, precision: str, speculation: int, act: Act) -> None:
    for torn, copied in run_ranks(2, num_torn, strategy, act, speculation, precision):
        assert copied
        assert torn == 0
