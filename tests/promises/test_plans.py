"""What is planned from a shape alone is what ranks do: state, gathered units and reduction slots, every collective, and
what rests on and moves between host and disk.

The planner sees sizes, the engine a module; both are given the same model, and ranks count what they hold and move.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import pytest

import shardwise as sw
from shardwise.api.memory_report import Memory
from shardwise.core.layout import Strategy
from shardwise.core.schedule.state_bytes import resting_grads, saved_error_bytes
from shardwise.core.wire.ledger import Traffic
from shardwise.planner.assess import Assessment, Assessor, Machine
from shardwise.planner.cost.peak import CLASSES
from shardwise.planner.hardware.cluster import make_cluster
from shardwise.planner.hardware.gpus import IDEAL, efficiency_of
from shardwise.planner.search import MIXES, Choice, assess_named, choices, has_room, most_kept, presets, strategy_of
from shardwise.planner.shapes.shape import ModelShape
from shardwise.planner.subject import subject_of
from shardwise.planner.training import Training
from tests.harness import Pool
from tests.support.models import IN_TREE, MODELS, SEQ, VOCAB, tokens
from tests.support.strategies import CORNERS, ENCODED, NAMED, OFFLOADED, STRATEGIES, disk_for, slow_but
from tests.support.training import adamw

WORLD, NODE = 4, 2
WAYS = ("to_device", "to_host", "read", "write")
TIED = "in-tree tied"


@dataclass(frozen=True)
class Seen:
    memory: Memory
    registered: int  # buffers of modules
    traffic: Traffic


def run(model_name: str, strategy: Strategy, precision: str, num_micro: int) -> Seen:
    """The second step, clipped."""
    sw.init()
    spec = MODELS[model_name]
    model = spec.fresh()
    registered = sum(buffer.nbytes for buffer in model.buffers())
    optimizer = adamw(list(model.parameters()))
    model, optimizer = sw.shard(model, optimizer, strategy, precision=precision, node_size=NODE, **disk_for(strategy))
    for step in range(2):
        for micro in range(num_micro):
            with nullcontext() if micro == num_micro - 1 else sw.accumulate(model):
                spec.loss(model, tokens(step, micro, num_micro)).backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        held = sw.memory(model, optimizer)
        optimizer.zero_grad()
    return Seen(held, registered, sw.traffic(model))


def run_each(model_name: str, strategies: list[Strategy], precision: str, num_micro: int) -> list[Seen]:
    return [run(model_name, strategy, precision, num_micro) for strategy in strategies]


def assessor(model_name: str, training: Training, free_bytes: int | None = None) -> Assessor:
    shape = ModelShape(
        name=model_name,
        layers=5,
        hidden=24,
        heads=2,
        kv_heads=1,
        head_dim=12,
        ffn=41,
        vocab=VOCAB,
        tied=model_name == TIED,
        code="in-tree",
    )
    machine = Machine(make_cluster(f"{NODE}xH100", WORLD // NODE), efficiency_of("H100-80GB"), IDEAL, free_bytes)
    return Assessor(subject_of(shape, training), machine)


def choice_of(precision: str, num_micro: int) -> tuple[Training, Choice]:
    training = Training(precision=precision, num_micro_batches=num_micro, seq=SEQ - 1, loss="plain")
    return training, choices(training, ("none",), [(1, num_micro)])


def at_most(found: Assessment, name: str) -> int:
    return max(instant.num_bytes[CLASSES.index(name)] for instant in found.memory.instants)


def assert_as_planned(pool: Pool, model_name: str, strategies: Sequence[Strategy], precision: str, num: int) -> None:
    training, choice = choice_of(precision, num)
    assess = assessor(model_name, training)
    plans = [assess_named(assess, strategy, choice) for strategy in strategies]
    for rank in pool(WORLD, run_each, model_name, strategies, precision, num):
        for seen, found in zip(rank, plans, strict=True):
            held = seen.memory
            assert seen.traffic.rows == found.moved.by_call.rows
            moves = {way: getattr(found.moved, way) for way in WAYS}
            assert seen.traffic.moves == {way: num_bytes for way, num_bytes in moves.items() if num_bytes}
            assert held.params == at_most(found, "params")
            flats = [flat for unit in found.schedule.units for flat in unit.flats]
            assert held.peak_grads == resting_grads(flats) + saved_error_bytes(flats)
            assert held.planned.optimizer == at_most(found, "optimizer")
            buffers = at_most(found, "gathered") + at_most(found, "reduce")
            # These ranks have no GPU: their slots fit the largest unit.
            buffers += found.schedule.reduction_bytes(True) - found.schedule.reduction_bytes(False)
            assert held.planned_buffers - seen.registered == buffers
            assert (held.planned_host, held.planned_disk) == (
                found.memory.off_device.host,
                found.memory.off_device.disk,
            )


ON_DEVICE = [name for name in [*NAMED, "mapping"] if name not in OFFLOADED]


@pytest.mark.parametrize(
    "strategies",
    slow_but([CORNERS], [CORNERS, ON_DEVICE[:5], ON_DEVICE[5:], OFFLOADED]),
    ids=["corners", "one axis", "two axes", "host and disk"],
)
def test_layouts(run_ranks: Pool, strategies: Sequence[str]) -> None:
    assert_as_planned(run_ranks, IN_TREE, [STRATEGIES[name] for name in strategies], "bf16", 1)


@pytest.mark.slow
def test_what_travels_encoded(run_ranks: Pool) -> None:
    # A plan is of the first rank; of small flats that rest on disk, the last ranks have padding alone, and move less.
    chosen = [strategy for name, strategy in ENCODED.items() if "nvme" not in name]
    assert_as_planned(run_ranks, IN_TREE, chosen, "bf16", 1)
    assert_as_planned(run_ranks, TIED, [ENCODED[name] for name in ("zeropp", "zero3, both", "hsdp, both")], "bf16", 2)


def test_several_micro_batches(run_ranks: Pool) -> None:
    on_device: list[Strategy] = ["zero1", "zero3", "hfsdp", "hybrid_shard_zero2"]
    moved: list[Strategy] = ["zero3_offload", "zero2+optimizer=disk", "zero1+grads=host+optimizer=host"]
    assert_as_planned(run_ranks, IN_TREE, [*on_device, *moved], "bf16", 3)


@pytest.mark.parametrize("precision", slow_but(("fp32",), ["pure-bf16", "fp32"]))
def test_precisions(run_ranks: Pool, precision: str) -> None:
    assert_as_planned(run_ranks, TIED, ["ddp", "zero2", "hpz", "zero3_offload", "zero3_nvme"], precision, 1)


def searched(model_name: str, precision: str) -> list[Assessment]:
    """What the search makes for memory between what the presets of each pair need."""
    training, choice = choice_of(precision, 1)
    needed = {
        entry.name: entry.reserved.high + entry.machine.context_bytes
        for entry in presets(assessor(model_name, training, 10**12), choice)
    }
    found: dict[str, Assessment] = {}
    for split, kept in MIXES:
        assess = assessor(model_name, training, (needed[split] + needed[kept]) // 2)
        by_name = {entry.name: entry for entry in presets(assess, choice)}
        entry = most_kept(assess, split, kept, training) if has_room(by_name[split]) else None
        if entry is not None:
            found.setdefault(entry.name.partition(" x ")[0], entry)
    return list(found.values())


def test_mixtures_of_the_search(run_ranks: Pool) -> None:
    """What is recommended runs as it was planned."""
    found = searched(IN_TREE, "bf16")
    assert len(found) >= 6
    assert_as_planned(run_ranks, IN_TREE, [strategy_of(entry) for entry in found], "bf16", 1)
