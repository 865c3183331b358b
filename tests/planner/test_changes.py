"""What a change of the training gives: figures that the command with its flags shows again, the cheapest first."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

import shardwise as sw
from shardwise.core.layout import PRESETS, layouts_for
from shardwise.planner.assess import PLAN_ERROR, Assessment, Machine
from shardwise.planner.changes import MIN_GAIN, MUCH_FASTER, NUM_ALTERNATIVES, much_faster
from shardwise.planner.hardware.cluster import make_cluster
from shardwise.planner.plan_json import plan_as_json
from shardwise.planner.planning import Plan, machine_of
from shardwise.planner.search import has_room, label_of, strategy_of
from shardwise.planner.training import Training
from shardwise.report.plan_facts import Plan as Facts
from tests.planner.conftest import Answer
from tests.planner.planning import GB, MANY, SHAPE, assessed, assessor, machine
from tests.support.tables import table

ORDER = ["same", "batch", "nodes", "numbers", "less"]
# Offloaded, tight, slow as asked, nothing at all, long sequences, a batch of all GPUs, another engine.
QUESTIONS: list[tuple[Any, ...]] = [
    ("llama-3-8b", "--gpus", "1xH100"),
    ("llama-3-8b", "--gpus", "1xH100", "--host-memory", "20GB", "--disk", "1GB"),
    ("llama-3-8b", "--gpus", "8xH100", "--checkpointing", "none", "--micro-batch", 16),
    ("llama-3-8b", "--gpus", "8xH100", "--strategy", "ddp"),
    ("llama-3-70b", "--gpus", "1xH100"),
    ("llama-3-8b", "--gpus", "1xA100-80GB", "--seq", 65536),
    ("qwen3-8b", "--gpus", "1xH100", "--global-batch-size", 8),
    ("gpt2", "--gpus", "1xRTX-3090", "--seq", 1024),
]


@pytest.mark.parametrize("words", QUESTIONS, ids=[" ".join(map(str, words)) for words in QUESTIONS])
def test_flags_that_are_pasted_give_the_same_figures(plan: Answer, words: tuple[Any, ...]) -> None:
    answer = plan(*words)
    assert 0 < len(answer["alternatives"]) <= NUM_ALTERNATIVES
    kinds = [ORDER.index(tried["kind"]) for tried in answer["alternatives"]]
    assert kinds == sorted(kinds)
    for tried in answer["alternatives"]:
        again = plan(*words, *tried["flags"].split())
        taken = next(row for row in again["strategies"] if row["name"] == again["recommended"])
        for name in ("tokens_per_second_per_gpu", "step_seconds", "room_bytes", "checkpointing", "tight"):
            assert taken[name] == pytest.approx(tried[name]), (tried["flags"], name)


def planned(model: str, gpus: str, **settings: Any) -> Plan:
    found = sw.plan(model, make_cluster(gpus), **settings)
    assert isinstance(found, Plan)
    return found


def test_8b_on_one_gpu() -> None:
    """The host takes most of a step. Sums over more tokens, fewer bits and adapters make it a few times as fast."""
    found = planned("llama-3-8b", "1xH100")
    best = found.recommended
    assert best is not None
    assert not best.is_on_device
    assert [tried.kind for tried in found.alternatives] == ["batch", "numbers", "less"]
    batch, numbers, less = found.alternatives
    assert batch.settings["num_micro_batches"] == 16
    assert numbers.settings["optimizer"] == "adamw8bit"
    assert less.flags == "--lora 16 --strategy ddp"
    speeds = [best.tokens_per_s, *(tried.entry.tokens_per_s for tried in found.alternatives)]
    assert all(after > MIN_GAIN * before for before, after in pairwise(speeds))
    assert much_faster(found.alternatives, found.recommended) is numbers
    text = " ".join(table(plan_as_json(found)).split())
    times = numbers.entry.tokens_per_s / best.tokens_per_s
    assert times > 5
    assert f"; or {times:.1f}x as fast with {numbers.flags} llama-3-8b" in text
    assert f"{numbers.entry.tokens_per_s:,.0f} tok/s/GPU ({times:.1f}x)" in text


def test_settings_are_keywords_of_python() -> None:
    for tried in planned("llama-3-8b", "1xH100").alternatives:
        again = planned("llama-3-8b", "1xH100", **tried.settings)
        assert again.recommended is not None
        assert again.recommended.step_s == pytest.approx(tried.entry.step_s)


def test_where_nothing_fits_more_gpus_come_first() -> None:
    found = planned("llama-3-70b", "1xH100")
    assert found.recommended is None
    assert found.alternatives[0].kind == "nodes"
    assert much_faster(found.alternatives, found.recommended) is None
    text = Facts(plan_as_json(found))
    assert [flags for flags, _ in text.alternative_words] == [tried.flags for tried in found.alternatives]


def test_a_plan_of_a_run_tries_no_changes() -> None:
    found = planned("gpt2", "1xH100", seq=512)
    assert replace(found, question=None).alternatives == ()


# ---------------------------------------------------------------------------------------------------------
# room


@pytest.mark.parametrize(
    ("model", "gpus", "settings"),
    [
        ("llama-3-8b", "8xH100", {"seq": 8192}),
        ("mistral-7b", "1xRTX-4090", {"lora": 16}),
        ("llama-2-7b", "1xRTX-4090", {"lora": 16, "seq": 4096}),
        ("llama-3-8b", "4xA100-80GB", {}),
        ("qwen3-8b", "8xA100-40GB", {"global_batch": 64}),
        ("llama-3-8b", "1xH100", {"optimizer": "adamw8bit", "reduce": "bf16"}),
    ],
)
def test_what_is_recommended_leaves_room(model: str, gpus: str, settings: dict[str, Any]) -> None:
    found = planned(model, gpus, **settings)
    best = found.recommended
    assert best is not None
    assert has_room(best)
    assert best.room_bytes >= PLAN_ERROR * best.machine.memory_bytes
    assert f"{best.room_bytes / GB:,.1f} of {best.machine.memory_bytes / GB:,.1f} GB stay free" in found.why
    # Only a gain of more than 5 % is worth less than a tenth.
    roomy = [entry.tokens_per_s for entry in found.found if entry.fits and entry.is_roomy and entry.is_on_device]
    assert best.is_roomy or all(best.tokens_per_s > 1.05 * speed for speed in roomy)


def test_free_memory_that_was_measured_needs_room_for_the_interval_alone() -> None:
    named, measured = (assessed("zero3", on) for on in (machine(), machine(free_bytes=40 * GB)))
    assert named.error_bytes == round(PLAN_ERROR * named.machine.memory_bytes)
    assert measured.error_bytes == measured.reserved.high - measured.reserved.expected < named.error_bytes
    assert assessed("zero3", replace(machine(), has_reserve=False)).error_bytes == 0


def tight_machine() -> Machine:
    entry = assessed("zero3", machine(gpus=2, free_bytes=10**12), MANY)
    on = machine(gpus=2, free_bytes=entry.needed_bytes + 1, host_memory=1 * GB)
    return replace(on, cluster=replace(on.cluster, disk_bytes=0))


def test_a_tight_plan_is_taken_where_nothing_else_fits_and_says_so() -> None:
    found = sw.plan(MANY, tight_machine(), Training())
    assert isinstance(found, Plan)
    assert found.recommended is not None
    assert found.recommended.is_tight
    room, error = (size / GB for size in (found.recommended.room_bytes, found.recommended.error_bytes))
    assert f"; tight: {room:,.1f} of" in found.why
    assert f"the plan may be wrong by {error:,.1f} GB" in found.why


def test_a_faster_tight_plan_is_an_alternative() -> None:
    words: dict[str, Any] = {"optimizer": "adamw8bit", "reduce": "bf16", "checkpointing": "full"}
    (entry,) = planned("llama-3-8b", "1xH100", strategy="zero3", **words).found
    on = make_cluster("1xH100", memory=round(1.02 * entry.needed_bytes))
    found = sw.plan("llama-3-8b", on, **words)
    assert isinstance(found, Plan)
    assert found.recommended is not None
    assert not found.recommended.is_tight
    tight = found.alternatives[0]
    assert (tight.kind, tight.entry.is_tight) == ("same", True)
    assert tight.entry.tokens_per_s > MUCH_FASTER * found.recommended.tokens_per_s
    again = sw.plan("llama-3-8b", on, **{**words, **tight.settings})
    assert isinstance(again, Plan)
    assert again.recommended is not None
    assert again.recommended.step_s == pytest.approx(tight.entry.step_s)
    # Free memory that was measured is filled further, for as much.
    measured = machine_of(on)
    measured = replace(measured, free_bytes=measured.memory_bytes - measured.context_bytes)
    taken = sw.plan("llama-3-8b", measured, **words)
    assert isinstance(taken, Plan)
    assert taken.recommended is not None
    assert taken.recommended.is_on_device


# ---------------------------------------------------------------------------------------------------------
# names


@pytest.mark.parametrize(
    ("strategy", "label"),
    [
        ("ddp", "ddp"),
        ("hpz", "hpz"),
        ("zeropp", "zeropp"),
        ("zero2_offload", "ZeRO-2 with the optimizer on the host"),
        ("zero3_nvme", "ZeRO-3 with the optimizer and the parameters on disk"),
        ("zero3+activations=host", "ZeRO-3 with activations on the host"),
        ("zero3+grads=host+optimizer=host:0.3", "ZeRO-3 with {part} % of the optimizer on the host"),
        ("zero3+params=host+optimizer=disk", "ZeRO-3 with the parameters on the host, and the optimizer on disk"),
        ({"blocks.[6-7]": "zero2", "head": "zero2", "*": "zero3"}, "ZeRO-3, the last 3 units as ZeRO-2"),
        ({"head": "zero2", "*": "zero3"}, "ZeRO-3, the last 1 unit as ZeRO-2"),
        ({"blocks.[2-3]": "zero2", "*": "zero3"}, "mixed"),
    ],
)
def test_strategies_have_names_in_words(strategy: Any, label: str) -> None:
    found = assessed(strategy)
    assert label_of(found) == label.format(part=round(100 * (1 - found.part_on_device)))


def kept(num: int) -> Assessment:
    assess = assessor(shape=replace(SHAPE, layers=24))
    layouts = [PRESETS["zero3"]] * (len(assess.unit_names) - num) + [PRESETS["zero2"]] * num
    return assess("mixed", layouts, Training())


@pytest.mark.parametrize("num", range(1, 26))
def test_mixtures_are_short_mappings_that_mean_the_same(num: int) -> None:
    found = kept(num)
    strategy = strategy_of(found)
    assert isinstance(strategy, dict)
    assert len(strategy) <= 5
    assert tuple(layouts_for(strategy, [unit.name for unit in found.schedule.units])) == found.layouts
