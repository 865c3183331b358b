"""A plan as JSON has the keys that others read, and its figures agree with each other."""

import json
from typing import Any

import pytest

from shardwise.base.text import size
from shardwise.planner.plan_json import plan_as_json
from shardwise.planner.planning import plan
from shardwise.version import VERSION

CLASSES = ["params", "grads", "optimizer", "activations", "gathered", "reduce", "loss"]
TOP = {"version", "model", "cluster", "training", "strategies", "recommended", "why", "alternatives", "explain"}
TOP |= {"engine", "ours"}
STRATEGY = {
    "name", "layout", "fits", "why_not", "per_gpu_bytes", "host_bytes", "spare_bytes", "disk_bytes", "traffic_bytes",
    "step_seconds", "unclipped_step_seconds", "tokens_per_second_per_gpu", "mfu",
}  # fmt: skip
BESIDE = {
    "strategy", "exact", "tight", "micro_batch", "num_micro_batches", "checkpointing", "peak", "instants", "timeline",
    "traffic", "nearest", "compute_seconds", "optimizer_part_on_device", "label", "room_bytes", "error_bytes",
}  # fmt: skip
PER_GPU = {*CLASSES, "context", "peak_active", "peak_reserved", "peak_reserved_low", "peak_reserved_high"}
ALTERNATIVE = {
    "kind", "flags", "settings", "cost", "label", "checkpointing", "tight", "needed_bytes", "room_bytes", "host_bytes",
    "step_seconds", "tokens_per_second_per_gpu", "times_as_fast", "much_faster",
}  # fmt: skip
LANES = {"compute", "gather", "reduce", "copy", "host", "disk"}

PLANS: dict[str, tuple[Any, ...]] = {
    "a search": ("llama-3-8b", "8xH100-80GB"),
    "nothing fits": ("llama-3-70b", "RTX-3090"),
}


@pytest.fixture(scope="module", params=PLANS)
def answer(request: pytest.FixtureRequest) -> dict[str, Any]:
    found = plan_as_json(plan(*PLANS[request.param], checkpointing="auto"))
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


@pytest.mark.quick("nothing fits")
def test_the_keys_are_these(answer: dict[str, Any]) -> None:
    assert set(answer) == TOP
    assert answer["version"] == VERSION
    assert all(set(tried) == ALTERNATIVE for tried in answer["alternatives"])
    for row in answer["strategies"]:
        assert set(row) == STRATEGY | BESIDE
        assert set(row["per_gpu_bytes"]) == PER_GPU
        assert set(row["traffic_bytes"]) == {"intra_node", "inter_node", "pcie", "disk"}
        assert set(row["peak"]) == {"instant", "text", "bytes"}
        assert all(set(entry) == {"axis", "kind", "dtype", "num_calls", "wire_bytes"} for entry in row["traffic"])


def test_bytes_are_whole_and_seconds_are_numbers(answer: dict[str, Any]) -> None:
    for row in answer["strategies"]:
        sizes = [*row["per_gpu_bytes"].values(), *row["traffic_bytes"].values(), row["host_bytes"], row["disk_bytes"]]
        assert all(type(size) is int and size >= 0 for size in sizes)
        assert row["step_seconds"] >= row["compute_seconds"] > 0
        assert 0 < row["mfu"] < 1


def test_a_peak_is_what_lies_there(answer: dict[str, Any]) -> None:
    for row in answer["strategies"]:
        sizes = row["per_gpu_bytes"]
        assert sum(row["peak"]["bytes"].values()) == sizes["peak_active"]
        assert sizes["peak_active"] <= sum(sizes[name] for name in CLASSES)
        assert sizes["peak_active"] < sizes["peak_reserved_low"] < sizes["peak_reserved"] < sizes["peak_reserved_high"]
        assert row["peak"]["text"].startswith(f"peak {size(sizes['peak_active'])} at ")


def test_room_is_what_the_needed_memory_leaves(answer: dict[str, Any]) -> None:
    limit = answer["cluster"]["gpu"]["memory_bytes"]
    for row in answer["strategies"]:
        sizes = row["per_gpu_bytes"]
        assert row["room_bytes"] == limit - sizes["peak_reserved"] - sizes["context"]
        assert row["error_bytes"] >= 0.05 * limit - 1
        assert row["tight"] == (row["fits"] and row["room_bytes"] < row["error_bytes"])


def test_what_does_not_fit_says_why_and_what_would_help(answer: dict[str, Any]) -> None:
    for row in answer["strategies"]:
        assert row["fits"] == (not row["why_not"])
        assert not (row["fits"] and row["nearest"])
        assert row["nearest"].startswith("--") or not row["nearest"]
    fitting = [row["name"] for row in answer["strategies"] if row["fits"]]
    assert answer["recommended"] in fitting if fitting else answer["recommended"] is None
    assert answer["why"]


def test_traffic_adds_up(answer: dict[str, Any]) -> None:
    for row in answer["strategies"]:
        sent = row["traffic_bytes"]["intra_node"] + row["traffic_bytes"]["inter_node"]
        assert sent == pytest.approx(sum(entry["wire_bytes"] for entry in row["traffic"]), abs=2)


def test_the_recommended_one_is_told_instant_by_instant() -> None:
    found = plan_as_json(plan("llama-3-8b", "8xH100-80GB", checkpointing="auto"), num_tokens=1e12)
    row = next(row for row in found["strategies"] if row["name"] == found["recommended"])
    peaks = [sum(instant["bytes"].values()) for instant in row["instants"]]
    assert max(peaks) == row["per_gpu_bytes"]["peak_active"]
    assert {span["lane"] for span in row["timeline"]} <= LANES
    assert all(0 <= span["begin_s"] < span["end_s"] for span in row["timeline"])
    times = [instant["at_s"] for instant in row["instants"]]
    assert times == sorted(times)
    days = 1e12 / (row["tokens_per_second_per_gpu"] * 8) / 86400
    assert row["days"] == pytest.approx(days)
    for term in found["explain"]:
        assert set(term) == {"term", "bytes", "formula", "source"}
        assert term["formula"]
        assert term["source"]


def test_instants_without_a_computation_of_their_own_begin_where_the_one_before_ends() -> None:
    found = plan_as_json(plan("llama-3.2-1b", "8xH100-80GB"))
    row = next(row for row in found["strategies"] if row["name"] == found["recommended"])
    at = {instant["name"]: instant["at_s"] for instant in row["instants"]}
    spans = {span["name"]: span for span in row["timeline"] if span["lane"] == "compute"}
    assert all(at[name] == span["begin_s"] for name, span in spans.items() if name in at)
    assert at["forward loss"] == at["backward loss"] == spans["forward blocks.15"]["end_s"]
    assert spans["backward root"]["end_s"] <= at["the gradients' norm"] <= at["update"] < row["step_seconds"]


def test_instants_of_every_micro_batch_are_at_its_own_time() -> None:
    """Also where the root computes nothing worth a span in some of them."""
    found = plan_as_json(plan("llama-3-8b", "8xH100-80GB", strategy="zero3-offload", num_micro_batches=3))
    (row,) = found["strategies"]
    for name in ("forward blocks.7", "backward blocks.7"):
        begins = [span["begin_s"] for span in row["timeline"] if (span["lane"], span["name"]) == ("compute", name)]
        assert [instant["at_s"] for instant in row["instants"] if instant["name"] == name] == begins


def test_states_have_the_same_keys() -> None:
    from shardwise.planner.shapes.shape import StatesOnly

    found = plan_as_json(plan(StatesOnly(7 * 10**9), "8xA100-80GB"))
    assert set(found) == TOP
    for row in found["strategies"]:
        assert set(row) == STRATEGY | BESIDE
        assert set(row["per_gpu_bytes"]) == PER_GPU
        assert row["step_seconds"] is None
