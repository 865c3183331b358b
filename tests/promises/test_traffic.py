"""Every byte that moves is known beforehand: the ledger equals the schedule's prediction, and both the closed forms. So
is every byte that moves between the memories of a rank.

Closed forms count, per step and rank, for G micro-batches: g and p bytes per element of a gradient and of a compute
parameter, psi elements (padding included), and (k - 1) / k of a buffer for each gather or reduce-scatter over k ranks.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.base.intervals import BLOCK_ELEMS, round_up
from shardwise.core.engine.guards import engine_of
from shardwise.core.layout import PRESETS
from shardwise.core.wire.ledger import Call, Traffic, add_up
from shardwise.planner.events import step_events
from tests.harness import Pool
from tests.support.models import IN_TREE, MODELS, tokens
from tests.support.strategies import ALL, CORNERS, ENCODED, ENCODED_ALWAYS, OFFLOADED, STRATEGIES, disk_for, slow_but
from tests.support.training import adamw

MICRO_BATCHES = (1, 2, 3)
OFF_DEVICE = ("_offload", "_nvme", " on host")
OTHER_WORLDS = [(1, 1), (2, 1), (2, 2), (3, 3)]


@dataclass(frozen=True)
class Step:
    """What one step moved, and what had been said it would."""

    num_micro: int
    seen_calls: Counter[Call]
    planned_calls: Counter[Call]
    seen: Traffic
    planned: Traffic
    seen_moves: dict[str, int]
    planned_moves: dict[str, int]


def measure(
    model_name: str,
    strategy: object,
    node_size: int,
    precision: str,
    clip: bool = False,
    sync_last: bool = True,
    memory_budget: int | None = None,
) -> list[Step]:
    """The first step, then one for each number of micro-batches, and one with fewer than the step before."""
    sw.init()
    spec = MODELS[model_name]
    model = spec.fresh()
    model, optimizer = sw.shard(
        model,
        adamw(list(model.parameters())),
        strategy,
        precision=precision,
        node_size=node_size,
        memory_budget=memory_budget,
        **disk_for(strategy),
    )
    engine = engine_of(model)
    steps = []
    for index, num_micro in enumerate((1, *MICRO_BATCHES, 1)):
        # Asked before the step runs: the prediction knows nothing of it.
        events = step_events(engine.schedule, num_micro, first_step=index == 0)
        planned = [call for event in events for call in event.calls]
        moves = Counter[str]()
        for move in (move for event in events for move in event.moves):
            moves[move.way] += move.num_bytes
        for micro in range(num_micro):
            waits = micro < num_micro - 1 or not sync_last
            with sw.accumulate(model) if waits else nullcontext():
                spec.loss(model, tokens(index, micro, num_micro)).backward()
        if clip:
            optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert engine.mesh.ledger.last_step is not None
        calls = [call for call in engine.mesh.ledger.last_step if call.dtype != "float64"]
        traffic = sw.traffic(model)
        rows = tuple(row for row in traffic.rows if row.dtype != "float64")
        seen = Traffic(rows)
        steps.append(
            Step(num_micro, Counter(calls), Counter(planned), seen, add_up(planned), traffic.moves, dict(moves))
        )
    return steps


def assert_as_planned(steps: list[Step]) -> None:
    for step in steps:
        assert step.seen_calls == step.planned_calls, step.num_micro
        assert step.seen.rows == step.planned.rows, step.num_micro
        assert step.seen_moves == step.planned_moves, step.num_micro


@pytest.mark.parametrize(
    ("world", "node_size", "strategy"),
    slow_but(
        [
            *((4, 2, strategy) for strategy in CORNERS),
            *((*world, "mapping") for world in OTHER_WORLDS),
            *((2, 1, strategy) for strategy in ENCODED_ALWAYS),
        ],
        [
            *((4, 2, strategy) for strategy in ALL),
            *((*world, strategy) for world in OTHER_WORLDS for strategy in ("hpz", "mapping")),
            *((1, 1, strategy) for strategy in OFFLOADED),
            *((4, 2, strategy) for strategy in ENCODED),
            *((2, 1, strategy) for strategy in ENCODED_ALWAYS),
        ],
    ),
)
def test_ledger_equals_prediction(run_ranks: Pool, world: int, node_size: int, strategy: str) -> None:
    chosen = (STRATEGIES | ENCODED)[strategy]
    for steps in run_ranks(world, measure, IN_TREE, chosen, node_size, "bf16"):
        assert_as_planned(steps)
        assert world > 1 or not any(step.seen_calls for step in steps)
        assert all(bool(step.seen_moves) == moves_between_memories(strategy) for step in steps)


def moves_between_memories(strategy: str) -> bool:
    """What its updates, gathers and reductions do; activations have a ledger of their own."""
    moves = strategy in OFFLOADED or (strategy in ENCODED and any(word in strategy for word in OFF_DEVICE))
    return moves and strategy != "zero3, activations on host"


@pytest.mark.parametrize(
    ("model", "strategy"),
    slow_but(
        [("t5", "zero3")],
        [(model, strategy) for model in ("gpt2", "t5") for strategy in ("zero3", "hybrid_shard_zero2")],
    ),
)
def test_ledger_equals_prediction_for_other_models(run_ranks: Pool, model: str, strategy: str) -> None:
    """T5's units do not run in the order of its modules: after the first step the schedule follows them."""
    for steps in run_ranks(2, measure, model, strategy, 2, "bf16"):
        assert_as_planned(steps[1:])


@pytest.mark.quick("hfsdp")
@pytest.mark.parametrize("strategy", ["ddp", "hfsdp", "hpz"])
def test_no_micro_batch_was_the_last(run_ranks: Pool, strategy: str) -> None:
    """All under `sw.accumulate`: the step itself brings the gradients home, for the same bytes."""
    for steps in run_ranks(4, measure, IN_TREE, strategy, 2, "fp32", sync_last=False):
        assert_as_planned(steps)


@pytest.mark.parametrize("num_units", [2, 4])
def test_prefetching_further_moves_no_more(run_ranks: Pool, num_units: int) -> None:
    block, _ = padded_elems(2)
    budget = num_units * block * 4
    (wide, *_), (narrow, *_) = (
        run_ranks(2, measure, IN_TREE, "zero3", 2, "fp32", memory_budget=memory_budget)
        for memory_budget in (budget, block * 4)
    )
    assert_as_planned(wide)
    for one, other in zip(wide, narrow, strict=True):
        assert one.seen.wire_bytes <= other.seen.wire_bytes


def norm_rows(node_size: int) -> list[tuple[int, float]]:
    sw.init()
    spec = MODELS[IN_TREE]
    model = spec.fresh()
    model, optimizer = sw.shard(model, adamw(list(model.parameters())), "zero3", precision="fp32", node_size=node_size)
    spec.loss(model, tokens(0)).backward()
    optimizer.clip_grad_norm(1.0)
    optimizer.step()
    return [(row.num_calls, row.wire_bytes) for row in sw.traffic(model).rows if row.dtype == "float64"]


def test_a_norm_costs_one_number(run_ranks: Pool) -> None:
    assert run_ranks(2, norm_rows, 2) == [[(1, 8.0)]] * 2


# ---------------------------------------------------------------------------------------------------------
# closed forms


def padded_elems(num_shards: int) -> tuple[int, int]:
    """Elements of one block and of the root, each parameter padded to a block and the whole to the shards."""

    def padded(params: list[nn.Parameter]) -> int:
        return round_up(sum(round_up(param.numel(), BLOCK_ELEMS) for param in params), BLOCK_ELEMS * num_shards)

    model = MODELS[IN_TREE].fresh()
    blocks = [list(block.parameters()) for block in model.blocks]
    in_blocks = {id(param) for block in blocks for param in block}
    rest = [param for param in model.parameters() if id(param) not in in_blocks]
    return padded(blocks[0]), padded(rest)


NUM_BLOCKS = 5
NUM_SLOTS = 2


@dataclass(frozen=True)
class Terms:
    """The letters of the closed forms, for one world."""

    world: int
    node: int
    num_micro: int
    p: int
    g: int
    block: int
    root: int

    @property
    def psi(self) -> int:
        return self.root + NUM_BLOCKS * self.block

    @property
    def psi_by_slots(self) -> int:
        """Elements gathered in a step when blocks share two slots.

        Each forward and each backward gathers every block but the two that are still in the slots, except the
        first forward, before which the masters changed. The root has memory of its own: once a step.
        """
        passes = 2 * self.num_micro
        return self.root + (passes * (NUM_BLOCKS - NUM_SLOTS) + NUM_SLOTS) * self.block

    @property
    def r(self) -> float:
        return (self.world - 1) / self.world

    @property
    def r_node(self) -> float:
        return (self.node - 1) / self.node

    @property
    def r_replicate(self) -> float:
        nodes = self.world // self.node
        return (nodes - 1) / nodes


Bytes = dict[tuple[str, str], float]  # (axis, "gather" or "reduce") -> bytes

CLOSED_FORMS: dict[str, Callable[[Terms], Bytes]] = {
    "ddp": lambda t: {("world", "reduce"): 2 * t.r * t.g * t.psi},
    "zero1": lambda t: {
        ("world", "gather"): t.r * t.p * t.psi,
        ("world", "reduce"): t.r * t.g * t.psi,
    },
    "zero2": lambda t: {
        ("world", "gather"): t.r * t.p * t.psi,
        ("world", "reduce"): t.num_micro * t.r * t.g * t.psi,
    },
    "shard_grad_op": lambda t: {
        ("world", "gather"): t.num_micro * t.r * t.p * t.psi,
        ("world", "reduce"): t.num_micro * t.r * t.g * t.psi,
    },
    "zero3": lambda t: {
        ("world", "gather"): t.r * t.p * t.psi_by_slots,
        ("world", "reduce"): t.num_micro * t.r * t.g * t.psi,
    },
    "hsdp": lambda t: {
        ("node", "gather"): t.r_node * t.p * t.psi_by_slots,
        ("node", "reduce"): t.num_micro * t.r_node * t.g * t.psi,
        ("replicate", "reduce"): 2 * t.r_replicate * t.g * t.psi / t.node,
    },
    "hybrid_shard_zero2": lambda t: {
        ("node", "gather"): t.num_micro * t.r_node * t.p * t.psi,
        ("node", "reduce"): t.num_micro * t.r_node * t.g * t.psi,
        ("replicate", "reduce"): 2 * t.r_replicate * t.g * t.psi / t.node,
    },
    "hfsdp": lambda t: {
        ("node", "gather"): t.r_node * t.p * t.psi_by_slots,
        ("node", "reduce"): t.num_micro * t.r_node * t.g * t.psi,
        ("replicate", "gather"): t.r_replicate * t.p * t.psi / t.node,
        ("replicate", "reduce"): t.r_replicate * t.g * t.psi / t.node,
    },
    # Parameters cross between nodes once a step, whatever the accumulation: the second copy serves the rest.
    "hpz": lambda t: {
        ("node", "gather"): t.r_node * t.p * t.psi_by_slots,
        ("node", "reduce"): t.num_micro * t.r_node * t.g * t.psi,
        ("replicate", "gather"): t.r_replicate * t.p * t.psi / t.node,
        ("replicate", "reduce"): t.num_micro * t.r_replicate * t.g * t.psi / t.node,
    },
}


CLOSED_FORMS |= {
    "zero2_offload": CLOSED_FORMS["zero2"],
    "zero3_offload": CLOSED_FORMS["zero3"],
    "zero3_nvme": CLOSED_FORMS["zero3"],
}

# What a rank moves between its memories: gradients leave after every micro-batch, come back to be added to, and weights
# come as they are gathered. From disk come parameters, and master and moments (12 bytes) for the update.
MOVES: dict[str, Callable[[Terms], dict[str, float]]] = {
    "zero2_offload": lambda t: {
        "to_device": (t.p + (t.num_micro - 1) * t.g) * t.psi / t.world,
        "to_host": t.num_micro * t.g * t.psi / t.world,
    },
    "zero3_offload": lambda t: {
        "to_device": (t.p * t.psi_by_slots + (t.num_micro - 1) * t.g * t.psi) / t.world,
        "to_host": t.num_micro * t.g * t.psi / t.world,
    },
    "zero3_nvme": lambda t: {
        **MOVES["zero3_offload"](t),
        "read": (t.p * t.psi_by_slots + 12 * t.psi) / t.world,
        "write": (t.p + 12) * t.psi / t.world,
    },
}


def test_every_preset_has_a_closed_form() -> None:
    assert set(CLOSED_FORMS) == {name for name, layout in PRESETS.items() if layout.is_exact}
    assert set(MOVES) == {name for name, layout in PRESETS.items() if layout.uses_host}


@pytest.mark.parametrize(
    ("world", "node_size", "precision", "preset"),
    [
        *((4, 2, "bf16", preset) for preset in CLOSED_FORMS),
        *slow_but(
            [(2, 2, "fp32", "zero3")],
            [(2, 2, "fp32", preset) for preset in ("ddp", "zero1", "zero2", "zero3", "zero3_nvme")],
        ),
    ],
)
def test_closed_forms(run_ranks: Pool, world: int, node_size: int, precision: str, preset: str) -> None:
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    layout = PRESETS[preset]
    block, root = padded_elems({"whole": 1, "node": node_size, "world": world}[layout.optimizer])
    for steps in run_ranks(world, measure, IN_TREE, preset, node_size, precision):
        for step in steps[1:]:
            terms = Terms(world, node_size, step.num_micro, compute.itemsize, 4, block, root)
            expected = {key: value for key, value in CLOSED_FORMS[preset](terms).items() if value}
            seen: Bytes = {}
            # A number for each parameter, by which the ranks agree on what was used, is no part of the forms.
            for row in (row for row in step.seen.rows if row.dtype != "int32"):
                direction = "gather" if row.kind == "all_gather" else "reduce"
                key = (row.axis, direction)
                seen[key] = seen.get(key, 0.0) + row.wire_bytes
            assert seen == expected
            assert step.seen_moves == (MOVES[preset](terms) if preset in MOVES else {})
