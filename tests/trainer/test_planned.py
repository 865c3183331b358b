"""The plan of a run beside what the run did: traffic to the byte, state by class, and what `auto` considered."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.core import mesh
from shardwise.core.layout import PRESETS, layout_of
from shardwise.planner.auto import machine_here
from shardwise.planner.changes import nearest_change
from shardwise.planner.hardware.cluster import make_cluster
from shardwise.planner.planning import Plan, plan
from shardwise.trainer import run_plan as planned
from shardwise.trainer.checks import check_all, completed
from shardwise.trainer.models.build import build
from shardwise.trainer.offload import offload_of
from shardwise.trainer.optimizers import optimizer_for
from shardwise.trainer.out_of_memory import FLAGS, offload_flag, remedies
from shardwise.trainer.run import run_rank
from shardwise.trainer.run_plan import Draft, RunPlan, draft, plan_before
from shardwise.trainer.settings import Lora, Settings
from tests.harness import Pool
from tests.support.running import rows, save_llama, settings_for, train
from tests.support.strategies import slow_but

SPLITS: dict[str, dict[str, Any]] = {
    "ddp": {"gradient_accumulation_steps": 2},
    "zero1": {},
    "zero2": {"gradient_accumulation_steps": 2},
    "shard_grad_op": {},
    "zero3": {"gradient_accumulation_steps": 4, "max_grad_norm": 0.0},
    "hpz": {"node_size": 1, "gradient_accumulation_steps": 2},
    "hfsdp": {"node_size": 1},
    "zero3+params_as=int8:forward": {"gradient_accumulation_steps": 2, "eval_steps": 2},
}


def plan_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    return found


@pytest.mark.parametrize("strategy", slow_but(("ddp", "zero2"), SPLITS))
def test_a_step_moves_what_was_planned_to_the_byte(run_ranks: Pool, tmp_path: Path, strategy: str) -> None:
    settings = settings_for(tmp_path, strategy=strategy, precision="bf16", max_steps=3, **SPLITS[strategy])
    assert train(run_ranks, 2, settings) == 0
    moved = json.loads((tmp_path / "traffic.json").read_text())
    assert moved["seen"] == moved["planned"]
    assert sum(row["wire_bytes"] for row in moved["seen"]) > 10_000
    assert plan_in(tmp_path)["strategies"][0]["traffic"] == moved["planned"]


@pytest.mark.slow
def test_traffic_is_of_a_step_with_nothing_in_between(run_ranks: Pool, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, strategy="zero3", max_steps=6, eval_steps=2)
    assert train(run_ranks, 2, settings) == 0
    moved = json.loads((tmp_path / "traffic.json").read_text())
    assert moved["seen"] == moved["planned"]


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_the_plan_has_one_strategy_and_the_state_that_was_seen(run_ranks: Pool, tmp_path: Path, strategy: str) -> None:
    settings = settings_for(tmp_path, strategy=strategy, precision="bf16", gradient_checkpointing="full")
    assert train(run_ranks, 2, settings) == 0
    plan = plan_in(tmp_path)
    [found] = plan["strategies"]
    assert (found["name"], plan["recommended"], found["fits"]) == (strategy, strategy, True)
    assert plan["training"]["checkpointing"] == "full"
    assert plan["cluster"]["world_size"] == 2
    held, last = found["per_gpu_bytes"], rows(tmp_path)[-2]
    assert held["params"] == last["memory_params"]
    assert held["optimizer"] == pytest.approx(last["memory_optimizer"], rel=0.06)  # padding has no moments
    assert held["activations"] > 0
    assert found["rests"]["grads"] == last["memory_peak_grads"]
    assert sum(found["rests"].values()) < held["peak_active"] == last["memory_planned"]
    assert found["instants"]
    assert found["timeline"]


def test_auto_writes_down_all_that_it_considered(
    run_ranks: Pool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_rank(settings_for(tmp_path / "alone").to_json()) == 0
    said = " ".join(capfd.readouterr().out.split())
    plan = plan_in(tmp_path / "alone")
    assert f"auto -> {plan['recommended']} on 1 rank, cpu, fp32: {plan['why']}" in said
    assert train(run_ranks, 2, settings_for(tmp_path / "two", gradient_accumulation_steps=2)) == 0
    plan = plan_in(tmp_path / "two")
    names = [found["name"] for found in plan["strategies"]]
    assert {name for name, layout in PRESETS.items() if layout.is_exact and not layout.uses_disk} <= set(names)
    assert len(names) == len(set(names))
    assert plan["recommended"] == names[0]
    assert plan["strategies"][0]["num_micro_batches"] == 2


def test_the_banner_has_the_planned_peak(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_rank(settings_for(tmp_path, strategy="ddp").to_json()) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert " memory planned peak " in said
    assert "activations" in said.partition(" memory planned peak ")[2]
    [found] = plan_in(tmp_path)["strategies"]
    assert found["per_gpu_bytes"]["peak_active"] < 32 << 20  # no workspaces of a GPU's libraries


def test_a_model_that_cannot_be_tried_out_is_planned_without_activations(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise NotImplementedError("aten::strange on meta\nmore")

    monkeypatch.setattr(planned, "probe_works", fail)
    assert run_rank(settings_for(tmp_path, strategy="ddp").to_json()) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "+ activations a rank" in said
    assert "no plan of activations: where the model was tried out, NotImplementedError: aten::strange on meta" in said
    [found] = plan_in(tmp_path)["strategies"]
    assert found["per_gpu_bytes"]["params"] > 0
    assert found["per_gpu_bytes"]["activations"] is None
    assert found["per_gpu_bytes"]["peak_active"] is None
    assert found["step_seconds"] is None
    assert json.loads((tmp_path / "traffic.json").read_text()) == {"seen": [], "planned": []}


def drafted(settings: Settings, free_bytes: int = 10**12) -> Draft:
    """Of a run of one rank."""
    was_joined = mesh.is_joined()
    sw.init(device="cpu")
    machine = machine_here(mesh.everyone(), mesh.make_axes(None), free_bytes)
    if not was_joined:
        mesh.leave()
    settings = completed(settings, has_gpu=False)
    checked = check_all(settings, 1)
    built = build(settings, checked.tokenizer.vocab_size, torch.device("cpu"), facts=checked.facts)
    optimizer = optimizer_for(built.model, settings)
    return draft(built, settings, checked, optimizer, machine, num_steps=1)


@pytest.mark.parametrize("kind", ["in-tree", "llama", "lora", "compiled"])
def test_activations_of_every_kind_of_model_are_planned(tmp_path: Path, kind: str) -> None:
    changes: dict[str, Any] = {"precision": "bf16", "compile": "on" if kind == "compiled" else "off"}
    if kind in ("llama", "lora"):
        changes |= {"model": str(save_llama(tmp_path / "llama")), "shape": {}, "tokenizer": "bytes"}
    if kind == "lora":
        changes |= {"lora": Lora(r=4, targets=("q_proj",))}
    found = drafted(settings_for(tmp_path / "run", **changes))
    assert not found.note
    held = {}
    for mode in ("none", "selective", "full"):
        works = found.subject.works(replace(found.training, checkpointing=mode))
        assert {unit.name for unit in found.subject.units} <= set(works)
        held[mode] = sum(work.saved_bytes for work in works.values())
    assert held["none"] > held["selective"] > held["full"] > 0


def test_sgd_and_its_momentum(tmp_path: Path) -> None:
    assert drafted(settings_for(tmp_path, optimizer="sgd")).training.num_moments == 1
    assert drafted(settings_for(tmp_path, optimizer="sgd", momentum=0.0)).training.num_moments == 0


LARGE = {"hidden": 1024, "layers": 8, "heads": 8, "kv_heads": 8, "ffn": 4096, "max_seq": 1024}


def test_fixes_are_planned_and_those_that_fit_come_first(tmp_path: Path) -> None:
    settings = settings_for(
        tmp_path, shape=LARGE, seq_length=1024, global_batch_size=8, strategy="ddp", precision="bf16"
    )
    whole = plan_before(drafted(settings))
    assert whole is not None
    needed = whole.entry.needed_bytes
    # A little less than it needs, much less, and far too little.
    for share, expected in ((0.95, True), (0.6, True), (0.1, False)):
        plan = plan_before(drafted(settings, round(needed * share)))
        assert plan is not None
        found = remedies(plan)
        assert any(fix.fits for fix in found) == expected
        fitting = [fix.fits for fix in found[:-1]]
        assert fitting == sorted(fitting, key=lambda fits: not fits)
        for fix in found:
            assert fix.fits is None or fix.fits == (needed - fix.saved_bytes <= needed * share)
    words = [fix.words for fix in remedies(whole)]
    assert "--gradient-checkpointing full" in words
    assert "--per-device-train-batch-size 4 --gradient-accumulation-steps 2" in words
    assert "--reduce-dtype bf16" in words
    assert "--optimizer adamw8bit" in words
    assert words.count("twice the ranks (2)") <= 1


def test_auto_takes_a_micro_batch_that_fits(tmp_path: Path) -> None:
    """With less memory, a smaller one; the global batch stays."""
    changes: dict[str, Any] = {"shape": LARGE, "seq_length": 1024, "strategy": "ddp", "precision": "bf16"}
    settings = settings_for(tmp_path, per_device_train_batch_size="auto", **changes)
    whole = drafted(settings)
    assert list(whole.batches) == [(1, 8), (2, 4), (4, 2), (8, 1)]
    needed = {}
    for size, num in whole.batches:
        given = drafted(settings_for(tmp_path, per_device_train_batch_size=size, **changes))
        assert (given.training.micro_batch, given.training.num_micro_batches, given.why_batch) == (size, num, "")
        assert given.with_best_batch() is given
        plan = plan_before(given)
        assert plan is not None
        needed[size] = plan.entry.needed_bytes
    for free_bytes, sizes in ((needed[4] + 2**20, (1, 2, 4)), (needed[1] + 2**20, (1,)), (needed[1] // 2, (1,))):
        assert whole.machine is not None
        found = replace(whole, machine=replace(whole.machine, free_bytes=free_bytes)).with_best_batch()
        assert found.training.micro_batch in sizes
        assert found.training.micro_batch * found.training.num_micro_batches == 8
        assert found.why_batch == "auto: the fastest of 1, 2, 4, 8 that fits, as planned"


@pytest.mark.parametrize("strategy", ["zero3", "auto"])
def test_a_micro_batch_that_was_chosen_trains_the_same(run_ranks: Pool, tmp_path: Path, strategy: str) -> None:
    changes: dict[str, Any] = {"max_steps": 2, "eval_fraction": 0}
    chosen, given = tmp_path / "chosen", tmp_path / "given"
    auto = settings_for(chosen, strategy=strategy, per_device_train_batch_size="auto", **changes)
    assert train(run_ranks, 2, auto) == 0
    runs = plan_in(chosen)["strategies"][0]["name"]
    size = plan_in(chosen)["training"]["micro_batch"]
    assert train(run_ranks, 2, settings_for(given, strategy=runs, per_device_train_batch_size=size, **changes)) == 0
    assert [row["loss"] for row in rows(chosen)] == [row["loss"] for row in rows(given)]


def planned_on(gpus: str, strategy: str, **cluster: Any) -> RunPlan:
    """Of a model on machines that are not here."""
    found = plan(
        "llama-3.2-3b", make_cluster(gpus, **cluster), strategy=strategy, seq=2048, micro_batch=4, checkpointing="none"
    )
    assert isinstance(found, Plan)
    return RunPlan(found.found[0], found.assess)


def test_offload_is_among_the_fixes_if_the_host_has_room() -> None:
    room = planned_on("1xH100-80GB", "ddp")
    found = {fix.words: fix for fix in remedies(room)}
    moved = found["--offload grads=host,optimizer=host"]
    assert moved.saved_bytes > 8 * 3.2e9
    assert moved.fits
    assert moved.times is not None
    assert moved.times > 1
    assert "--offload activations=host" in found
    assert not any("params=host" in words for words in found), "they are whole under ddp"
    split = {fix.words for fix in remedies(planned_on("8xH100-80GB", "zero3"))}
    assert "--offload params=host,grads=host,optimizer=host" in split
    small = [fix.words for fix in remedies(planned_on("1xH100-80GB", "ddp", host_memory="32GB"))]
    assert not any("optimizer=host" in words for words in small)


def test_what_moves_is_told_beside_the_strategy_and_the_wire_that_were_asked_for() -> None:
    """A name with the codec in it would be refused where `--wire` says it again."""
    run = planned_on("2xH100-80GB", "zero3+params_as=int8", memory="18GB")
    told = nearest_change(run.assess, run.entry, FLAGS, "--nnodes", offload_flag)
    flag, moves, *others = told.partition(" (")[0].split()
    assert (flag, moves) == ("--offload", "grads=host,optimizer=host")
    assert others[:2] == ["--gradient-checkpointing", "full"]
    again = offload_of(moves.split(","), ["params=int8"]).applied_to("zero3")
    assert isinstance(again, str)
    assert layout_of(again) == replace(run.entry.layouts[0], grads_on="host", optimizer_on="host")
    # `shardwise plan` has no flags but the strategy.
    assert nearest_change(run.assess, run.entry).split()[:2] == ["--strategy", again]


def test_what_is_moved_already_is_moved_further() -> None:
    words = [fix.words for fix in remedies(planned_on("8xH100-80GB", "zero3+optimizer=host:0.5"))]
    instead = "in place of what is moved now"
    assert f"--offload grads=host,optimizer=host {instead}" in words
    assert f"--offload params=host,grads=host,optimizer=host {instead}" in words
    assert f"--offload optimizer=host:0.5,activations=host {instead}" in words
    on_disk = remedies(planned_on("8xH100-80GB", "zero3-nvme"))
    assert not any(fix.words.startswith("--offload") for fix in on_disk), "nothing is left to move"
