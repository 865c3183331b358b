"""Communication runs behind computation, and so do updates on the host.

Collectives take time by a clock of ours, which other work on the machine does not move: each occupies its channel for
a while, one after another, and `finish` waits until it is through. So do blocks that compute. The same step with every
collective awaited where it starts is the serial one. An update on the host is held up until the computation has come to
a certain point, and what happens is written down.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.core.engine.guards import engine_of
from shardwise.core.optim.host_updates import FlatUpdate
from shardwise.core.unit.gradient import Gradient
from shardwise.core.wire import collectives
from tests.harness import Pool
from tests.support.strategies import NAMED, STRATEGIES, disk_for, slow_but

COMPUTE_S = 1.0
COLLECTIVE_S = 1.0
NUM_BLOCKS = 5
NUM_STEPS = 3
HIDDEN = 32
PATIENCE_S = 20.0  # of an update that is held up


class Clock:
    """Of this rank."""

    now_s = 0.0


class Pause(torch.autograd.Function):
    """Computing, as far as time goes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Clock.now_s += COMPUTE_S
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Clock.now_s += COMPUTE_S
        return grad


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + Pause.apply(self.inner(x))


class Slowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@dataclass
class SlowWork:
    work: dist.Work
    through_at: float

    def wait(self, *limit: timedelta) -> None:
        Clock.now_s = max(Clock.now_s, self.through_at)
        self.work.wait(*limit)

    def is_completed(self) -> bool:
        return self.work.is_completed()


@contextmanager
def slow_collectives(is_serial: bool) -> Iterator[None]:
    original = collectives.Collective.start
    free_at: dict[int, float] = {}

    def start(flight: collectives.Collective) -> None:
        original(flight)
        if flight.work is not None and flight.call is not None:
            channel = id(flight.channel)
            begins = max(Clock.now_s, free_at.get(channel, 0.0))
            free_at[channel] = begins + COLLECTIVE_S
            flight.work = SlowWork(flight.work, begins + COLLECTIVE_S)
            if is_serial:
                flight.work.wait()
                flight.work = None

    collectives.Collective.start = start
    try:
        yield
    finally:
        collectives.Collective.start = original


def seconds_per_step(strategy: Any, node_size: int, is_serial: bool) -> float:
    sw.init()
    torch.manual_seed(0)
    model = Slowed()
    model, optimizer = sw.shard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        strategy,
        precision="bf16",
        node_size=node_size,
        units=["Block"],
        **disk_for(strategy),
    )
    with slow_collectives(is_serial):
        for number_of_step in range(1 + NUM_STEPS):
            if number_of_step == 1:
                began_s = Clock.now_s
            model(torch.ones(2, HIDDEN)).float().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return (Clock.now_s - began_s) / NUM_STEPS


@pytest.mark.parametrize(
    ("world", "node_size", "strategy"),
    slow_but(
        [*((2, 2, strategy) for strategy in ("ddp", "zero1", "zero3", "zero3_offload")), (4, 2, "hpz")],
        [*((2, 2, strategy) for strategy in [*NAMED, "mapping"]), (4, 2, "hpz")],
    ),
)
def test_a_step_is_faster_than_serial(run_ranks: Pool, world: int, node_size: int, strategy: str) -> None:
    serial, ours = (
        max(run_ranks(world, seconds_per_step, STRATEGIES[strategy], node_size, is_serial))
        for is_serial in (True, False)
    )
    # Two passes of computation, at least, and of what travels a part at least behind them.
    assert 2 * NUM_BLOCKS * COMPUTE_S <= ours < serial


# ---------------------------------------------------------------------------------------------------------
# without a clock


def number(what: str) -> str:
    return what.rpartition(".")[2]


def log_computation(model: nn.Module, note: Callable[[str], None]) -> None:
    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, index=index: note(f"forward {index}"))
        block.inner.register_full_backward_pre_hook(lambda *_, index=index: note(f"backward {index}"))


def log_of_a_step(strategy: str) -> list[str]:
    """What was started and computed in the second step, in order; units by their number."""
    sw.init()
    torch.manual_seed(0)
    model = Slowed()
    model, optimizer = sw.shard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, precision="bf16", units=["Block"]
    )
    log: list[str] = []
    original = collectives.Collective.start

    def start(flight: collectives.Collective) -> None:
        if flight.call is not None:  # not the exchange of the ranks' orders after the first step
            log.append(f"start {'gather' if flight.kind == 'all_gather' else 'reduce'} {number(flight.what)}")
        original(flight)

    log_computation(model, log.append)
    collectives.Collective.start = start
    try:
        for _ in range(2):
            x = torch.ones(2, HIDDEN, requires_grad=True)
            model(x).float().mean().backward()
            log.append("step")  # which starts the first gathers of the next one
            optimizer.step()
            optimizer.zero_grad()
    finally:
        collectives.Collective.start = original
    return log[log.index("step") :]


def test_zero3_gathers_ahead_in_both_directions(run_ranks: Pool) -> None:
    for log in run_ranks(2, log_of_a_step, "zero3"):
        last = NUM_BLOCKS - 1
        assert log[:4] == ["step", "start gather 0", "start gather 1", "forward 0"]
        for index in range(last):
            assert log.index(f"start gather {index + 1}") < log.index(f"forward {index}")
        backward = log[log.index(f"backward {last}") :]
        # The last two are still in their slots; the others are gathered behind the backward before theirs.
        assert not {f"start gather {last}", f"start gather {last - 1}"} & set(backward)
        for index in range(last - 1):
            assert backward.index(f"start gather {index}") < backward.index(f"backward {index + 1}")
        # A reduction is on its way before the next unit's backward begins.
        for index in range(1, NUM_BLOCKS):
            assert log.index(f"start reduce {index}") < log.index(f"backward {index - 1}")


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_whole_parameters_are_gathered_behind_the_next_forward(run_ranks: Pool, strategy: str) -> None:
    for log in run_ranks(2, log_of_a_step, strategy):
        for index in range(NUM_BLOCKS - 1):
            assert log.index(f"start gather {index + 1}") < log.index(f"forward {index}")
        assert log.index("forward 0") < log.index(f"start gather {NUM_BLOCKS - 1}")


def test_ddp_reduces_behind_the_backward(run_ranks: Pool) -> None:
    for log in run_ranks(2, log_of_a_step, "ddp"):
        for index in range(1, NUM_BLOCKS):
            assert log.index(f"start reduce {index}") < log.index(f"backward {index - 1}")


def channels_apart() -> bool:
    sw.init()
    model, _ = sw.shard(Slowed(), None, "zero3", precision="bf16")
    mesh = engine_of(model).mesh
    return mesh.channels["gather"]["world"].group is not mesh.channels["reduce"]["world"].group


def test_gathers_and_reductions_have_communicators_of_their_own(run_ranks: Pool) -> None:
    assert all(run_ranks(2, channels_apart))


# ---------------------------------------------------------------------------------------------------------
# the host


def log_of_the_host(strategy: str, slow: int | None, until: str, **options: Any) -> list[str]:
    """Of three steps: what was computed, when gradients left for the host, when updates began and ended. That of the
    `slow` unit waits until something else has been written down since it was asked for."""
    sw.init()
    torch.manual_seed(0)
    model = Slowed()
    given = torch.optim.AdamW(model.parameters())
    model, optimizer = sw.shard(
        model, given, strategy, precision="bf16", units=["Block"], **disk_for(strategy), **options
    )
    log: list[str] = []
    may_go_on, has_begun = threading.Event(), threading.Event()

    def note(entry: str) -> None:
        if options and entry == until:
            # Of early updates: the host's thread may come to it late, but must not need the computation to go on.
            has_begun.wait(PATIENCE_S)
        log.append(entry)
        if entry == until:
            may_go_on.set()

    log_computation(model, note)
    run, leave = FlatUpdate.run, Gradient.leave

    def logged_run(self: FlatUpdate, *arguments: Any) -> None:
        unit = number(self.state.unit_name)
        note(f"update {unit}")
        if unit == str(slow):
            has_begun.set()
            may_go_on.wait(PATIENCE_S)
        run(self, *arguments)
        note(f"updated {unit}")

    def logged_leave(self: Gradient) -> None:
        if self.leaving is not None:
            note(f"leave {number(self.carrier.unit_name)}")
        leave(self)

    FlatUpdate.run, Gradient.leave = logged_run, logged_leave
    try:
        for _ in range(3):
            x = torch.ones(2, HIDDEN, requires_grad=True)
            loss = model(x).float().mean()
            if options:
                may_go_on.clear()
                has_begun.clear()
            loss.backward()
            note("step")
            if not options:
                optimizer.clip_grad_norm(1.0)
                may_go_on.clear()
            optimizer.step()
            optimizer.zero_grad()
        may_go_on.set()
        sw.traffic(model)  # waits for updates
    finally:
        FlatUpdate.run, Gradient.leave = run, leave
    return log


LAST = NUM_BLOCKS - 1


def from_step(log: list[str], number: int) -> list[str]:
    """From the call of a step to that of the next one."""
    begins = [position for position, entry in enumerate(log) if entry == "step"]
    return log[begins[number] : begins[number + 1]]


@pytest.mark.parametrize(
    "strategy", ["ddp+optimizer=host", "zero2_offload", "zero2+optimizer=disk", "zero3_offload", "zero3_nvme"]
)
@pytest.mark.parametrize("slow", [2, LAST])
def test_the_next_forward_goes_on_while_the_host_updates(run_ranks: Pool, strategy: str, slow: int) -> None:
    """As far as the unit that is not updated yet. Those that the forward needs first are updated first."""
    for log in run_ranks(2, log_of_the_host, strategy, slow, f"forward {slow - 1}"):
        for number_of_step in range(2):
            seen = from_step(log, number_of_step)
            assert [entry for entry in seen if entry.startswith("updated")] == [
                f"updated {index}" for index in range(NUM_BLOCKS)
            ]
            for index in range(NUM_BLOCKS):
                assert seen.index(f"updated {index}") < seen.index(f"forward {index}")
            assert seen.index(f"update {slow}") < seen.index(f"updated {slow}")
            assert seen.index(f"forward {slow - 1}") < seen.index(f"updated {slow}")


@pytest.mark.parametrize("strategy", ["zero2_offload", "zero2+optimizer=disk", "zero3_offload", "zero3_nvme"])
def test_gradients_leave_behind_the_backward(run_ranks: Pool, strategy: str) -> None:
    """While one is reduced and the next one is written, the one before goes."""
    for log in run_ranks(2, log_of_the_host, strategy, None, ""):
        seen = from_step(log, 0)
        for index in range(3, NUM_BLOCKS):
            assert seen.index(f"leave {index}") < seen.index(f"backward {index - 3}")
        # Updates wait for the norm.
        assert not [entry for entry in seen[seen.index(f"backward {LAST}") :] if entry.startswith("update")]


@pytest.mark.parametrize("strategy", ["zero2_offload", "zero3_offload"])
def test_early_updates_run_behind_the_backward(run_ranks: Pool, strategy: str) -> None:
    for log in run_ranks(2, log_of_the_host, strategy, LAST, "backward 0", early_update=True):
        seen = log[: log.index("step")]
        assert seen.index(f"update {LAST}") < seen.index("backward 0")
        assert log.index("backward 0") < log.index(f"updated {LAST}")
