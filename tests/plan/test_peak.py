"""Memory at every instant: what lies there adds up, and the peak is one instant's and no sum of maxima."""

from dataclasses import replace
from typing import Any

import pytest

from shardwise.layout import PLANNED, PRESETS
from shardwise.plan.cost.peak import CLASSES, WORKSPACE_BYTES
from shardwise.plan.memory import state_bytes
from shardwise.plan.schedule import NUM_REDUCTIONS
from shardwise.plan.training import Lora
from tests.plan.planning import EVERY, SHAPE, assessed, machine

STEPS: list[dict[str, Any]] = [
    {},
    {"checkpointing": "full", "micro_batch": 4},
    {"checkpointing": "selective", "num_micro_batches": 2},
    {"loss": "plain", "precision": "pure-bf16"},
    {"lora": Lora(8)},
    {"compile": True, "reduce": "bf16"},
]


@pytest.mark.parametrize("sizes", STEPS, ids=str)
@pytest.mark.parametrize("strategy", [*EVERY, *PLANNED])
def test_classes_are_never_negative_and_the_peak_is_no_sum_of_maxima(strategy: str, sizes: dict[str, Any]) -> None:
    memory = assessed(strategy, machine(nodes=2), **sizes).memory
    columns = list(zip(*(instant.num_bytes for instant in memory.instants), strict=True))
    assert len(columns) == len(CLASSES)
    assert all(type(size) is int and size >= 0 for column in columns for size in column)
    assert memory.peak.total == max(map(sum, zip(*columns, strict=True))) <= sum(map(max, columns))
    assert min(memory.host_bytes, memory.disk_bytes) >= 0


def test_summing_maxima_would_say_more() -> None:
    memory = assessed("zero3", checkpointing="full", micro_batch=4).memory
    maxima = [max(column) for column in zip(*(instant.num_bytes for instant in memory.instants), strict=True)]
    assert sum(maxima) > 1.1 * memory.peak.total


@pytest.mark.parametrize("strategy", EVERY)
def test_a_step_ends_with_its_state_and_its_slots(strategy: str) -> None:
    found = assessed(strategy, machine(nodes=2))
    state = state_bytes(flat for unit in found.schedule.units for flat in unit.flats)
    last = found.memory.instants[-1].by_class()
    assert found.memory.instants[-1].name == "update"
    assert (last["params"], last["grads"]) == (state.params, state.grads)
    assert last["optimizer"] == state.optimizer  # gradients are in the master's dtype, so nothing is cast
    assert (last["activations"], last["loss"]) == (WORKSPACE_BYTES, 0)
    assert last["reduce"] == 0


@pytest.mark.parametrize("strategy", EVERY)
def test_activations_come_back_to_nothing(strategy: str) -> None:
    instants = assessed(strategy, num_micro_batches=3).memory.instants
    forwards = [instant.by_class()["activations"] for instant in instants if instant.name == "forward root"]
    assert len(forwards) == 3
    assert len(set(forwards)) == 1


def test_gradients_stay_from_one_micro_batch_to_the_next() -> None:
    instants = assessed("zero1", num_micro_batches=2).memory.instants
    first, second = (instant.by_class()["grads"] for instant in instants if instant.name == "forward root")
    assert first == 0
    assert second == 4 * sum(flat.num_elems for flat in assessed("zero1").schedule.trainable_flats)


def test_two_reductions_are_under_way_at_most() -> None:
    found = assessed("zero3")
    most = max(instant.by_class()["reduce"] for instant in found.memory.instants)
    assert most == NUM_REDUCTIONS * found.schedule.reduction_slot_bytes
    assert max(instant.by_class()["reduce"] for instant in assessed("ddp").memory.instants) == 0


def test_units_kept_until_the_backward_are_all_there_at_its_begin() -> None:
    found = assessed("shard_grad_op")
    most = max(instant.by_class()["gathered"] for instant in found.memory.instants)
    assert most == sum(unit.gathered_bytes for unit in found.schedule.units)
    last = found.memory.instants[-1].by_class()["gathered"]
    assert last == 0


def test_units_dropped_after_the_forward_take_two_slots() -> None:
    found = assessed("zero3")
    own = sum(
        unit.gathered_bytes
        for unit, slot in zip(found.schedule.units, found.schedule.slot_of, strict=True)
        if slot is None
    )
    assert {instant.by_class()["gathered"] for instant in found.memory.instants} == {
        sum(found.schedule.slot_bytes) + own
    }
    assert len(found.schedule.slot_bytes) == 2


def test_what_is_offloaded_is_on_the_host() -> None:
    here, there = assessed("zero3"), assessed(replace(PRESETS["zero3"], optimizer_on="host"))
    moved = here.memory.instants[-1].by_class()["optimizer"]
    assert there.memory.instants[-1].by_class()["optimizer"] == 0
    num_elems = sum(flat.spans[flat.depth_of_master].num_elems for flat in here.schedule.trainable_flats)
    assert moved == 12 * num_elems
    # Masters and moments, and weights and gradients on their way.
    assert there.memory.host_bytes == (12 + 2 + 4) * num_elems


def test_a_part_of_the_optimizer_stays() -> None:
    half = assessed(replace(PRESETS["zero3"], optimizer_on="host", kept=0.5))
    whole = assessed("zero3")
    optimizer = [found.memory.instants[-1].by_class()["optimizer"] for found in (half, whole)]
    assert optimizer[0] == pytest.approx(optimizer[1] / 2, rel=1e-6)


def test_an_eight_bit_optimizer_is_smaller_by_what_its_moments_are() -> None:
    wide, narrow = (assessed("zero3", optimizer=name).memory.instants[-1] for name in ("adamw", "adamw8bit"))
    assert narrow.by_class()["optimizer"] / wide.by_class()["optimizer"] == pytest.approx((4 + 2.03) / 12, rel=0.01)


@pytest.mark.parametrize("strategy", ["zero3", "shard_grad_op", "hpz", "hfsdp"])
def test_more_nodes_never_need_more(strategy: str) -> None:
    peaks = [assessed(strategy, machine(nodes=num)).memory.peak.total for num in (1, 2, 4, 16, 64)]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("strategy", EVERY)
def test_more_of_anything_never_needs_less(strategy: str) -> None:
    base = assessed(strategy).memory.peak.total
    for more in ({"seq": 4096}, {"micro_batch": 2}, {"num_micro_batches": 2}):
        assert assessed(strategy, **more).memory.peak.total >= base, more
    assert assessed(strategy, shape=replace(SHAPE, layers=9)).memory.peak.total > base


@pytest.mark.parametrize("strategy", EVERY)
def test_checkpointing_saves(strategy: str) -> None:
    none, selective, full = (
        assessed(strategy, checkpointing=mode, micro_batch=4).memory.peak.total
        for mode in ("none", "selective", "full")
    )
    assert none > selective > full
