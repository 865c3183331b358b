"""A captured step beside the step itself, without a GPU: a tape of operations stands for the CUDA graph.

Replaying it runs the same operations on the same tensors again, with no Python between them. That is what a graph
does, so what the engine must get right is tested here: a recording that holds for every later step, whatever else
used the model in between. Real graphs are in tests/gpu.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwise as sw
from shardwise.api.cuda_graph import NUM_EAGER_CALLS, CapturedStep, Replay
from shardwise.base.errors import ConfigurationError, StateError
from shardwise.core.engine.guards import engine_of
from shardwise.core.engine.runtime import Engine
from shardwise.core.engine.streams import Lane
from tests.harness import Pool

HIDDEN = 8
NUM_STEPS = NUM_EAGER_CALLS + 6
STRATEGIES: dict[str, Any] = {name: name for name in ("ddp", "zero1", "zero2", "zero3", "hpz")}
STRATEGIES["mixed"] = {"0": "zero2", "*": "zero3"}


class Tape(TorchDispatchMode):
    """Records without doing: what it changed is put back when the recording ends."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        states = [state for unit in engine.units for state in unit.states]
        rests = [state.rest for state in states if state.rest is not None]
        self.kept = [
            *(state.master for state in states),
            *rests,
            *engine.gathers.memory.slots,
            *engine.gathers.memory.own.values(),
        ]
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    @contextmanager
    def recording(self) -> Iterator[None]:
        before = [tensor.clone() for tensor in self.kept]
        with self:
            yield
        with self._uncounted():
            for tensor, value in zip(self.kept, before, strict=True):
                tensor.copy_(value)

    def replay(self) -> None:
        with self._uncounted():
            for func, args, kwargs, recorded in self.operations:
                if func.is_view:
                    continue
                for old, new in zip(tree_leaves(recorded), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.detach().copy_(new)

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(self.kept)):
            yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Scaled(nn.Sequential):
    """Blocks, and a frozen weight beside them in the unit that holds them."""

    def __init__(self, *blocks: Block) -> None:
        super().__init__(*blocks)
        self.scale = nn.Parameter(torch.full((HIDDEN,), 0.5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


def train(
    strategy: str, captured: bool, evaluations: Iterable[int], budget: int | None, rewrites: Iterable[int] = ()
) -> list[list[float]]:
    sw.init()
    torch.manual_seed(0)
    model: nn.Module = Scaled(*(Block() for _ in range(5)))
    for block in list(model.children())[::2]:
        block.up.requires_grad_(False)  # what is frozen is not gathered again where it still lies
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = sw.shard(
        model, optimizer, STRATEGIES[strategy], precision="bf16", units=["Block"], memory_budget=budget
    )
    engine = engine_of(model)
    x = torch.randn(4, HIDDEN)

    def step(x: Tensor) -> Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = CapturedStep(engine, optimizer, step) if captured else step
    seen = []
    with (
        patch.object(torch.cuda, "CUDAGraph", lambda: Tape(engine)),
        patch.object(torch.cuda, "synchronize"),
        patch.object(torch.cuda, "empty_cache"),
        patch.object(Lane, "capture", lambda lane, tape: tape.recording()),
    ):
        for index in range(NUM_STEPS):
            seen.append([float(run(x))])
            if index in evaluations:
                with torch.no_grad():
                    seen[-1].append(float(model(x).float().square().mean()))
            if index in rewrites:
                with sw.whole(model, write=True), torch.no_grad():
                    for param in model.parameters():
                        param.mul_(1.25)
    return seen


@pytest.mark.quick("ddp-None", "zero3-1048576", "hpz-None", "mixed-1048576")
@pytest.mark.parametrize("budget", [None, 1 << 20])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_replay_is_a_step_whatever_ran_in_between(run_ranks: Pool, strategy: str, budget: int | None) -> None:
    last_eager = NUM_EAGER_CALLS - 1
    for evaluations in ((), (last_eager,), (last_eager + 2,), range(NUM_STEPS)):
        eager = run_ranks(1, train, strategy, False, evaluations, budget)[0]
        assert run_ranks(1, train, strategy, True, evaluations, budget)[0] == eager


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_replay_finds_weights_that_were_written_in_between(run_ranks: Pool, strategy: str) -> None:
    rewrites = (NUM_EAGER_CALLS + 1, NUM_EAGER_CALLS + 3)
    eager = run_ranks(1, train, strategy, False, (), None, rewrites)[0]
    assert run_ranks(1, train, strategy, True, (), None, rewrites)[0] == eager


def refusals() -> list[str]:
    sw.init()
    said = []
    model = nn.Sequential(Block(), Block())
    model, optimizer = sw.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3", precision="fp32")
    with pytest.raises(ConfigurationError) as cpu:
        sw.capture(model, optimizer, lambda: None)
    said.append(str(cpu.value))
    model(torch.ones(1, HIDDEN)).sum().backward()
    with pytest.raises(StateError) as gradients:
        Replay(engine_of(model)).begin()
    return [*said, str(gradients.value)]


def test_refusals(run_ranks: Pool) -> None:
    cpu, gradients = run_ranks(1, refusals)[0]
    assert "the model is on cpu" in cpu
    assert "zero_grad" in gradients
