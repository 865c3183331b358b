"""Other engines as they are planned: their strategies, memory, traffic and steps, and the comparison with ours."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from shardwise.base.errors import ConfigurationError
from shardwise.core.layout import ENGINE_HAS
from shardwise.planner import assess
from shardwise.planner.cost.deepspeed import Zero, deepspeed_memory_of
from shardwise.planner.cost.peak import CLASSES, GATHERED, GRADS, OPTIMIZER, PARAMS, REDUCE
from shardwise.planner.hardware.cluster import make_cluster
from shardwise.planner.plan_json import plan_as_json
from shardwise.planner.planning import Plan, plan
from tests.planner.planning import GB, SHAPE, assessed, machine

NUM = sum(
    (
        SHAPE.layers * (2 * 1024 * 1024 + 2 * 1024 * 512 + 3 * 1024 * 4096 + 2 * 1024),
        2 * SHAPE.vocab * SHAPE.hidden + SHAPE.hidden,
    )
)


def planned(engine: str, **sizes: Any) -> Plan:
    found = plan(SHAPE, machine(), engine=engine, **sizes)
    assert isinstance(found, Plan)
    return found


@pytest.mark.parametrize("engine", ENGINE_HAS)
def test_an_engine_is_planned_with_what_it_has(engine: str) -> None:
    found = planned(engine, seq=512)
    names = [entry.name for entry in found.found]
    # On one node DeepSpeed would leave out a half of ZeRO++.
    assert sorted(names) == sorted(set(ENGINE_HAS[engine]) - {"zeropp"})
    assert all(entry.memory.peak.total > 0 and entry.step_s > 0 for entry in found.found)


@pytest.mark.parametrize(
    ("engine", "strategy", "listed"),
    [
        ("fsdp2", "ddp", "zero3, shard_grad_op"),
        ("fsdp1", "zero2", "ddp, zero3"),
        ("fsdp1", {"model.layers.*": "zero3", "*": "ddp"}, "for the whole model"),
        ("deepspeed", "hsdp", "ddp, zero1, zero2, zero3"),
        ("deepspeed", "zeropp", "zero3_offload"),
        ("deepspeed", "zero3+optimizer=host:0.5", "zero3_offload"),
        ("deepspeed", {"model.layers.*": "zero3", "*": "zero2"}, "each for the whole model"),
    ],
)
def test_what_an_engine_lacks_is_refused(engine: str, strategy: Any, listed: str) -> None:
    with pytest.raises(ConfigurationError, match=listed):
        planned(engine, strategy=strategy)


@pytest.mark.parametrize("sizes", [{"precision": "pure-bf16"}, {"precision": "bf16-autocast"}])
def test_deepspeeds_masters_are_fp32(sizes: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(sizes.values()))):
        planned("deepspeed", **sizes)


@pytest.mark.parametrize(
    ("strategy", "per_param"),
    [
        # Weights in 16 bits, then master and moments; stage 3 has its gradients' memory all the time.
        ("ddp", 2 + 12),
        ("zero1", 2 + 12 / 8),
        ("zero2", 2 + 12 / 8),
        ("zero3", 2 / 8 + 12 / 8 + 2 / 8),
        ("zero2_offload", 2),
        ("zero3_offload", 0),
    ],
)
def test_deepspeeds_state_between_steps(strategy: str, per_param: float) -> None:
    first = assessed(strategy, engine="deepspeed", seq=64).memory.instants[0].num_bytes
    state = first[PARAMS] + first[OPTIMIZER] + first[GRADS]
    assert state == pytest.approx(per_param * NUM, rel=0.001, abs=0.001 * NUM)


@pytest.mark.parametrize(("strategy", "per_param"), [("zero2_offload", 18 / 8), ("zero3_offload", 20 / 8)])
def test_deepspeeds_state_on_the_host(strategy: str, per_param: float) -> None:
    assert assessed(strategy, engine="deepspeed").memory.host_bytes == pytest.approx(per_param * NUM, rel=0.001)


def test_deepspeeds_buckets_are_as_large_as_they_are_set() -> None:
    entry = assessed("zero2", engine="deepspeed", seq=64)
    for zero, num in ((Zero(), 5e8), (Zero(overlaps=True), 1e9), (Zero(reduce_bucket=10**7), 1e7)):
        memory = deepspeed_memory_of(entry.schedule, entry.works, entry.training, zero)
        most = max(instant.num_bytes[REDUCE] for instant in memory.instants if instant.name.startswith("backward"))
        assert most == 2 * num


def test_stage_3_gathers_no_more_than_is_allowed_at_once() -> None:
    entry = assessed("zero3", engine="deepspeed", seq=64)
    sizes = []
    for live in (10**9, 5 * 10**7):
        zero = Zero(max_live=live, prefetch_bucket=0)
        memory = deepspeed_memory_of(entry.schedule, entry.works, entry.training, zero)
        sizes.append(max(instant.num_bytes[GATHERED] for instant in memory.instants))
    # Norms are below the threshold and stay.
    assert sizes == [pytest.approx(2 * NUM, rel=0.001), 2 * 5 * 10**7]


@pytest.mark.parametrize(
    ("strategy", "multiple"),
    # Times the parameters, in 16 bits. Stages 1 and 2 have all-reduces, and stage 3 gathers nothing twice.
    [("ddp", 2), ("zero1", 3), ("zero2", 3), ("zero3", 2)],
)
def test_deepspeeds_traffic(strategy: str, multiple: float) -> None:
    wire = assessed(strategy, engine="deepspeed").moved.by_call.wire_bytes
    assert wire == pytest.approx(multiple * 2 * NUM * 7 / 8, rel=0.01)


def test_two_micro_batches_of_stage_2_are_reduced_twice() -> None:
    wires = [assessed("zero2", engine="deepspeed", num_micro_batches=n).moved.by_call.wire_bytes for n in (1, 2, 5)]
    assert wires[1] - wires[0] == pytest.approx(2 * 2 * NUM * 7 / 8, rel=0.01)
    assert wires[2] - wires[0] == pytest.approx(4 * (wires[1] - wires[0]), rel=0.01)


@pytest.mark.parametrize(("engine", "strategy"), [("deepspeed", "zero1"), ("deepspeed", "zero2_offload")])
def test_what_deepspeed_does_not_overlap_takes_longer(engine: str, strategy: str) -> None:
    slow = machine(intra="5GB/s")
    theirs, ours = (assessed(strategy, slow, engine=name, reduce="bf16") for name in (engine, "shardwise"))
    sent_s = theirs.moved.by_call.wire_bytes / 5e9
    assert theirs.step_s > theirs.timing.compute_s + 0.9 * sent_s
    assert theirs.step_s > ours.step_s


def test_fsdp1_has_one_copy_of_what_it_gathers_and_fsdp2_two() -> None:
    one, two = (assessed("zero3", engine=engine, seq=64).memory for engine in ("fsdp1", "fsdp2"))
    block = 2 * (2 * 1024 * 1024 + 2 * 1024 * 512 + 3 * 1024 * 4096 + 2 * 1024)
    ends = 2 * (2 * SHAPE.vocab * SHAPE.hidden + SHAPE.hidden)
    held = {instant.name: instant.num_bytes[GATHERED] for instant in one.instants}
    assert held["backward model.layers.4"] == pytest.approx(ends + 2 * block, rel=0.001)
    assert len(one.pools) == len(two.pools) == 3


@pytest.mark.parametrize("engine", ["fsdp1", "deepspeed"])
def test_the_update_has_gradients_and_temporaries(engine: str) -> None:
    instants = assessed("zero3", engine=engine, seq=64).memory.instants
    update = instants[-1]
    assert update.name == "update"
    held = dict(zip(CLASSES, update.num_bytes, strict=True))
    more = 4 / 8 * NUM  # FSDP1's foreach, DeepSpeed's fp32 gradients
    assert held["optimizer"] == pytest.approx({"fsdp1": 8, "deepspeed": 12}[engine] / 8 * NUM + more, rel=0.001)


@pytest.mark.parametrize("engine", ENGINE_HAS)
def test_ours_is_compared_with_the_same_strategy(engine: str) -> None:
    found = planned(engine, seq=512, checkpointing="none", micro_batch=2)
    best, ours = found.recommended, found.ours
    assert best is not None
    assert ours is not None
    assert (ours.layouts, ours.training.checkpointing, ours.training.micro_batch) == (best.layouts, "none", 2)
    assert ours.training.formats == best.training.formats
    assert f"{ours.tokens_per_s / best.tokens_per_s:.2f}x" in found.why
    answer = plan_as_json(found)
    assert answer["ours"]["needed_bytes"] == ours.needed_bytes
    assert answer["engine"]
    assert not answer["explain"]


def test_what_does_not_fit_is_compared_too() -> None:
    found = plan(SHAPE, machine(free_bytes=GB), engine="deepspeed", strategy="zero3", checkpointing="none")
    assert isinstance(found, Plan)
    assert found.recommended is None
    assert found.ours is not None
    assert plan_as_json(found)["ours"]["fits"] == found.ours.fits


def test_ours_is_not_compared_with_itself() -> None:
    found = planned("shardwise", seq=512)
    assert found.ours is None
    assert plan_as_json(found)["ours"] is None


def test_deepspeeds_offload_on_one_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """As measured (benchmarks/results/2026-11-18-2240-offload-h200.md): 13.2 GB, 77.2 on the host with the process
    itself, 2.03 to 2.40 s, with `overlap_comm` and a host that updates 4e9 parameters a second."""
    monkeypatch.setattr(assess, "Zero", partial(Zero, overlaps=True))
    shape = replace(SHAPE, layers=20, hidden=4096, heads=32, kv_heads=32, ffn=11008, vocab=1024)
    on = replace(make_cluster("1xH200"), host_adam_elems_per_s=4e9)
    found = plan(shape, on, engine="deepspeed", strategy="zero2_offload", seq=8192, checkpointing="full")
    assert isinstance(found, Plan)
    entry = found.found[0]
    memory = deepspeed_memory_of(entry.schedule, entry.works, entry.training, Zero(overlaps=True))
    assert memory.peak.total == pytest.approx(13.2 * GB, rel=0.05)
    assert 0.9 * 77.2 * GB < memory.host_bytes < 77.2 * GB
    assert 2.03 < entry.step_s < 2.40
