"""Bytes per parameter and rank are those of the ZeRO paper, in the plan and in the tensors that are really held.

Shapes need no padding here, so the arithmetic is exact. A parameter under Adam in mixed precision costs 2 bytes as
bf16, 2 as a bf16 gradient (4 where gradients are summed in fp32), and 12 for the fp32 master and two moments. Beside
this state a rank holds gather slots and reduction slots, and nothing else. What rests off the device is pieces of one
arena on the host and of one file on disk; on a CPU that is how it is told from the device's.
"""

import gc
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import shardwise as sw
from shardwise.api.memory_report import Memory
from shardwise.core.engine.guards import engine_of
from shardwise.core.engine.runtime import Engine
from shardwise.core.layout import PRESETS, Strategy, layout_of
from shardwise.core.schedule.state_bytes import NUM_STAGED, NUM_WINDOWS, StateBytes, state_bytes
from shardwise.core.schedule.step_schedule import NUM_REDUCTIONS
from shardwise.core.unit.state import OnDisk
from tests.harness import Pool
from tests.support.strategies import ALL, CORNERS, ENCODED, ENCODED_ALWAYS, NAMED, STRATEGIES, disk_for, slow_but

NUM_BLOCKS = 6
HIDDEN = 128
# Divides, for up to four ranks, into shards of whole quantisation blocks, and of whole pages in 16 bits.
BLOCK_ELEMS = HIDDEN * HIDDEN
PSI = NUM_BLOCKS * BLOCK_ELEMS


class Rows(nn.Module):
    """Blocks of one matrix each, and nothing for the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def sharded_rows(strategy: Strategy, **options: object) -> tuple[nn.Module, torch.optim.Optimizer, Engine]:
    sw.init()
    torch.manual_seed(0)
    model = Rows()
    given = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = sw.shard(model, given, strategy, **disk_for(strategy), **options)
    return model, optimizer, engine_of(model)


def backward(model: nn.Module) -> None:
    model(torch.ones(2, HIDDEN)).float().square().mean().backward()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(model)
    optimizer.step()
    optimizer.zero_grad()


# ---------------------------------------------------------------------------------------------------------
# state


def held_state(engine: Engine, optimizer: torch.optim.Optimizer) -> StateBytes:
    """What a rank really holds on its device of parameters, gradients and optimizer, tensor by tensor."""

    def on_device(tensors: Iterable[Tensor]) -> int:
        return num_bytes(t for t in tensors if not (isinstance(t, OnDisk) or engine.host.arena.owns(t)))

    params = grads = optimizer_bytes = 0
    for unit in engine.units:
        for state in unit.states:
            flat = state.flat
            if flat.depth_of_params == 0 and state.whole.data_ptr() != state.master.data_ptr():
                params += on_device([state.whole])
            if state.rest is not None:
                params += on_device([state.rest])
            if flat.master == flat.compute:
                params += on_device([state.master])
            else:
                optimizer_bytes += on_device([state.master])
            if state.gradient.grads is not None:
                grads += on_device([state.gradient.grads])
            grads += on_device(state.carrier.lost.values())
    for moments in optimizer.state.values():
        optimizer_bytes += on_device(moment for moment in moments.values() if moment.numel() > 1)
    return StateBytes(params, grads, optimizer_bytes)


@dataclass(frozen=True)
class State:
    """Between the backward and the update of the second step."""

    planned: StateBytes
    held: StateBytes
    memory: Memory
    file_bytes: int  # of the file on disk, where there is one


def state_after_step(strategy: Strategy, **options: object) -> State:
    model, optimizer, engine = sharded_rows(strategy, **options)
    step(model, optimizer)
    backward(model)
    planned = state_bytes(flat for plan in engine.schedule.units for flat in plan.flats)
    disk = engine.host.disk
    file_bytes = 0 if disk is None else os.fstat(disk._file).st_size
    return State(planned, held_state(engine, optimizer), sw.memory(model, optimizer), file_bytes)


def assert_held_as_planned(state: State) -> None:
    assert state.held == state.planned
    assert state.memory.seen == state.memory.planned == state.planned
    assert state.memory.host == state.memory.planned_host
    assert state.file_bytes == state.memory.disk == state.memory.planned_disk


# precision -> options of sw.shard
BF16_GRADS = {"precision": "bf16", "reduce_dtype": "bf16"}
FP32_GRADS = {"precision": "bf16"}
PURE = {"precision": "pure-bf16"}
FP32 = {"precision": "fp32"}

Form = Callable[[float, float], float]  # (world, node) -> bytes per parameter and rank

IN_MIXED_PRECISION: dict[str, Form] = {
    "ddp": lambda world, node: 2 + 2 + 12,
    "zero1": lambda world, node: 2 + 2 + 12 / world,
    "zero2": lambda world, node: 2 + (2 + 12) / world,
    # ZeRO-3 keeps no 16-bit shard beside the master: 14 where the paper has 16.
    "shard_grad_op": lambda world, node: (2 + 12) / world,
    "zero3": lambda world, node: (2 + 12) / world,
    "hsdp": lambda world, node: (2 + 12) / node,
    "hybrid_shard_zero2": lambda world, node: (2 + 12) / node,
    # The optimizer is split further than the parameters: a 16-bit copy rests in the node.
    "hfsdp": lambda world, node: 2 / node + 2 / node + 12 / world,
    "hpz": lambda world, node: 2 / node + (2 + 12) / world,
    "zero2_offload": lambda world, node: 2,
    "zero3_offload": lambda world, node: 0,
    "zero3_nvme": lambda world, node: 0,
    # The copy that rests in the node is as it travelled: a byte, and a scale for 256.
    "zeropp": lambda world, node: (1 + 4 / 256) / node + (2 + 12) / world,
}

# The same off the device, in mixed precision with bf16 gradients: on the host, and on disk.
WINDOWS = NUM_WINDOWS * (12 + 2) / NUM_BLOCKS  # a unit's state, and the weights that come out of its update
STAGED = NUM_STAGED * 2 / NUM_BLOCKS
OFF_DEVICE: dict[str, tuple[Form, Form]] = {
    # ZeRO-Offload: beside masters, moments and gradients, the new weights wait for the device.
    "zero2_offload": (lambda world, node: (2 + 2 + 12) / world, lambda world, node: 0),
    "zero3_offload": (lambda world, node: (2 + 2 + 12) / world, lambda world, node: 0),
    "zero3_nvme": (lambda world, node: (2 + WINDOWS + STAGED) / world, lambda world, node: (2 + 12) / world),
}

WITH_FP32_GRADIENTS: dict[str, Form] = {
    "ddp": lambda world, node: 2 + 4 + 12,
    "zero2": lambda world, node: 2 + 16 / world,
    "zero3": lambda world, node: 16 / world,
    "hsdp": lambda world, node: 16 / node,
    "zero2_offload": lambda world, node: 2,
}

PURE_BF16: dict[str, Form] = {
    "ddp": lambda world, node: 8,
    "shard_grad_op": lambda world, node: 8 / world,
    "zero3": lambda world, node: 8 / world,
    "hsdp": lambda world, node: 8 / node,
}

IN_FP32: dict[str, Form] = {
    "ddp": lambda world, node: 16,
    "zero3": lambda world, node: 16 / world,
}

FORMS = [
    *(("bf16 gradients", BF16_GRADS, name, form) for name, form in IN_MIXED_PRECISION.items()),
    *(("fp32 gradients", FP32_GRADS, name, form) for name, form in WITH_FP32_GRADIENTS.items()),
    *(("pure bf16", PURE, name, form) for name, form in PURE_BF16.items()),
    *(("fp32", FP32, name, form) for name, form in IN_FP32.items()),
]


def test_every_preset_has_its_bytes() -> None:
    assert set(IN_MIXED_PRECISION) == set(PRESETS)


@pytest.mark.quick("bf16 gradients-*", "fp32-zero3", "pure bf16-hsdp")
@pytest.mark.parametrize(
    ("options", "preset", "form"),
    [row[1:] for row in FORMS],
    ids=[f"{precision}-{name}" for precision, _, name, _ in FORMS],
)
def test_bytes_per_parameter(run_ranks: Pool, options: dict[str, str], preset: str, form: Form) -> None:
    for state in run_ranks(4, state_after_step, preset, node_size=2, **options):
        assert_held_as_planned(state)
        assert state.held.total / PSI == form(4, 2)


@pytest.mark.parametrize("preset", [name for name in NAMED if layout_of(name).uses_host])
def test_bytes_per_parameter_off_the_device(run_ranks: Pool, preset: str) -> None:
    on_host, on_disk = OFF_DEVICE[preset]
    for state in run_ranks(4, state_after_step, preset, node_size=2, **BF16_GRADS):
        assert_held_as_planned(state)
        assert state.memory.host == round(on_host(4, 2) * PSI)
        assert state.memory.disk == round(on_disk(4, 2) * PSI)


@pytest.mark.parametrize(
    "strategy",
    slow_but(
        [*(name for name in CORNERS if name not in NAMED), *ENCODED_ALWAYS],
        [*(name for name in ALL if name not in NAMED), *ENCODED],
    ),
)
def test_what_is_held_is_what_was_planned(run_ranks: Pool, strategy: str) -> None:
    chosen = (STRATEGIES | ENCODED)[strategy]
    for state in run_ranks(4, state_after_step, chosen, node_size=2, precision="bf16"):
        assert_held_as_planned(state)


# ---------------------------------------------------------------------------------------------------------
# everything else


@dataclass(frozen=True)
class Beside:
    """Memory beside the state, after a few steps."""

    slots: int
    own: int
    reductions: int
    host: int
    live: int  # all tensors of the process that came with the sharded model


def live_bytes() -> int:
    time.sleep(0.1)  # a thread of gloo holds the buffer of a finished collective for a moment
    gc.collect()
    storages = {}
    for value in gc.get_objects():
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def memory_beside(strategy: Strategy, **options: object) -> tuple[StateBytes, Beside]:
    sw.init()
    before = live_bytes()
    model, optimizer, engine = sharded_rows(strategy, **options)
    for _ in range(2):
        step(model, optimizer)
    backward(model)
    planned = state_bytes(flat for plan in engine.schedule.units for flat in plan.flats)
    # Memory of a unit that is always whole is part of the state.
    own = sum(
        memory.untyped_storage().nbytes()
        for index, memory in engine.gathers.memory.own.items()
        if engine.schedule.units[index].layout.params != "whole"
    )
    beside = Beside(
        num_bytes(engine.gathers.memory.slots),
        own,
        num_bytes(slot for slot in engine.reductions.memory.slots if slot is not None),
        engine.host.arena.num_bytes,
        live_bytes() - before,
    )
    return planned, beside


@pytest.mark.parametrize(
    "strategy",
    slow_but(
        ("ddp", "zero2", "zero3", "hpz", "zero3_nvme", "zero1, gradients and optimizer on host"),
        [*NAMED, "whole-node-world", "node-world-world", "zero1, gradients and optimizer on host"],
    ),
)
def test_slots_are_all_there_is_beside_the_state(run_ranks: Pool, strategy: str) -> None:
    chosen = STRATEGIES[strategy]
    layout = layout_of(chosen)
    is_ring = layout.gathered_until == "forward"
    for planned, beside in run_ranks(4, memory_beside, chosen, node_size=2, precision="bf16"):
        assert beside.slots == (2 * BLOCK_ELEMS * 2 if is_ring else 0)
        assert beside.own == 0  # given back with the backward
        in_slots = layout.grads != "whole" or layout.grads_on == "host"
        assert beside.reductions == (NUM_REDUCTIONS * BLOCK_ELEMS * 4 if in_slots else 0)
        expected = planned.total + beside.slots + beside.own + beside.reductions + beside.host
        # Step counters of the optimizer and a scalar here and there; a forgotten unit would be twice this or more.
        assert expected <= beside.live < expected + BLOCK_ELEMS


@pytest.mark.parametrize("num_units", [1, 3])
def test_slots_obey_the_budget(run_ranks: Pool, num_units: int) -> None:
    budget = num_units * BLOCK_ELEMS * 2 + 100
    for _, beside in run_ranks(2, memory_beside, "zero3", precision="bf16", memory_budget=budget):
        assert beside.slots == num_units * BLOCK_ELEMS * 2


def are_originals_gone(strategy: Strategy) -> list[bool]:
    sw.init()
    model = Rows()
    memory = [StorageWeakRef(param.untyped_storage()) for param in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = sw.shard(model, optimizer, strategy, precision="bf16")
    gc.collect()
    return [storage.expired() for storage in memory]


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_the_weights_as_given_are_let_go(run_ranks: Pool, strategy: str) -> None:
    for gone in run_ranks(2, are_originals_gone, strategy):
        assert all(gone)


def evaluation_state(strategy: Strategy) -> tuple[int, bool]:
    sw.init()
    model, optimizer = sw.shard(Rows().eval(), None, strategy, precision="bf16")
    assert optimizer is None
    with torch.no_grad():
        model(torch.ones(2, HIDDEN))
    engine = engine_of(model)
    states = [state for unit in engine.units for state in unit.states]
    return num_bytes(state.master for state in states), any(state.gradient.grads is not None for state in states)


def test_evaluation_holds_no_gradients(run_ranks: Pool) -> None:
    assert run_ranks(2, evaluation_state, "zero3") == [(PSI * 4 // 2, False)] * 2


# ---------------------------------------------------------------------------------------------------------
# addresses


def gathered_until(strategy: Strategy) -> set[str]:
    if isinstance(strategy, Mapping):
        return set().union(*(gathered_until(part) for part in strategy.values()))
    return {layout_of(strategy).gathered_until}


def addresses(strategy: Strategy) -> list[list[int]]:
    """By step: where each block found its weights in the forward, and where they all lie afterwards."""
    model, optimizer, engine = sharded_rows(strategy, precision="bf16", node_size=2)
    states = [state for unit in engine.units for state in unit.states]
    seen: list[list[int]] = []

    def look(module: nn.Module, args: object) -> None:
        seen[-1].append(module.weight.data_ptr())

    for block in model.blocks:
        block.register_forward_pre_hook(look)
    for _ in range(4):
        seen.append([])
        step(model, optimizer)
        for state in states:
            seen[-1].extend(param.data_ptr() for param in (*state.compute_params, *state.resting_params))
    return seen


@pytest.mark.parametrize(
    "strategy",
    slow_but(
        ("ddp", "zero3", "hpz", "zero3_nvme", "mapping"),
        [name for name in [*NAMED, "mapping"] if "backward" not in gathered_until(STRATEGIES[name])],
    ),
)
def test_addresses_never_change(run_ranks: Pool, strategy: str) -> None:
    for first, *later in run_ranks(4, addresses, STRATEGIES[strategy]):
        assert len(first) == 3 * NUM_BLOCKS
        assert all(step_addresses == first for step_addresses in later)


def storage_sizes(strategy: Strategy) -> list[tuple[str, int]]:
    """Bytes of gathered memory at the points of a step, and what is prefetched across its end."""
    model, optimizer, engine = sharded_rows(strategy, precision="bf16", node_size=2)
    found = []

    def note(when: str) -> None:
        sizes = [memory.untyped_storage().nbytes() for memory in engine.gathers.memory.own.values()]
        found.append((when, sum(sizes)))

    note("before the first step")
    step(model, optimizer)
    loss = model(torch.ones(2, HIDDEN)).float().mean()
    note("after the forward")
    loss.backward()
    note("after the backward")
    optimizer.step()
    note("after the step")
    with torch.no_grad():
        model(torch.ones(2, HIDDEN))
    note("after an evaluation")
    return found


@pytest.mark.parametrize("strategy", ["shard_grad_op", "hybrid_shard_zero2"])
def test_memory_kept_until_the_backward_is_given_back(run_ranks: Pool, strategy: str) -> None:
    unit = BLOCK_ELEMS * 2
    for found in run_ranks(4, storage_sizes, strategy):
        assert found == [
            ("before the first step", 0),
            ("after the forward", NUM_BLOCKS * unit),
            ("after the backward", 0),
            ("after the step", 2 * unit),  # gathered ahead for the next forward
            ("after an evaluation", 0),
        ]
