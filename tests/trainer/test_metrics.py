"""Rows that are logged are there: once for each step, readable by everybody, and on the writing rank alone."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardwise.api.memory_report import Memory
from shardwise.base.errors import ConfigurationError
from shardwise.core.schedule.state_bytes import StateBytes
from shardwise.trainer import checks
from shardwise.trainer.checks import check_all
from shardwise.trainer.metrics import Metrics, memory_row
from shardwise.trainer.settings import Settings


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def logged(folder: Path, steps: list[int], report_to: tuple[str, ...] = ()) -> Metrics:
    found = Metrics(folder, report_to, {"model": "tiny"}, is_writer=True)
    for step in steps:
        found.log({"step": step, "loss": 1.0 / step, "memory_now": 5})
    return found


def test_a_line_for_each_row_at_once(tmp_path: Path) -> None:
    found = logged(tmp_path, [1, 2])
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [(1, 1.0), (2, 0.5)]
    assert list(rows(tmp_path)[0]) == ["step", "time", "loss", "memory_now"]
    assert 0 <= rows(tmp_path)[1]["time"] - rows(tmp_path)[0]["time"] < 60
    found.log({"step": 3, "time": 5.0, "loss": 2.0})
    assert rows(tmp_path)[2] == {"step": 3, "time": 5.0, "loss": 2.0}


def test_what_is_not_a_number_is_null(tmp_path: Path) -> None:
    logged(tmp_path, []).log({"step": 1, "loss": math.nan, "grad_norm": math.inf, "mfu": None})
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert [rows(tmp_path)[0][name] for name in ("loss", "grad_norm", "mfu")] == [None, None, None]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    found = Metrics(tmp_path, ("tensorboard", "wandb"), {}, is_writer=False)
    found.truncate_after(0)
    found.log({"step": 1})
    found.close()
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_logs_each_step_once(tmp_path: Path) -> None:
    logged(tmp_path, [1, 2, 3, 4]).close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # a crash
    found = Metrics(tmp_path, (), {}, is_writer=True)
    found.truncate_after(2)
    found.log({"step": 3, "loss": 9.0})
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [(1, 1.0), (2, 0.5), (3, 9.0)]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics-left.jsonl", "metrics.jsonl"]


def test_a_fresh_folder_has_nothing_to_forget(tmp_path: Path) -> None:
    Metrics(tmp_path, (), {}, is_writer=True).truncate_after(7)
    assert not list(tmp_path.iterdir())


def test_a_reporter_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_all(Settings(report_to=("tensorboard", "wandb")), 1)
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    check_all(Settings(), 1)
    with pytest.raises(ConfigurationError, match=r"wandb is not installed; pip install 'shardwise\[wandb\]'"):
        check_all(Settings(report_to=("wandb",)), 1)
    with pytest.raises(ConfigurationError, match=r"torchao is not installed; pip install 'shardwise\[eight-bit\]'"):
        check_all(Settings(optimizer="adamw8bit"), 1)


def test_tensorboard_forgets_what_a_resumed_run_does_again(tmp_path: Path) -> None:
    logged(tmp_path, [1, 2, 3, 4], ("tensorboard",)).close()
    found = Metrics(tmp_path, ("tensorboard",), {}, is_writer=True)
    found.truncate_after(2)
    found.log({"step": 3, "loss": 9.0, "eval_loss": 2.0, "mfu": None})
    found.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {*events.Tags()["scalars"]} == {"train/loss", "memory/now", "eval/loss"}
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 0.5), (3, 9.0)]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    found = logged(tmp_path, [1, 2], ("wandb",))
    found.truncate_after(1)
    found.log({"step": 2, "loss": 3.0})
    found.close()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (kept,) = folder.glob("*.wandb")
    assert kept.stat().st_size > 0
    assert kept.stem == f"run-{(tmp_path / 'wandb-id.txt').read_text()}"
    assert [row["loss"] for row in rows(tmp_path)] == [1.0, 3.0]


def test_memory_is_flat_keys() -> None:
    on_cpu = Memory(
        params=1, grads=2, optimizer=3, buffers=4, activations=None, peak_grads=2, peak_buffers=7,
        peak_activations=None, now=5, peak=6, reserved=None, host=0, disk=0, planned=StateBytes(1, 2, 3),
        planned_buffers=4, planned_host=0, planned_disk=0,
    )  # fmt: skip
    assert memory_row(on_cpu) == {
        "memory_params": 1, "memory_grads": 2, "memory_optimizer": 3, "memory_buffers": 4, "memory_peak_grads": 2,
        "memory_peak_buffers": 7, "memory_now": 5, "memory_peak": 6, "memory_planned": 6,
    }  # fmt: skip
    off_device = {"host": 8, "disk": 10, "planned_host": 9, "planned_disk": 11}
    assert memory_row(replace(on_cpu, **off_device)) == {
        **memory_row(on_cpu), **{f"memory_{name}": value for name, value in off_device.items()}
    }  # fmt: skip
