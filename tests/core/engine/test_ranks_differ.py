"""Ranks that do not do the same: it works, or every rank ends soon in one report that names what each was at."""

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.core import mesh
from shardwise.core.wire.collectives import exchange
from tests.harness import Ending, Pool

HANG_S = 3.0
WITHIN_S = 120.0  # of the start of a job, on a machine with much else to do


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Blocks of different sizes: collectives that are mixed up would abort the process, or give wrong numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.layers = nn.ModuleList(Block(width) for width in (24, 24, 48, 32, 24))

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4)) -> Tensor:
        for index in order:
            x = self.layers[index](x)
        return x * self.scale


def build(strategy: Any, **options: Any) -> tuple[nn.Module, Any]:
    sw.init(hang_timeout_s=HANG_S)
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return sw.shard(model, optimizer, strategy, precision="fp32", units=["Block"], **options)


def step(model: nn.Module, optimizer: Any, **arguments: Any) -> None:
    model(torch.ones(2, 16), **arguments).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


Script = Callable[[nn.Module, Any, int], None]


def run(script: Script, strategy: Any, num_before: int, options: dict[str, Any]) -> None:
    """A few steps that are alike, then the script."""
    model, optimizer = build(strategy, **options)
    for _ in range(num_before):
        step(model, optimizer)
    script(model, optimizer, dist.get_rank())


def another_order(model: nn.Module, optimizer: Any, rank: int) -> None:
    for _ in range(3):
        step(model, optimizer, order=(0, 3, 2, 1, 4) if rank == 0 else (0, 1, 2, 3, 4))


def an_extra_forward(model: nn.Module, optimizer: Any, rank: int) -> None:
    """Self-conditioning on one rank."""
    if rank == 1:
        with torch.no_grad():
            model(torch.ones(2, 16))
    for _ in range(3):
        step(model, optimizer)


def an_extra_training_forward(model: nn.Module, optimizer: Any, rank: int) -> None:
    if rank == 0:
        model(torch.ones(2, 16))
    for _ in range(3):
        step(model, optimizer)


def a_unit_called_twice(model: nn.Module, optimizer: Any, rank: int) -> None:
    for _ in range(3):
        step(model, optimizer, order=(0, 1, 2, 3, 4, 0, 1) if rank == 0 else (0, 1, 2, 3, 4))


def a_failed_forward(model: nn.Module, optimizer: Any, rank: int) -> None:
    """One rank leaves out a batch that fails."""
    for number in range(3):
        try:
            if number == 1 and rank == 0:
                model(torch.ones(2, 16), order=(0, 1, 99))
            step(model, optimizer)
        except IndexError:
            continue


def a_failed_backward(model: nn.Module, optimizer: Any, rank: int) -> None:
    def fail(grad: Tensor) -> Tensor:
        raise ValueError("fails here")

    for number in range(3):
        loss = model(torch.ones(2, 16)).square().mean()
        if number == 1 and rank == 0:
            loss.register_hook(fail)
        try:
            loss.backward()
        except ValueError:
            continue
        optimizer.step()
        optimizer.zero_grad()


def more_micro_batches(model: nn.Module, optimizer: Any, rank: int) -> None:
    for _ in range(3):
        for _ in range(2 + rank):
            with sw.accumulate(model):
                model(torch.ones(2, 16)).square().mean().backward()
        step(model, optimizer)


def a_state_dict_on_one_rank(model: nn.Module, optimizer: Any, rank: int) -> None:
    if rank == 0:
        sw.full_state_dict(model)
    for _ in range(3):
        step(model, optimizer)


def clipping_on_one_rank(model: nn.Module, optimizer: Any, rank: int) -> None:
    model(torch.ones(2, 16)).square().mean().backward()
    if rank == 0:
        optimizer.clip_grad_norm(1.0)
    optimizer.step()
    step(model, optimizer)


def fewer_steps_and_a_barrier(model: nn.Module, optimizer: Any, rank: int) -> None:
    """A loop with fewer steps, and a barrier behind it: no one can end that but its own group, when a rank is gone."""
    try:
        for _ in range(2 if rank == 0 else 4):
            step(model, optimizer)
    except sw.WireError as error:
        os._exit(7 if "barrier" in str(error) else 8)
    dist.barrier()


def fewer_steps_and_an_end(model: nn.Module, optimizer: Any, rank: int) -> None:
    for _ in range(2):
        step(model, optimizer)
    if rank == 0:
        mesh.leave()
        return
    for _ in range(3):
        step(model, optimizer)


def a_death(model: nn.Module, optimizer: Any, rank: int) -> None:
    step(model, optimizer)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        step(model, optimizer)


def stuck_in_code(model: nn.Module, optimizer: Any, rank: int) -> None:
    sw.init(hang_timeout_s=1, timeout_s=5)
    step(model, optimizer)
    if rank == 0:
        time.sleep(12)
    step(model, optimizer)


def stopped(model: nn.Module, optimizer: Any, rank: int) -> None:
    """And continued when the other rank has given up."""
    sw.init(hang_timeout_s=0.5)
    step(model, optimizer)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        for _ in range(2):
            step(model, optimizer)
    except sw.WireError as error:
        for pid in re.findall(r"kill -CONT (\d+)", str(error)) if rank == 0 else []:
            os.kill(int(pid), signal.SIGCONT)
        raise


def slow_in_code(model: nn.Module, optimizer: Any, rank: int) -> None:
    """Slower than ranks wait for each other in different places, but within what an idle rank may take."""
    sw.init(hang_timeout_s=2)
    for _ in range(2):
        if rank == 0:
            time.sleep(4)
        step(model, optimizer)


def a_save_to_a_slow_disk(model: nn.Module, optimizer: Any, rank: int) -> None:
    """Slower than an idle rank may be anywhere else."""
    sw.init(hang_timeout_s=0.5)
    to_disk = os.fsync

    def slowly(file: int) -> None:
        if rank == 1:
            time.sleep(3)
        to_disk(file)

    with tempfile.TemporaryDirectory() as folder:
        place = exchange(mesh.everyone(), folder)[0]
        os.fsync = slowly
        try:
            sw.save(f"{place}/checkpoint", model, optimizer)
        finally:
            os.fsync = to_disk
        exchange(mesh.everyone(), None)


def an_evaluation_of_whole_weights(model: nn.Module, optimizer: Any, rank: int) -> None:
    """On one rank: nothing is gathered, so nobody is asked."""
    for _ in range(3):
        step(model, optimizer)
        if rank == 0:
            with torch.no_grad():
                model(torch.ones(2, 16))


def everything_on_all_ranks(model: nn.Module, optimizer: Any, rank: int) -> None:
    """What was never done before, by all: it is announced, and goes on."""
    for number in range(4):
        step(model, optimizer, order=(0, 3, 2, 1, 4) if number % 2 else (0, 1, 2, 3, 4, 0))
        with torch.no_grad():
            for _ in range(number):
                model(torch.ones(2, 16))
        sw.full_state_dict(model)
        for _ in range(number):
            with sw.accumulate(model):
                model(torch.ones(2, 16)).square().mean().backward()
        try:
            model(torch.ones(2, 16), order=(0, 1, 99))
        except IndexError:
            continue


def a_save_of_one_rank(model: nn.Module, optimizer: Any, rank: int) -> None:
    if rank == 0:
        sw.save("/nonexistent/shardwise-never-written", model, optimizer)
    for _ in range(3):
        step(model, optimizer)


def another_model(model: nn.Module, optimizer: Any, rank: int) -> None:
    """Of two that look alike."""
    twin, other = build("zero3")
    step(model, optimizer)
    step(twin, other)
    step(model if rank == 0 else twin, optimizer if rank == 0 else other)
    step(model, optimizer)


EVERYWHERE = [
    another_order, an_extra_forward, an_extra_training_forward, a_unit_called_twice, a_failed_forward,
    a_failed_backward, more_micro_batches, a_state_dict_on_one_rank, clipping_on_one_rank, a_save_of_one_rank,
    another_model,
]  # fmt: skip


def endings(
    pool: Pool, script: Script, strategy: Any, num_before: int = 3, world: int = 2, **options: Any
) -> list[Ending]:
    return pool.throwaway(world, run, script, strategy, num_before, options, deadline=WITHIN_S)


def assert_reported(found: list[Ending], *words: str) -> None:
    """Every rank has raised the same report."""
    for ending in found:
        assert ending.kind == "raised", f"{ending}\n{ending.detail}"
        assert ending.error.startswith("WireError"), ending.detail
        for word in words:
            assert word in ending.error, ending.error
    assert len({ending.error for ending in found}) <= 1


@pytest.mark.quick("another_order")
@pytest.mark.parametrize("script", [another_order, a_state_dict_on_one_rank])
def test_a_report_on_every_rank(run_ranks: Pool, script: Script) -> None:
    assert_reported(endings(run_ranks, script, "zero3"), "rank 0", "rank 1")


@pytest.mark.parametrize("script", [everything_on_all_ranks])
def test_ranks_that_differ_from_before_but_not_from_each_other(run_ranks: Pool, script: Script) -> None:
    for strategy in ("zero3", "shard_grad_op", "zero1"):
        run_ranks(2, run, script, strategy, 2, {})


def test_a_disk_may_take_its_time(run_ranks: Pool) -> None:
    run_ranks(2, run, a_save_to_a_slow_disk, "zero2", 1, {})


def test_an_evaluation_on_one_rank(run_ranks: Pool) -> None:
    run_ranks(2, run, an_evaluation_of_whole_weights, "ddp", 2, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "strategy"),
    [
        # Two of the four in turns: every script and every strategy many times.
        (script, strategy)
        for i, script in enumerate(EVERYWHERE)
        for j, strategy in enumerate(["zero1", "zero2", "shard_grad_op", "zero3_offload"])
        if (i + j) % 2 == 0
    ],
)
def test_under_every_layout(run_ranks: Pool, script: Script, strategy: str) -> None:
    """Where no collective differs, nothing has to end: a rank that left a batch out is missed when its loop is over."""
    found = endings(run_ranks, script, strategy)
    assert_reported([ending for ending in found if ending.kind != "returned"], "rank 0", "rank 1")


@pytest.mark.slow
@pytest.mark.parametrize("script", EVERYWHERE)
def test_on_two_nodes(run_ranks: Pool, script: Script) -> None:
    assert_reported(endings(run_ranks, script, "hsdp", world=4, node_size=2), "rank 0", "rank 3")


@pytest.mark.slow
def test_a_loop_with_fewer_steps(run_ranks: Pool) -> None:
    waiting, reported = endings(run_ranks, fewer_steps_and_a_barrier, "zero3")
    assert reported.exitcode == 7, reported.detail
    assert waiting.kind == "raised", waiting
    _, reported = endings(run_ranks, fewer_steps_and_an_end, "zero3")
    assert reported.error.startswith("WireError"), reported.detail
    assert "rank 0 has left" in reported.error


@pytest.mark.slow
def test_a_rank_that_dies(run_ranks: Pool) -> None:
    dead, reported = endings(run_ranks, a_death, "zero3")
    assert dead.kind == "died"
    assert reported.error.startswith("WireError"), reported.detail
    assert "rank 0 has died" in reported.error


@pytest.mark.slow
def test_a_rank_that_is_stopped(run_ranks: Pool) -> None:
    assert_reported(endings(run_ranks, stopped, "zero3"), "rank 1 is stopped, and rank 0 waits for it")


@pytest.mark.slow
def test_a_rank_in_code_of_its_own(run_ranks: Pool) -> None:
    for ending in endings(run_ranks, stuck_in_code, "zero3"):
        assert ending.error.startswith("WireError"), ending.detail
        assert "time.sleep(12)" in ending.error
    assert [ending.kind for ending in endings(run_ranks, slow_in_code, "zero3")] == ["returned", "returned"]
