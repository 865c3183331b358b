"""Runs whose state rests on the host or on disk: the same training, what is planned of it is seen, nothing is left."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.core import mesh
from shardwise.core.engine.guards import engine_of
from shardwise.trainer import run, run_checkpoints
from shardwise.trainer.checks import completed
from shardwise.trainer.out_of_memory import FailureContext
from shardwise.trainer.settings import Lora, settings_from_json
from tests.harness import Pool
from tests.support.running import losses, rows, save_llama, settings_for, train
from tests.support.strategies import slow_but
from tests.trainer.test_beside import listen, saved_in

ALL_OVER = ("optimizer=host:0.6", "params=disk", "grads=host")
# With the strategy without it that gives the same sums.
WAYS: dict[str, dict[str, Any]] = {
    "optimizer on host": {"strategy": "zero2", "offload": ("optimizer=host",), "precision": "bf16"},
    "a part of it": {"strategy": "ddp", "offload": ("optimizer=host:0.5",)},
    "all over": {
        "strategy": "zero3", "offload": ALL_OVER, "gradient_accumulation_steps": 2, "precision": "bf16",
    },
    "a preset on disk": {"strategy": "zero3-nvme", "offload": ()},
    "activations": {"strategy": "zero3", "offload": ("activations=host",), "gradient_checkpointing": "full"},
    "a mapping": {"strategy": {"blocks.0": "ddp", "*": "zero3"}, "offload": ("optimizer=host",)},
}  # fmt: skip


def folder_for(words: tuple[str, ...], strategy: Any, folder: Path) -> tuple[str, ...]:
    folder.mkdir(exist_ok=True)
    uses_disk = "nvme" in str(strategy) or any("disk" in word for word in words)
    return (*words, f"disk:{folder}") if uses_disk else words


@pytest.mark.parametrize("way", slow_but(("all over", "a part of it"), WAYS))
def test_the_training_is_the_same(run_ranks: Pool, tmp_path: Path, way: str) -> None:
    changes = {**WAYS[way], "max_steps": 4}
    words = folder_for(changes.pop("offload"), changes["strategy"], tmp_path / "state")
    plain = "zero3" if changes["strategy"] == "zero3-nvme" else changes["strategy"]
    assert train(run_ranks, 2, settings_for(tmp_path / "plain", **{**changes, "strategy": plain})) == 0
    assert train(run_ranks, 2, settings_for(tmp_path / "moved", **changes, offload=words)) == 0
    assert losses(tmp_path / "moved") == losses(tmp_path / "plain"), "bit for bit"
    norms = [[row["grad_norm"] for row in rows(tmp_path / name) if "loss" in row] for name in ("moved", "plain")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert list((tmp_path / "state").iterdir()) == []


def test_what_is_planned_is_seen_and_told(run_ranks: Pool, tmp_path: Path) -> None:
    state = tmp_path / "state"
    words = folder_for(ALL_OVER, "zero3", state)
    settings = settings_for(tmp_path / "run", strategy="zero3", offload=words, precision="bf16", export=True)
    (code, said), _ = run_ranks(2, listen, settings.to_json())
    assert code == 0
    told = " ".join(said.split())
    assert f"zero3 with {','.join(words)} -> zero3+params=disk+grads=host+optimizer=host:0.6 on 2 ranks" in told
    assert "updates by 1 core a rank" in told
    assert f"a rank in {state}, gone when the run ends" in told
    row = next(row for row in reversed(rows(tmp_path / "run")) if "loss" in row)
    assert 0 < row["memory_disk"] == row["memory_planned_disk"]
    assert 0 < row["memory_host"] == row["memory_planned_host"]
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    off_device = plan["strategies"][0]["off_device"]
    assert off_device["host_bytes"] == row["memory_planned_host"]
    assert off_device["disk_bytes"] == row["memory_planned_disk"]
    assert (off_device["folder"], off_device["cores"], off_device["pinned"]) == (str(state), 1, False)
    assert plan["strategies"][0]["host_bytes"] == 2 * row["memory_planned_host"]
    assert plan["strategies"][0]["disk_bytes"] == 2 * row["memory_planned_disk"]
    moved = json.loads((tmp_path / "run/traffic.json").read_text())
    assert moved["seen"] == moved["planned"]
    assert moved["moves"]["seen"] == moved["moves"]["planned"]
    assert set(moved["moves"]["seen"]) == {"read", "to_device", "to_host", "write"}


def test_spare_memory_is_planned(run_ranks: Pool, tmp_path: Path) -> None:
    """The planner and the engine take it for the same flats."""
    settings = settings_for(tmp_path / "run", strategy="zero2-offload", precision="bf16", speculation="1.5MB")
    assert train(run_ranks, 2, settings) == 0
    [row] = json.loads((tmp_path / "run/plan.json").read_text())["strategies"]
    assert 0 < row["off_device"]["spare_bytes"] <= 1.5e6
    assert row["spare_bytes"] == 2 * row["off_device"]["spare_bytes"]
    assert row["host_bytes"] == 2 * row["off_device"]["host_bytes"]
    assert row["unclipped_step_seconds"] <= row["step_seconds"]


@pytest.mark.slow
def test_without_clipping_the_host_updates_inside_the_backward(run_ranks: Pool, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"strategy": "zero2", "max_grad_norm": 0.0, "gradient_accumulation_steps": 2}
    assert train(run_ranks, 2, settings_for(tmp_path / "plain", **changes)) == 0
    settings = settings_for(tmp_path / "moved", **changes, offload=("optimizer=host",), eval_steps=2, save_steps=3)
    (code, said), _ = run_ranks(2, listen, settings.to_json())
    assert code == 0
    assert "inside the backward" in said
    assert [row["loss"] for row in rows(tmp_path / "moved") if "loss" in row] == losses(tmp_path / "plain")
    assert not any("grad_norm" in row for row in rows(tmp_path / "moved"))
    moved = json.loads((tmp_path / "moved/traffic.json").read_text())
    assert moved["seen"] == moved["planned"]
    # Loss scaling has to know whether a step overflowed, and on the device the norm costs nothing.
    for other in ({"precision": "fp16", "offload": ("optimizer=host",)}, {"precision": "fp32"}):
        folder = tmp_path / str(other["precision"])
        assert train(run_ranks, 2, settings_for(folder, **changes, **other)) == 0
        assert all("grad_norm" in row for row in rows(folder) if "loss" in row)


@pytest.mark.quick("lora")
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_model_with_weights_is_fine_tuned_from_disk_and_exported(run_ranks: Pool, tmp_path: Path, kind: str) -> None:
    llama = save_llama(tmp_path / "llama")
    changes: dict[str, Any] = {"model": str(llama), "shape": {}, "tokenizer": "bytes", "max_steps": 3, "export": True}
    if kind == "lora":
        changes |= {"lora": Lora(r=4, targets=("q_proj", "down_proj"))}
    assert train(run_ranks, 2, settings_for(tmp_path / "plain", strategy="zero3", **changes)) == 0
    words = folder_for((), "zero3-nvme", tmp_path / "state")
    assert train(run_ranks, 2, settings_for(tmp_path / "disk", strategy="zero3-nvme", offload=words, **changes)) == 0
    assert losses(tmp_path / "disk") == losses(tmp_path / "plain")
    weights = "adapter_model.safetensors" if kind == "lora" else "model.safetensors"
    plain, disk = ((tmp_path / name / "export" / weights).read_bytes() for name in ("plain", "disk"))
    assert plain == disk


# ---------------------------------------------------------------------------------------------------------
# saving


def test_what_rests_on_disk_is_not_saved_in_the_background(run_ranks: Pool, tmp_path: Path) -> None:
    words = folder_for((), "zero3-nvme", tmp_path / "state")
    settings = settings_for(tmp_path / "run", strategy="zero3-nvme", offload=words, async_save=True, save_steps=3)
    (code, said), _ = run_ranks(2, listen, settings.to_json())
    assert code == 0
    assert "not in the background: state that is offloaded to disk is read as it is written" in " ".join(said.split())
    assert len(saved_in(said)) == 2
    assert not any("in the background" in line for line in saved_in(said))


def how_saved(settings: str, free_bytes: int) -> tuple[bool, str]:
    mesh.init(device="cpu")
    asked = completed(settings_from_json(settings), has_gpu=False)
    model = run.set_up(asked, FailureContext()).model
    # One rank has less than the other.
    found = run_checkpoints.saves_of(engine_of(model), 2, True, free_bytes - mesh.everyone().index, mesh.hosts())
    return found.in_background, found.why_not


def test_beside_state_on_the_host_a_copy_is_made_if_it_fits(run_ranks: Pool, tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "run", strategy="zero3-offload")
    [(here, why_not), _] = run_ranks(2, how_saved, settings.to_json(), 1 << 30)
    assert (here, why_not) == (True, "")
    for here, why_not in run_ranks(2, how_saved, settings_for(tmp_path / "b", strategy="zero3-offload").to_json(), 1):
        assert not here
        assert why_not.endswith("does not fit into the 0 B that the host has left")
    plain = settings_for(tmp_path / "c", strategy="zero3").to_json()
    assert all(here for here, _ in run_ranks(2, how_saved, plain, 1)), "as ever where nothing rests on the host"


def listen_on_a_small_host(settings: str) -> tuple[int, str]:
    patch = pytest.MonkeyPatch()
    patch.setattr(run, "host_bytes_here", lambda: 0)
    try:
        return listen(settings)
    finally:
        patch.undo()


def test_a_host_without_room_for_a_copy_saves_in_the_foreground(run_ranks: Pool, tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "run", strategy="zero2-offload", async_save=True)
    (code, said), _ = run_ranks(2, listen_on_a_small_host, settings.to_json())
    assert code == 0
    assert "not in the background: a copy of" in " ".join(said.split())
    assert not any("in the background" in line for line in saved_in(said))


# ---------------------------------------------------------------------------------------------------------
# going on, and what is refused


@pytest.mark.slow
def test_a_run_goes_on_from_and_into_what_rests_elsewhere(run_ranks: Pool, tmp_path: Path) -> None:
    """Every leg is another layout; together they are the run that was never stopped."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    # The learning rate of a step depends on how many there are.
    constant = {"lr_scheduler_type": "constant"}
    assert train(run_ranks, 2, settings_for(whole, strategy="ddp", max_steps=5, **constant)) == 0
    state = folder_for((), "zero3-nvme", tmp_path / "state")
    legs: list[dict[str, Any]] = [
        {"strategy": "zero3-nvme", "offload": state},
        {"strategy": "zero2", "offload": ("optimizer=host:0.5", "activations=host")},
        {"strategy": "zero3"},
        {"strategy": "zero3", "offload": ("optimizer=host", "params=disk", *state)},
        {"strategy": "ddp", "offload": ("optimizer=host",)},
    ]
    for step, leg in enumerate(legs, start=1):
        more = {"resume_from_checkpoint": "latest"} if step > 1 else {}
        assert train(run_ranks, 2, settings_for(parts, max_steps=step, **leg, **more, **constant)) == 0
    assert losses(parts) == losses(whole), "bit for bit"


def test_a_folder_that_is_not_there_is_refused(run_ranks: Pool, tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "run", strategy="zero3-nvme", offload=(f"disk:{tmp_path}/missing",))
    for code, said in run_ranks(2, listen, settings.to_json()):
        assert code == 2
        assert f"offload: {tmp_path}/missing is not a folder" in said or not said
    assert not (tmp_path / "run").exists()
