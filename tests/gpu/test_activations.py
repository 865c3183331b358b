"""Activations on the host over a real bus: the same bits, less memory, no waiting, copies behind the computation."""

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.base.errors import ConfigurationError
from shardwise.core.engine.guards import engine_of
from shardwise.trainer.checkpointing import Mode, checkpoint_blocks
from tests.harness import Pool

pytestmark = pytest.mark.gpu

NUM_BLOCKS = 12


@dataclass(frozen=True)
class Size:
    width: int
    num_rows: int

    @property
    def input_bytes(self) -> int:
        """Of a block, in 16 bits."""
        return 2 * self.num_rows * self.width


SMALL = Size(1024, 8192)  # inputs of 16 MiB
LARGE = Size(4096, 16384)  # 128 MiB; a block's forward takes a few milliseconds, and so does its copy


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.layers = nn.ModuleList(Block(width) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return x


class Run:
    def __init__(self, size: Size, mode: Mode, strategy: str, optimizer: type[torch.optim.Optimizer], **options: Any):
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = Stack(size.width)
        checkpoint_blocks(model, mode)
        made = optimizer(model.parameters(), lr=1e-3, **options)  # type: ignore[call-arg]
        self.model, self.optimizer = sw.shard(model, made, strategy, precision="bf16")
        self.size = size
        self.engine: Any = engine_of(self.model)

    def batch(self, step: int) -> Tensor:
        generator = torch.Generator("cuda").manual_seed(step)
        return torch.randn(self.size.num_rows, self.size.width, device="cuda", generator=generator)

    def step(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def weights(self) -> dict[str, Tensor]:
        return sw.full_state_dict(self.model)


def made(size: Size, mode: Mode, strategy: str) -> Run:
    sw.init(device="cuda:0")
    return Run(size, mode, strategy, torch.optim.SGD)


def assert_same_training(run: Callable[[str], tuple[list[float], dict[str, Tensor]]], strategy: str) -> None:
    (plain, plain_weights), (seen, weights) = run(strategy), run(f"{strategy}+activations=host")
    assert seen == plain
    for name, value in plain_weights.items():
        assert torch.equal(value, weights[name]), name


# ---------------------------------------------------------------------------------------------------------
# the same training


def same_bits(strategy: str, mode: Mode) -> None:
    def train(strategy: str) -> tuple[list[float], dict[str, Tensor]]:
        run = made(SMALL, mode, strategy)
        losses = []
        for step in range(5):
            # Two forwards, and one backward through each of them, before a step.
            first, second = (run.model(run.batch(2 * step + part)).square().mean() for part in range(2))
            with sw.accumulate(run.model):
                second.backward()
            first.backward()
            losses += [first.item(), second.item()]
            run.optimizer.step()
            run.optimizer.zero_grad()
        return losses, run.weights()

    assert_same_training(train, strategy)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("strategy", ["ddp", "shard_grad_op", "zero3"])
def test_training_is_the_same_to_the_last_bit(run_ranks: Pool, strategy: str, mode: Mode) -> None:
    """Without checkpointing the bus is the slowest part, and everything waits for it."""
    run_ranks(1, same_bits, strategy, mode)


def test_ranks_on_one_gpu(run_ranks: Pool) -> None:
    run_ranks(2, same_bits, "zero3", "full")


@pytest.fixture
def no_group_is_left() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("no_group_is_left")
def test_a_captured_step_is_refused() -> None:
    """A recording has no place for what the host lends."""
    sw.init()
    run = Run(SMALL, "full", "zero3+activations=host", torch.optim.AdamW, capturable=True, fused=True)
    with pytest.raises(ConfigurationError, match="keep everything on the device"):
        sw.capture(run.model, run.optimizer, run.step)


# ---------------------------------------------------------------------------------------------------------
# memory


def peak_bytes(strategy: str) -> tuple[int, dict[str, int], int]:
    """Of the third forward on the device; what its step moved; host memory that was allocated since the first. (In the
    backward gradients take the place of activations.)"""
    run = made(SMALL, "full", strategy)
    held = []
    for step in range(3):
        torch.cuda.reset_peak_memory_stats()
        loss = run.model(run.batch(step)).square().mean()
        peak = torch.cuda.max_memory_allocated()
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        held.append(run.engine.activations.buffers.held_bytes)
    return peak, run.engine.host.last_moves.by_way(), held[-1] - held[0]


def test_the_device_holds_the_inputs_of_two_blocks(run_ranks: Pool) -> None:
    size = SMALL.input_bytes
    plain, moved, _ = run_ranks(1, peak_bytes, "zero3")[0]
    assert moved == {}
    hosted, moved, grown = run_ranks(1, peak_bytes, "zero3+activations=host")[0]
    assert moved == {"to_device": (NUM_BLOCKS - 2) * size, "to_host": (NUM_BLOCKS - 1) * size}
    assert grown == 0
    print(f"peak of a forward: {plain / 1e6:.0f} MB, with activations on the host {hosted / 1e6:.0f} MB")
    assert plain - hosted >= (NUM_BLOCKS - 3) * size


def is_pinned() -> list[bool]:
    run = made(SMALL, "full", "zero3+activations=host")
    run.step(run.batch(0))
    buffers = run.engine.activations.buffers
    return [buffer.is_pinned for buffer in (*buffers._free, *buffers._returned)]


def test_host_memory_is_pinned(run_ranks: Pool) -> None:
    assert run_ranks(1, is_pinned)[0] == [True] * (NUM_BLOCKS - 1)


# ---------------------------------------------------------------------------------------------------------
# time


def num_waits(strategy: str) -> int:
    """How often the host waited for the GPU in a forward and a backward."""
    run = made(SMALL, "full", strategy)
    run.step(run.batch(0))
    run.step(run.batch(1))
    x = run.batch(2)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run.model(x).square().mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return len([warning for warning in found if "synchroniz" in str(warning.message)])


def test_the_host_waits_for_nothing_more(run_ranks: Pool) -> None:
    plain = run_ranks(1, num_waits, "zero3")[0]
    assert run_ranks(1, num_waits, "zero3+activations=host")[0] <= plain


def step_seconds(strategy: str) -> float:
    run = made(LARGE, "full", strategy)
    x = run.batch(0)
    for _ in range(3):
        run.step(x)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(5):
        run.step(x)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / 5


def copy_seconds() -> float:
    """The copies of a step, one after the other, with nothing beside them."""
    host = torch.empty(LARGE.input_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda:0")
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(NUM_BLOCKS - 1):
        host.copy_(device, non_blocking=True)
    for _ in range(NUM_BLOCKS - 2):
        device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def test_copies_run_behind_the_computation(run_ranks: Pool) -> None:
    plain = run_ranks(1, step_seconds, "zero3")[0]
    hosted = run_ranks(1, step_seconds, "zero3+activations=host")[0]
    copies = run_ranks(1, copy_seconds)[0]
    hidden = (plain + copies - hosted) / copies
    print(f"a step {1e3 * plain:.1f} ms, on the host {1e3 * hosted:.1f}, copies alone {1e3 * copies:.1f}: {hidden:.0%}")
    assert hosted < plain + copies
