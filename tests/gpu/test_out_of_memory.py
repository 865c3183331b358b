"""On a GPU: a real lack of memory, in steps and in the set-up, explained against the plan."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.trainer.run import run_rank
from shardwise.trainer.settings import Settings
from tests.harness import Pool

pytestmark = pytest.mark.gpu

SHAPE = {"hidden": 2048, "layers": 8, "heads": 16, "kv_heads": 16, "ffn": 8192, "max_seq": 2048, "vocab": 32000}
MB = 10**6


def settings_for(folder: Path, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "shape": SHAPE,
        "seq_length": 2048,
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "logging_steps": 1,
        "eval_fraction": 0.0,
        "sample_tokens": 0,
        "export": False,
        "device": "cuda",
        "strategy": "ddp",
        "output_dir": str(folder),
    }
    return Settings(**{**values, **changes})


def run_within(settings: Settings, limit_bytes: int | None) -> int:
    """In a rank of its own: its allocator may have so much."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if limit_bytes is None else limit_bytes / total)
    try:
        return run_rank(settings.to_json())
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture(scope="module")
def plan(run_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of the run with all the memory there is."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_ranks(1, run_within, settings_for(folder), None) == [0]
    [found] = json.loads((folder / "plan.json").read_text())["strategies"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    peak = max(row["memory_peak"] for row in rows if "memory_peak" in row)
    assert peak == pytest.approx(found["per_gpu_bytes"]["peak_active"], rel=0.02)
    assert rows[-1]["memory_planned"] == found["per_gpu_bytes"]["peak_active"]
    strategy: dict[str, Any] = found
    return strategy


@pytest.mark.parametrize("share", [0.95, 0.8, 0.6])
def test_a_real_one_is_explained(run_ranks: Pool, tmp_path: Path, plan: dict[str, Any], share: float) -> None:
    limit = round(plan["per_gpu_bytes"]["peak_active"] * share)
    assert run_ranks(1, run_within, settings_for(tmp_path), limit) == [3]
    report = json.loads((tmp_path / "oom-rank0.json").read_text())
    print(report["text"])
    assert report["asked_bytes"] > 0
    assert report["pool"]["limit"] <= limit + MB
    assert report["instant"].partition(" ")[0] in ("forward", "backward", "reduce")
    state = sum(report["seen"][name] for name in ("params", "grads", "optimizer"))
    larger = "activations" if report["seen"]["activations"] >= state else "the state"
    assert report["blame"].startswith(f"{larger}: ")
    # What was there, and what was asked for, is not more than what was planned for this instant.
    seen, planned = sum(report["seen"].values()), sum(report["planned"].values())
    assert seen <= 1.02 * planned
    assert report["seen"]["params"] == report["planned"]["params"]
    assert all(block["name"] for block in report["largest"])
    assert any(fix["words"] == "--gradient-checkpointing full" and fix["saved_bytes"] > 0 for fix in report["fixes"])


def test_what_is_said_to_fit_does(run_ranks: Pool, tmp_path: Path, plan: dict[str, Any]) -> None:
    limit = round(plan["per_gpu_bytes"]["peak_active"] * 0.8)
    assert run_ranks(1, run_within, settings_for(tmp_path / "first"), limit) == [3]
    report = json.loads((tmp_path / "first" / "oom-rank0.json").read_text())
    fitting = {fix["words"] for fix in report["fixes"] if fix["fits"]}
    changes: dict[str, dict[str, Any]] = {
        "--gradient-checkpointing full": {"gradient_checkpointing": "full"},
        "--gradient-checkpointing selective": {"gradient_checkpointing": "selective"},
        "--per-device-train-batch-size 2 --gradient-accumulation-steps 2": {
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
        },
    }
    assert fitting & set(changes)
    for index, words in enumerate(sorted(fitting & set(changes))):
        folder = tmp_path / str(index)
        assert run_ranks(1, run_within, settings_for(folder, **changes[words]), limit) == [0], words


def test_the_set_up_is_explained_too(run_ranks: Pool, tmp_path: Path, plan: dict[str, Any]) -> None:
    limit = plan["per_gpu_bytes"]["params"] // 2
    assert run_ranks(1, run_within, settings_for(tmp_path), limit) == [3]
    report = json.loads((tmp_path / "oom-rank0.json").read_text())
    print(report["text"])
    assert report["instant"] == "the set-up"
    assert report["blame"].startswith("the state: ")
