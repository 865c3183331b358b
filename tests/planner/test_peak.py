"""Memory at every instant: what lies there adds up, and the peak is one instant's and no sum of maxima."""

from dataclasses import replace
from typing import Any

import pytest

from shardwise.base.files import ALIGNMENT
from shardwise.core.layout import OFFLOADS, PRESETS
from shardwise.core.schedule.state_bytes import resting_grads, saved_error_bytes, state_bytes
from shardwise.core.schedule.step_schedule import NUM_LATE, NUM_ROW_SLOTS, aligned
from shardwise.planner.assess import Assessment
from shardwise.planner.cost.peak import CLASSES, WORKSPACE_BYTES
from shardwise.planner.training import Lora
from tests.planner.planning import EVERY, MANY, SHAPE, WIRES, assessed, machine

STEPS: list[dict[str, Any]] = [
    {},
    {"checkpointing": "full", "micro_batch": 4},
    {"checkpointing": "selective", "num_micro_batches": 2},
    {"loss": "plain", "precision": "pure-bf16"},
    {"lora": Lora(8)},
    {"compile": True, "reduce": "bf16"},
]


@pytest.mark.parametrize("sizes", STEPS, ids=str)
@pytest.mark.parametrize(
    "strategy", [*EVERY, *WIRES, *OFFLOADS[1:4], "ddp+activations=host", "zero3_offload+optimizer=host:0.5"]
)
def test_classes_are_never_negative_and_the_peak_is_no_sum_of_maxima(strategy: str, sizes: dict[str, Any]) -> None:
    memory = assessed(strategy, machine(nodes=2), **sizes).memory
    columns = list(zip(*(instant.num_bytes for instant in memory.instants), strict=True))
    assert len(columns) == len(CLASSES)
    assert all(type(size) is int and size >= 0 for column in columns for size in column)
    assert memory.peak.total == max(map(sum, zip(*columns, strict=True))) <= sum(map(max, columns))
    assert min(memory.host_bytes, memory.off_device.disk) >= 0


def test_summing_maxima_would_say_more() -> None:
    memory = assessed("zero3", checkpointing="full", micro_batch=4).memory
    maxima = [max(column) for column in zip(*(instant.num_bytes for instant in memory.instants), strict=True)]
    assert sum(maxima) > 1.1 * memory.peak.total


@pytest.mark.parametrize("strategy", [*EVERY, *WIRES])
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
    assert most == found.schedule.reduction_bytes(keeps_slots=False)
    assert max(instant.by_class()["reduce"] for instant in assessed("ddp").memory.instants) == 0


def test_the_first_units_of_a_backward_share_one_slot() -> None:
    wide = replace(SHAPE, hidden=4096, heads=32, kv_heads=32, ffn=11008, layers=NUM_LATE + 3, vocab=256)
    here, bounds = assessed("zero3", shape=wide, seq=512), []
    size = max(unit.reduced_bytes for unit in here.schedule.units)
    for index in reversed(range(wide.layers)):
        found = [each for each in here.memory.instants if each.name == f"backward blocks.{index}"]
        bounds.append(max(each.by_class()["reduce"] for each in found))
    # The first one is opened after its backward.
    assert bounds == [0, *[size] * (NUM_LATE - 1), *[2 * size] * 3]
    # With many tokens a slot takes less than the tensors that its gradients are computed from.
    most = assessed("zero3", shape=wide, seq=32768).memory.instants
    assert next(each for each in most if each.name == "backward blocks.6").by_class()["reduce"] == 2 * size


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


def at_most(found: Assessment, name: str) -> int:
    return max(instant.by_class()[name] for instant in found.memory.instants)


def test_what_is_offloaded_is_on_the_host() -> None:
    here, there = assessed("zero3"), assessed("zero3+optimizer=host")
    moved = here.memory.instants[-1].by_class()["optimizer"]
    assert there.memory.instants[-1].by_class()["optimizer"] == 0
    num_elems = sum(flat.num_master for flat in here.schedule.trainable_flats)
    assert moved == 12 * num_elems
    # Masters and moments, weights and gradients on their way, each beginning at a page.
    state = (12 + 2 + 4) * num_elems
    assert state <= there.memory.host_bytes < state + 5 * ALIGNMENT * len(there.schedule.trainable_flats)


@pytest.mark.parametrize("part", [0.2, 0.5, 0.8])
def test_a_part_of_the_optimizer_stays(part: float) -> None:
    some, none, all_of_it = (
        assessed(strategy, shape=MANY)
        for strategy in (
            replace(PRESETS["zero3"], optimizer_on="host", kept=part),
            replace(PRESETS["zero3"], optimizer_on="host"),
            PRESETS["zero3"],
        )
    )
    kept = some.part_on_device
    assert part - 0.25 < kept <= part
    whole = all_of_it.memory.instants[-1].by_class()["optimizer"]
    assert some.memory.instants[-1].by_class()["optimizer"] == pytest.approx(kept * whole, rel=1e-3)
    assert some.memory.host_bytes == pytest.approx((1 - kept) * none.memory.host_bytes, rel=0.01)


def test_gradients_for_the_host_have_no_place_beside_a_slot() -> None:
    found = assessed("zero3_offload", shape=MANY)
    assert [instant.by_class()["grads"] for instant in found.memory.instants[-2:]] == [0, 0]
    made = max(work.grad_bytes for work in found.works.values())
    # What autograd makes of two units.
    assert at_most(found, "grads") <= 2 * made
    assert at_most(assessed("zero3", shape=MANY), "grads") > at_most(found, "grads")


def test_gradients_on_the_device_leave_while_the_backward_goes_on() -> None:
    stays, leaves = (assessed(name, shape=MANY) for name in ("zero2", "zero2+optimizer=host"))
    unit = max(resting_grads(unit.flats) for unit in leaves.schedule.units)
    assert at_most(stays, "grads") > 20 * unit
    assert at_most(leaves, "grads") < 10 * unit
    assert leaves.memory.instants[-1].by_class()["grads"] == 0
    # Between micro-batches they are all there.
    several = assessed("zero2+optimizer=host", shape=MANY, num_micro_batches=2)
    assert at_most(several, "grads") >= sum(resting_grads(unit.flats) for unit in several.schedule.units)
    assert several.memory.instants[-1].by_class()["grads"] == 0


def test_sums_come_back_from_the_host_into_one_place() -> None:
    one, two = (assessed("zero3_offload", num_micro_batches=num) for num in (1, 2))
    assert at_most(two, "reduce") == at_most(one, "reduce") + two.schedule.scratch_bytes
    assert two.schedule.scratch_bytes == max(4 * flat.num_grads for flat in two.schedule.trainable_flats)
    # Whole ones are added up in the slot itself.
    whole = assessed("ddp+grads=host+optimizer=host", num_micro_batches=2)
    assert at_most(whole, "reduce") == whole.schedule.reduction_bytes(keeps_slots=False)


def test_nothing_is_cast_for_what_the_host_updates() -> None:
    here, there = (assessed(name, reduce="bf16") for name in ("zero3", "zero3_offload"))
    cast = [found.memory.instants[-1].by_class()["optimizer"] for found in (here, there)]
    assert cast[0] > 12 * sum(flat.num_master for flat in here.schedule.trainable_flats)
    assert cast[1] == 0


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("num", [1, 2])
def test_activations_on_the_host_are_on_the_device_for_two_units(mode: str, num: int) -> None:
    sizes: dict[str, Any] = {"checkpointing": mode, "micro_batch": 4, "num_micro_batches": num, "shape": MANY}
    here, there = assessed("zero3", **sizes), assessed("zero3+activations=host", **sizes)
    saved = [there.works[unit.name].saved_bytes for unit in there.schedule.units if unit.name.startswith("blocks.")]
    assert at_most(here, "activations") - at_most(there, "activations") == pytest.approx(sum(saved[2:]), rel=0.05)
    assert there.memory.host_bytes == sum(saved)
    assert there.memory.peak.total < here.memory.peak.total
    # The head, whose backward comes first, and the last block are there when the backward begins.
    assert there.moved.to_host - here.moved.to_host == num * sum(saved)
    assert there.moved.to_device - here.moved.to_device == num * sum(saved[:-1])
    last = there.memory.instants[-1].by_class()
    assert last["activations"] == WORKSPACE_BYTES


def test_of_selective_checkpointing_inputs_go() -> None:
    """What it keeps of a unit besides never passes autograd's hooks."""
    full, selective = (
        assessed("zero3+activations=host", checkpointing=mode, micro_batch=4, shape=MANY)
        for mode in ("full", "selective")
    )
    assert selective.memory.host_bytes == full.memory.host_bytes > 0
    assert at_most(selective, "activations") > 5 * at_most(full, "activations")
    assert selective.memory.instants[-1].by_class()["activations"] == WORKSPACE_BYTES


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


# ---------------------------------------------------------------------------------------------------------
# what travels encoded


def test_rows_of_parameters_have_two_places() -> None:
    exact, encoded = (assessed(name) for name in ("zero3", "zero3+params_as=int8"))
    rows = [unit.gathered_row_bytes for unit in encoded.schedule.units]
    assert encoded.schedule.row_slot_bytes == max(rows)
    # The largest is the head: a byte for each of its elements, and a scale for 256.
    assert max(rows) == SHAPE.vocab * SHAPE.hidden * 260 // 256
    grown = sum(encoded.schedule.slot_bytes) - sum(exact.schedule.slot_bytes)
    assert at_most(encoded, "gathered") - at_most(exact, "gathered") == NUM_ROW_SLOTS * max(rows) + grown
    assert not exact.schedule.row_slot_bytes


def test_whole_gradients_need_a_slot_for_rows_alone() -> None:
    found = assessed("ddp+grads_as=int8")
    largest = max(sum(aligned(flat.exchanged_bytes) for flat in unit.flats) for unit in found.schedule.units)
    assert largest == 2 * SHAPE.vocab * SHAPE.hidden * 260 // 256  # sent, and received
    sizes = [unit.reduced_bytes for unit in found.schedule.units]
    assert max(sizes) == largest
    assert at_most(found, "reduce") == found.schedule.reduction_bytes(keeps_slots=False) <= 2 * largest
    assert found.memory.instants[-1].by_class()["reduce"] == 0


def test_what_is_lost_stays_with_the_gradients() -> None:
    """Of every hop: all elements inside the node, an eighth of them across; in 16 bits, from step to step."""
    without, found = (assessed(f"zero3+grads_as=int4{words}", machine(nodes=2)) for words in ("", ":feedback"))
    lost = 2 * sum(flat.num_elems * 9 // 8 for flat in found.schedule.trainable_flats if flat.grads_codec is not None)
    assert saved_error_bytes(found.schedule.trainable_flats) == lost > 0
    assert saved_error_bytes(without.schedule.trainable_flats) == 0
    for instant, other in zip(found.memory.instants, without.memory.instants, strict=True):
        assert instant.by_class()["grads"] - other.by_class()["grads"] == lost


def test_a_copy_at_rest_is_as_it_came() -> None:
    exact, encoded = (assessed(name, machine(nodes=2)) for name in ("hpz", "zeropp"))
    matrices = [flat for flat in encoded.schedule.trainable_flats if flat.copy_is_encoded]
    saved = sum(flat.num_rest * 2 - flat.num_rest * 260 // 256 for flat in matrices)
    padding = sum(flat.num_rest for flat in encoded.schedule.trainable_flats) - sum(
        flat.num_rest for flat in exact.schedule.trainable_flats
    )
    assert at_most(exact, "params") - at_most(encoded, "params") == saved - 2 * padding


def test_one_rank_encodes_nothing() -> None:
    for strategy in WIRES:
        exact, found = (assessed(name, machine(gpus=1)).memory for name in (strategy.partition("+")[0], strategy))
        assert found.peak.total == pytest.approx(exact.peak.total, rel=1e-3)  # norms are a flat of their own
