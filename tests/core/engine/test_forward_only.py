"""Parameters that travel encoded to forwards alone: what forwards and backwards compute with, and what is gathered."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.api.cuda_graph import Replay
from shardwise.core.engine.guards import engine_of
from shardwise.core.schedule.unit_status import snapshot
from shardwise.planner.events import step_events
from tests.harness import Pool

WIDTH = 32
NUM_LAYERS = 4
LAYER_BYTES = 4 * WIDTH * WIDTH
LAYERS = [f"layers.{index}.linear" for index in range(NUM_LAYERS)]
# A head that lies in the root, beside layers in slots.
ALL = [*LAYERS, "head"]
STRATEGIES = ["zero3+params_as=int8:forward", "hsdp+params_as=e4m3:64:forward+grads_as=int8"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Chain(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x)


@dataclass
class Use:
    """Of a linear layer's weight, in one forward of it."""

    name: str
    x: Tensor
    weight: Tensor
    out: Tensor
    is_recompute: bool


def watched(strategy: Any, checkpointed: bool = False, **options: Any) -> tuple[nn.Module, Any, list[Use]]:
    sw.init()
    torch.manual_seed(0)
    model = Chain(checkpointed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = sw.shard(model, optimizer, strategy, precision="fp32", units=["Layer"], node_size=2, **options)
    uses: list[Use] = []

    def note(name: str, module: nn.Linear, args: tuple[Tensor], out: Tensor) -> None:
        is_recompute = torch._C._current_graph_task_id() != -1
        uses.append(Use(name, args[0], module.weight.detach().clone(), out, is_recompute))
        for tensor in (args[0], out):
            if tensor.requires_grad:
                tensor.retain_grad()

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *args, name=name: note(name, *args))
    return model, optimizer, uses


def some_input() -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


def off(seen: Tensor, expected: Tensor) -> float:
    return float(((seen - expected).norm() / expected.norm()).detach())


def rounded_in(uses: list[Use], masters: dict[str, Tensor]) -> list[str]:
    """The names of weights that were computed with otherwise than they are."""
    return [use.name for use in uses if off(use.weight, masters[f"{use.name}.weight"]) > 1e-3]


def two_micro_batches(strategy: str, budget: int | None, checkpointed: bool) -> list[Any]:
    """Of each: what the forward and what the recomputation had rounded, and how far outputs are from those of the
    weights seen, and gradients from those of the masters, and of the weights seen, at most and at least."""
    model, _, uses = watched(strategy, checkpointed, memory_budget=budget)
    masters = sw.full_state_dict(model)
    told = []
    for _ in range(2):
        uses.clear()
        with sw.accumulate(model):
            model(some_input()).square().sum().backward()
        forwards = [use for use in uses if not use.is_recompute]
        assert [use.name for use in forwards] == ALL
        grads = [(use, use.x.grad, use.out.grad) for use in forwards]
        by_master = [off(into, out @ masters[f"{use.name}.weight"]) for use, into, out in grads]
        by_seen = {use.name: off(into, out @ use.weight) for use, into, out in grads}
        told.append(
            {
                "forward": rounded_in(forwards, masters),
                "recompute": rounded_in([use for use in uses if use.is_recompute], masters),
                "num_recomputed": len(uses) - len(forwards),
                "outputs": max(off(use.out, F.linear(use.x, use.weight)) for use in forwards),
                "gradients": max(by_master),
                "other_gradients": min(by_seen[name] for name in rounded_in(forwards, masters)),
                "weights": [use.weight for use in uses],
            }
        )
    return told


@pytest.mark.quick("*-True")
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forwards_compute_with_what_arrived_and_backwards_with_what_is_exact(
    run_ranks: Pool, strategy: str, checkpointed: bool
) -> None:
    ranks = run_ranks(4, two_micro_batches, strategy, None, checkpointed)
    for first, second in ranks:
        assert first["forward"] == ALL
        # What the backward has gathered last serves the next forward.
        assert second["forward"] == LAYERS[2:]
        for told in (first, second):
            assert told["recompute"] == []
            assert told["num_recomputed"] == (NUM_LAYERS if checkpointed else 0)
            assert told["outputs"] < 1e-6
            assert told["gradients"] < 1e-6
            assert told["other_gradients"] > 1e-3
    for told in ranks[1:]:
        for own, other in zip(told, ranks[0], strict=True):
            assert all(torch.equal(*pair) for pair in zip(own["weights"], other["weights"], strict=True))


def rounded_by_budget(strategy: str, num_slots: int) -> list[list[str]]:
    """In the forwards of two micro-batches, in one without a backward, and after a step."""
    model, optimizer, uses = watched(strategy, memory_budget=num_slots * LAYER_BYTES)
    found = []
    for _ in range(2):
        model(some_input()).square().sum().backward()
        found.append(rounded_in(uses, sw.full_state_dict(model)))
        uses.clear()
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(2):
        with torch.no_grad():
            model(some_input())
        found.append(rounded_in(uses, sw.full_state_dict(model)))
        uses.clear()
    return found


@pytest.mark.parametrize(("num_slots", "second"), [(1, LAYERS[1:]), (3, LAYERS[3:]), (NUM_LAYERS, [])])
def test_slots_that_keep_exact_weights_save_gathers(run_ranks: Pool, num_slots: int, second: list[str]) -> None:
    for found in run_ranks(2, rounded_by_budget, STRATEGIES[0], num_slots):
        assert found == [ALL, second, ALL, ALL]


def twice_through_one_graph(strategy: str) -> tuple[float, list[str]]:
    """How far the gradient of two backwards is from twice that of one; what an evaluation in between had rounded."""
    model, _, uses = watched(strategy)
    x = some_input()
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    assert x.grad is not None
    once = x.grad.clone()
    uses.clear()
    with torch.no_grad():
        model(some_input())
    found = rounded_in(uses, sw.full_state_dict(model))
    loss.backward()
    return off(x.grad, 2 * once), found


def test_a_graph_that_is_kept_goes_on_with_exact_weights(run_ranks: Pool) -> None:
    for apart, rounded in run_ranks(2, twice_through_one_graph, STRATEGIES[0]):
        assert apart < 1e-6
        assert rounded == LAYERS[2:]


# ---------------------------------------------------------------------------------------------------------
# weights that are not trained: they stay as they were gathered last


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.adapter = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.frozen(x) + self.adapter(x)).tanh()


def adapted(budget: int | None) -> tuple[nn.Module, Any]:
    sw.init()
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
    model = nn.Sequential(*(Adapted() for _ in range(NUM_LAYERS)), head)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    return sw.shard(model, optimizer, STRATEGIES[0], precision="fp32", units=["Adapted"], memory_budget=budget)


def step(model: nn.Module, optimizer: Any, num_micro: int = 1) -> None:
    for micro in range(num_micro):
        with sw.accumulate(model) if micro < num_micro - 1 else nullcontext():
            model(some_input()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def ledger_beside_plan(budget: int | None) -> list[tuple[Counter[Any], Counter[Any]]]:
    model, optimizer = adapted(budget)
    engine = engine_of(model)
    found = []
    for index, num_micro in enumerate((1, 1, 2, 1)):
        events = step_events(engine.schedule, num_micro, first_step=index == 0)
        step(model, optimizer, num_micro)
        assert engine.mesh.ledger.last_step is not None
        found.append((Counter(engine.mesh.ledger.last_step), Counter(call for event in events for call in event.calls)))
    return found


@pytest.mark.parametrize("budget", [None, 1 << 20])
def test_the_ledger_equals_the_plan_beside_frozen_weights(run_ranks: Pool, budget: int | None) -> None:
    for steps in run_ranks(2, ledger_beside_plan, budget):
        assert [seen == planned for seen, planned in steps] == [True] * len(steps)
        # What is frozen and stays where it is does not travel again.
        num_bytes = [sum(call.num_bytes for call in seen.elements() if call.kind == "all_gather") for seen, _ in steps]
        assert num_bytes[0] > num_bytes[1]


def beginnings_and_ends(budget: int | None) -> list[bool]:
    """Whether steps that could be recorded begin in the same state, whatever ran before; each ends as it began."""
    model, optimizer = adapted(budget)
    step(model, optimizer)
    replay, statuses = Replay(engine_of(model)), engine_of(model).statuses
    states = []
    for evaluates in (False, True, True, False):
        if evaluates:
            with torch.no_grad():
                model(some_input())
        replay.begin()
        states.append(snapshot(statuses))
        step(model, optimizer)
        replay.end_recording()
    return [state == states[0] for state in states]


@pytest.mark.parametrize("budget", [None, 1 << 20])
def test_a_step_ends_as_it_began_so_that_it_can_be_recorded(run_ranks: Pool, budget: int | None) -> None:
    assert run_ranks(2, beginnings_and_ends, budget) == [[True] * 4] * 2
