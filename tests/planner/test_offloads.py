"""What goes to the host and to disk where the device is short: how much stays, what is refused, what is told."""

import re
from dataclasses import replace
from typing import Any

import pytest

from shardwise.base.errors import ConfigurationError
from shardwise.core.layout import PRESETS, layouts_for
from shardwise.planner.assess import Assessment, Assessor, Machine
from shardwise.planner.hardware.cluster import make_cluster
from shardwise.planner.plan_json import plan_as_json
from shardwise.planner.planning import Plan, machine_of, plan, plan_for
from shardwise.planner.search import HOST_GAIN, MODES, TIE, Choice, choices, has_room, label_of, strategy_of
from shardwise.planner.shapes.shape import ModelShape, StatesOnly
from shardwise.planner.subject import subject_of
from shardwise.planner.training import Training
from tests.cli.asking import Asker
from tests.planner.planning import GB, MANY, assessed, choice_of, machine
from tests.support.tables import table

GIB = 1 << 30
# 20 blocks of 202.4M parameters.
SHAPE_4B = ModelShape(
    name="4b", layers=20, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008, vocab=256, code="in-tree"
)
STEP_4B: dict[str, Any] = {"seq": 8192, "checkpointing": "full"}


def h200(gpu_memory: int | None = None, host_memory: int = 128 * GIB) -> Machine:
    """One of them, and what 16 cores update in a second."""
    cluster = replace(make_cluster("1xH200", host_memory=host_memory), host_adam_elems_per_s=4e9)
    return replace(machine_of(cluster), free_bytes=gpu_memory)


def costed(strategy: str, on: Machine | None = None, shape: ModelShape = SHAPE_4B, **sizes: Any) -> Assessment:
    found = plan(shape, on or h200(), strategy=strategy, **{**STEP_4B, **sizes})
    assert isinstance(found, Plan)
    return found.found[0]


# ---------------------------------------------------------------------------------------------------------
# 4B on one H200


@pytest.mark.parametrize("strategy", ["zero2_offload", "zero3_offload", "zero2+optimizer=host"])
@pytest.mark.parametrize("seq", [2048, 8192, 32768])
def test_a_step_is_bounded_by_the_host_and_by_the_sum_of_all(strategy: str, seq: int) -> None:
    timing = costed(strategy, seq=seq).timing
    host_s = timing.busy_s["host"]
    assert host_s == pytest.approx(20 * 202.4e6 / 4e9, rel=0.01)
    assert timing.step_s >= max(host_s, timing.compute_s)
    assert timing.step_s <= timing.compute_s + timing.update_s + sum(timing.busy_s.values())


def test_with_clipping_the_host_begins_when_the_backward_ends() -> None:
    timing = costed("zero2_offload").timing
    backward_s = sum(span.end_s - span.begin_s for span in timing.spans if span.name.startswith("backward"))
    assert timing.step_s == pytest.approx(backward_s + timing.busy_s["host"], rel=0.06)


def test_it_is_slower_than_on_the_device_and_faster_in_parts() -> None:
    here, half, none = (
        costed(strategy).step_s for strategy in ("ddp", "zero2_offload+optimizer=host:0.5", "zero2_offload")
    )
    assert here < half < none


def test_what_leaves_saves() -> None:
    peaks = [
        costed(strategy).memory.peak.total
        for strategy in ("ddp", "zero2+optimizer=host", "zero2_offload", "zero3_offload")
    ]
    assert peaks == sorted(peaks, reverse=True)
    # Weights in bf16, and what one unit after the other needs.
    assert 8.1 * GB < peaks[2] < 14 * GB
    assert peaks[3] < 6 * GB
    # 12 bytes of masters and moments, 4 of gradients, 2 of weights.
    for strategy in ("zero2_offload", "zero3_offload"):
        assert costed(strategy, speculation=0).host_bytes == pytest.approx(18 * 20 * 202.4e6, rel=0.01)


def test_on_disk_the_host_holds_gradients_and_what_passes_through() -> None:
    found = costed("zero3_nvme")
    away = found.memory.off_device
    assert found.disk_bytes == pytest.approx(14 * 20 * 202.4e6, rel=0.01)
    assert away.windows > 0 < away.staged
    assert found.host_bytes == pytest.approx(4 * 20 * 202.4e6 + away.windows + away.staged, rel=0.01)
    cluster = found.machine.cluster
    state = 12 * 20 * 202.4e6
    assert found.step_s > state / cluster.disk_read_bytes_per_s + state / cluster.disk_write_bytes_per_s


# ---------------------------------------------------------------------------------------------------------
# how much stays


def test_the_part_that_stays_grows_with_the_memory() -> None:
    parts = []
    for memory in (12, 20, 35, 50, 65):
        found = plan(SHAPE_4B, h200(memory * GB), **STEP_4B)
        assert isinstance(found, Plan)
        best = found.recommended
        assert best is not None
        assert has_room(best)
        assert not best.is_on_device
        parts.append(best.part_on_device)
    assert parts == sorted(parts)
    assert parts[0] < 0.2 < 0.6 < parts[-1] < 1


def test_what_fits_on_the_device_stays_there() -> None:
    found = plan(SHAPE_4B, h200(), **STEP_4B)
    assert isinstance(found, Plan)
    assert found.recommended is not None
    assert found.recommended.is_on_device
    assert not any(layout.kept for entry in found.found for layout in entry.layouts)


@pytest.fixture(scope="module")
def plan_13b() -> Plan:
    found = plan("llama-2-13b", h200(), seq=4096)
    assert isinstance(found, Plan)
    return found


def test_13b_on_one_h200_fits_gpu_and_host(plan_13b: Plan) -> None:
    """All of its state is 234 GB: neither the device nor the host has room for it alone."""
    best = plan_13b.recommended
    assert best is not None
    by_name = {entry.name: entry for entry in plan_13b.found}
    assert "on each H200" in by_name["zero3"].why_not
    assert "on the host of each node" in by_name["zero3_offload"].why_not
    assert has_room(best)
    assert best.high_bytes <= plan_13b.machine.memory_bytes
    assert best.host_bytes <= 0.9 * 128 * GIB
    assert best.disk_bytes == 0
    assert 0.4 < best.part_on_device < 0.8
    assert best.step_s < 0.5 * by_name["zero3_offload"].step_s


def test_why_so_much_is_told(plan_13b: Plan) -> None:
    best = plan_13b.recommended
    assert best is not None
    assert plan_13b.why.startswith("nothing fits on the device alone; the fastest that fits")
    assert f"the host of each node holds {best.host_bytes / GB:,.1f} of 137.4 GB" in plan_13b.why


def test_more_would_not_fit(plan_13b: Plan) -> None:
    best = plan_13b.recommended
    assert best is not None
    layout = best.layouts[0]
    for kept in range(round(100 * layout.kept) + 1, 100):
        more = plan_13b.assess("", [replace(layout, kept=kept / 100)] * len(best.layouts), best.training)
        assert more.part_on_device == best.part_on_device or not has_room(more)


def test_a_host_without_room_sends_what_is_left_to_disk() -> None:
    found = plan("llama-2-13b", h200(host_memory=64 * GIB), seq=4096)
    assert isinstance(found, Plan)
    best = found.recommended
    assert best is not None
    assert best.disk_bytes > 0
    assert best.host_bytes <= 0.9 * 64 * GIB
    assert "in a folder to name" in found.why
    # The first line and the table say the same number of units.
    [num] = re.findall(r"\+ (\d+) units on the host", best.name)
    assert f"the first {num} units on the host" in label_of(best)
    on_disk = next(entry for entry in found.found if entry.name == "zero3_nvme")
    assert best.step_s < on_disk.step_s
    # Both places are used: what the host has room for is not on disk.
    assert len(set(best.layouts)) == 2
    assert {layout.optimizer_on for layout in best.layouts} == {"host", "disk"}


def test_what_is_short_is_named_where_nothing_fits() -> None:
    cluster = make_cluster("1xH200", host_memory=16 * GIB, disk=10 * GB)
    found = plan("llama-2-13b", cluster, seq=4096)
    assert isinstance(found, Plan)
    assert found.recommended is None
    lacks = {entry.name: entry.why_not for entry in found.found}
    assert "on each H200-141GB" in lacks["ddp"]
    assert "on the host of each node, which has 15.5 GB to spare" in lacks["zero3_offload"]
    assert lacks["zero3_nvme"]


# ---------------------------------------------------------------------------------------------------------
# without a disk, on processors, for others


def searched(on: Machine, training: Training, choice: Choice | None = None, **settings: Any) -> Plan:
    return plan_for(Assessor(subject_of(MANY, training), on), training, choice or choice_of(training), **settings)


def small(free_bytes: int, **words: Any) -> Machine:
    return machine(gpus=2, free_bytes=free_bytes, **words)


@pytest.mark.parametrize("only_exact", [False, True])
def test_without_a_folder_nothing_goes_to_disk(only_exact: bool) -> None:
    for free_bytes in (5 * GB, 9 * GB):
        on = small(free_bytes, host_memory=4 * GB)
        found = searched(on, Training(), only_exact=only_exact)
        assert not any(layout.uses_disk for entry in found.found for layout in entry.layouts)
        told = searched(on, Training(), only_exact=only_exact, has_disk=True)
        assert "zero3_nvme" in [entry.name for entry in told.found]


def test_a_processor_is_its_own_host() -> None:
    """What rests on the host is in the same memory: it is never worth moving there."""
    training = Training()
    needed = assessed("zero3", replace(small(10**12), has_reserve=False), MANY).needed_bytes
    on = replace(small(needed - 1), has_reserve=False)
    found = searched(on, training)
    assert found.recommended is None


@pytest.mark.parametrize("free_bytes", [10 * GB, 13 * GB])
def test_every_strategy_can_be_asked_for_again(free_bytes: int) -> None:
    found = searched(small(free_bytes, host_memory=14 * GB), Training(), has_disk=True)
    names = found.assess.unit_names
    assert any(layout.kept for entry in found.found for layout in entry.layouts)
    for entry in found.found:
        assert tuple(layouts_for(strategy_of(entry), names)) == entry.layouts
        if len(set(entry.layouts)) == 1:
            assert tuple(layouts_for(entry.name, names)) == entry.layouts


def test_gradients_stay_on_the_device_where_there_are_several_micro_batches() -> None:
    """Their sums would come back and go again each time."""
    on = replace(small(14 * GB), cluster=replace(small(1).cluster, host_adam_elems_per_s=1e12))
    one, several = (searched(on, Training(num_micro_batches=num)) for num in (1, 8))
    assert not any("+optimizer=host" in entry.name and "grads" not in entry.name for entry in one.found[12:])
    best = several.recommended
    assert best is not None
    assert best.layouts[0].optimizer_on == "host"
    assert best.layouts[0].grads_on == "device"


# ---------------------------------------------------------------------------------------------------------
# activations


def open_choice(training: Training) -> Choice:
    return choices(training, MODES, [(training.micro_batch, training.num_micro_batches)])


def test_activations_go_to_the_host_where_that_makes_something_fit() -> None:
    """The host is slow at updating, so that moving the optimizer is no way out."""
    long: dict[str, Any] = {"seq": 16384, "micro_batch": 4, "checkpointing": "full"}
    stowed, here = (assessed(name, small(10**12), MANY, **long) for name in ("zero3+activations=host", "zero3"))
    assert stowed.high_bytes < 0.9 * here.high_bytes
    on = small((stowed.high_bytes + here.needed_bytes) // 2, host_memory=round(1.2 * stowed.host_bytes))
    on = replace(on, cluster=replace(on.cluster, host_adam_elems_per_s=1e6))
    found = searched(on, Training(**long))
    best = found.recommended
    assert best is not None
    assert {(layout.activations_on, layout.optimizer_on) for layout in best.layouts} == {("host", "device")}
    assert has_room(best)
    assert best.name == strategy_of(best)
    assert best.name.endswith("+activations=host")
    assert best.step_s < 1.05 * here.step_s


def test_activations_go_to_the_host_where_that_is_faster_than_computing_them_again() -> None:
    """With a bus that takes no time. On a real one it rarely is."""
    training = Training(micro_batch=4)
    on = small(round(0.8 * assessed("zero3", small(10**12), MANY, micro_batch=4).needed_bytes))
    on = replace(on, cluster=replace(on.cluster, host_is_measured=True))
    fast = replace(on, cluster=replace(on.cluster, pcie=replace(on.cluster.pcie, gigabytes_per_s=1e4)))
    best, usual = (searched(each, training, open_choice(training)).recommended for each in (fast, on))
    assert best is not None
    assert usual is not None
    assert usual.training.checkpointing != "none"
    assert {layout.activations_on for layout in best.layouts} == {"host"}
    assert best.training.checkpointing == "none"
    assert best.tokens_per_s > usual.tokens_per_s * (1 + TIE)
    assert best.host_bytes == best.memory.activation_bytes * 2
    # A small gain is no reason if the speed of the host is an assumption.
    assumed = replace(fast, cluster=replace(fast.cluster, host_is_measured=False))
    chosen = searched(assumed, training, open_choice(training)).recommended
    assert chosen is not None
    assert chosen.is_on_device
    assert best.tokens_per_s < chosen.tokens_per_s * (1 + HOST_GAIN[False])


# ---------------------------------------------------------------------------------------------------------
# spare memory for updates before the norm


def test_spare_memory_is_half_of_what_is_free() -> None:
    """14 bytes for each parameter that can be updated ahead, unless half of the free memory holds less."""
    none, auto, tight = (
        costed("zero2_offload", h200(host_memory=host), speculation=size)
        for host, size in ((256 * GIB, 0), (256 * GIB, "auto"), (100 * GIB, "auto"))
    )
    assert (none.spare_bytes, none.unclipped_s) == (0, None)
    assert auto.spare_bytes == pytest.approx(14 * 20 * 202.4e6, rel=0.01)
    assert auto.host_bytes == none.host_bytes + auto.spare_bytes
    left = 0.9 * 100 * GIB - none.host_bytes
    assert 0.9 * left < 2 * tight.spare_bytes <= left
    assert tight.step_s == auto.step_s
    assert auto.unclipped_s is not None
    assert tight.unclipped_s is not None
    assert auto.unclipped_s < tight.unclipped_s < tight.step_s


def test_unless_something_is_clipped_the_host_updates_during_the_backward() -> None:
    """As with updates that need no norm."""
    found = costed("zero2_offload", h200(host_memory=256 * GIB))
    early = replace(found, clips=False)
    assert found.unclipped_s == pytest.approx(early.step_s, rel=0.02)
    assert (early.spare_bytes, early.unclipped_s) == (0, None)


def test_a_size_that_cannot_be_used_does_not_fit() -> None:
    assert costed("zero2_offload", speculation="20GB").spare_bytes == pytest.approx(20e9, rel=0.2)
    refused: dict[str, dict[str, Any]] = {
        "100,000,000,000 bytes, and the host has": {"speculation": "100GB"},
        "5 bytes, and the smallest unit needs": {"speculation": 5},
        "no state that can be updated ahead": {"speculation": "20GB", "optimizer": "adamw8bit"},
    }
    for words, sizes in refused.items():
        found = costed("zero2_offload", **sizes)
        assert not found.fits
        assert words in found.why_not
    found = plan("llama-3-8b", "8xH100-80GB", speculation="20GB").found
    assert {"zero1", "zero2_offload"} <= {entry.name for entry in found if entry.fits}  # one has nothing on the host
    # It is part of the host memory that must be there.
    assert costed("zero2_offload+activations=host", seq=10**5).fits
    assert "on the host of each node" in costed("zero2_offload+activations=host", speculation="40GB", seq=10**5).why_not
    with pytest.raises(ConfigurationError, match="much"):
        Training(speculation="much")


@pytest.mark.parametrize(
    ("strategy", "size", "words"),
    [
        ("zero3", "1.5GB", "no state that can be updated ahead"),
        ("zero3_nvme", "1.5GB", "no state that can be updated ahead"),
        ("auto+params_as=int8", "1.5GB", "no state that can be updated ahead"),
        (None, "240GB", "240,000,000,000 bytes, and the host has 230,400,000,000"),
        ("auto+optimizer=disk", "900TB", "900,000,000,000,000 bytes, and host and disk have"),
    ],
)
def test_a_size_that_no_model_can_use_is_refused(strategy: str | None, size: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        plan("llama-3-8b", "8xH100-80GB", strategy=strategy, speculation=size)


def test_on_disk_only_a_requested_size_is_taken() -> None:
    """12 bytes for each parameter there, 2 on the host. The disk must have them, and updates begin in the backward."""
    strategy, num_params = "zero3_offload+optimizer=disk", 20 * 202.4e6
    none, auto, spare = (costed(strategy, speculation=size, seq=32768) for size in (0, "auto", "80GB"))
    assert (auto.spare_bytes, auto.unclipped_s) == (0, None)
    assert spare.disk_bytes - none.disk_bytes == pytest.approx(12 * num_params, rel=0.01)
    assert spare.host_bytes - none.host_bytes == pytest.approx(2 * num_params, rel=0.01)
    assert spare.spare_bytes == spare.disk_bytes - none.disk_bytes + spare.host_bytes - none.host_bytes
    assert spare.step_s == none.step_s
    assert spare.unclipped_s is not None
    backward_s = sum(span.end_s - span.begin_s for span in none.timing.spans if span.name.startswith("backward"))
    assert 0.5 * backward_s < none.step_s - spare.unclipped_s < backward_s
    full = h200()
    full = replace(full, cluster=replace(full.cluster, disk_bytes=spare.disk_bytes - 1))
    assert "on the disk of each node" in costed(strategy, full, speculation="80GB", seq=32768).why_not


def test_spare_memory_is_told() -> None:
    found = plan(SHAPE_4B, h200(), strategy="zero2_offload", **STEP_4B)
    assert isinstance(found, Plan)
    [entry] = found.found
    [row] = plan_as_json(found)["strategies"]
    assert (row["spare_bytes"], row["unclipped_step_seconds"]) == (entry.spare_bytes, entry.unclipped_s)
    assert f"{entry.spare_bytes / GB:,.1f} GB of it spare" in str(found)
    terms = {row["term"]: row for row in plan_as_json(found)["explain"]}
    assert f"{entry.spare_bytes / GB:,.1f} GB for updates before" in terms["host"]["formula"]
    shown = table(plan_as_json(found))
    assert "unclipped" in shown
    assert "if nothing is clipped" in shown


# ---------------------------------------------------------------------------------------------------------
# what is told


def test_a_change_that_moves_the_optimizer_says_what_it_saves_and_costs() -> None:
    found = plan("llama-3-8b", "8xH100-80GB", seq=8192)
    assert isinstance(found, Plan)
    told = found.refusals["ddp"]
    assert told.startswith("--strategy ddp+grads=host+optimizer=host")
    assert "the optimizer on the host: " in told
    assert " GB less on each GPU, " in told
    assert told.endswith("x the time)")

    flags = told.partition(" (")[0].split()
    again = plan("llama-3-8b", "8xH100-80GB", seq=8192, strategy=flags[1])
    assert isinstance(again, Plan)
    assert again.recommended is not None


def test_a_change_that_is_49_times_slower_is_no_remedy() -> None:
    assert plan("llama-3-8b", "8xH100", seq=512, search=False).refusals["ddp"] == ""


@pytest.mark.parametrize(
    ("precision", "strategy", "why"),
    [
        ("pure-bf16", "zero2_offload", "which needs fp32 masters"),
        ("bf16", "zero2_offload", ""),
        ("bf16", "zero3_nvme", "8-bit moments on disk"),
        ("pure-bf16", "zero3", ""),
    ],
)
def test_moments_in_8_bits_are_where_the_engine_has_them(precision: str, strategy: str, why: str) -> None:
    (entry,) = plan("llama-3-8b", "8xH100", precision=precision, strategy=strategy, optimizer="adamw8bit").found
    assert (entry.fits, why in entry.why_not) == (not why, True)


def test_host_and_disk_are_explained() -> None:
    answer = plan_as_json(plan("llama-2-13b", h200(host_memory=64 * GIB), seq=4096))
    terms = {row["term"]: row for row in answer["explain"]}
    best = next(row for row in answer["strategies"] if row["name"] == answer["recommended"])
    assert terms["host"]["bytes"] == best["host_bytes"] > 0
    assert terms["disk"]["bytes"] == best["disk_bytes"] > 0
    assert "windows that an optimizer on disk comes through" in terms["host"]["formula"]
    assert 0 < best["optimizer_part_on_device"] < 1
    assert "but for " in terms["optimizer"]["formula"]
    assert {span["lane"] for span in best["timeline"]} >= {"compute", "copy", "host", "disk"}


def test_on_the_device_neither_is_mentioned() -> None:
    answer = plan_as_json(plan("gpt2", "8xH100-80GB"))
    assert not {"host", "disk"} & {row["term"] for row in answer["explain"]}


def test_the_table_has_the_hosts_memory(ask: Asker) -> None:
    words = ("plan", "llama-2-13b", "--gpus", "H200", "--seq", 4096, "--host-memory", "128GiB")
    answer = ask(*words, "--explain")
    assert answer.code == 0
    (head,) = [line for line in answer.out.splitlines() if line.startswith("  strategy")]
    assert "host GB" in head
    assert "137 GB on the host" in " ".join(answer.out.split())
    taken = next(line for line in answer.out.splitlines() if line.startswith("> "))
    strategy = taken.split()[1]
    again = ask(*words, "--strategy", strategy)
    assert next(line for line in again.out.splitlines() if line.startswith("> ")).split()[1] == strategy
    (label,) = {" ".join(each.out.split())[5:].partition(":")[0] for each in (answer, again)}
    assert re.fullmatch(r"ZeRO-[23] with \d+ % of the optimizer( and the parameters)? on the host", label)


def test_the_states_alone_count_what_stays() -> None:
    found = plan_as_json(plan(StatesOnly(10**9), "8xA100-40GB", strategy="zero3_offload+optimizer=host:0.25"))
    (row,) = found["strategies"]
    assert row["per_gpu_bytes"]["optimizer"] == 0.75 * 12 * 10**9 / 8
    assert row["host_bytes"] == 0.25 * 16 * 10**9
    assert row["optimizer_part_on_device"] == 0.75


def test_presets_off_the_device_are_not_taken_for_a_little_speed() -> None:
    """A step that is long enough hides all of the host's updates, and the device's are not hidden."""
    found = plan(SHAPE_4B, h200(), num_micro_batches=16, **STEP_4B)
    assert isinstance(found, Plan)
    assert found.recommended is not None
    assert found.recommended.is_on_device
    assert set(PRESETS) <= {entry.name for entry in found.found}
