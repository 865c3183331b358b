"""The best evaluation of a run: early stopping, its checkpoint, and its weights at the end."""

import json
import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

from shardwise.base.errors import ConfigurationError
from shardwise.checkpoint.folder import complete_steps
from shardwise.trainer import settings as module
from shardwise.trainer.checks import check_evaluations
from shardwise.trainer.metrics import Evaluations, best_or_newest
from shardwise.trainer.models.restore import find_restorable
from shardwise.trainer.settings import Settings
from tests.harness import Pool
from tests.support.running import rows, settings_for, train


def evaluated(folder: Path) -> dict[int, float]:
    return {row["step"]: row["eval_loss"] for row in rows(folder) if "eval_loss" in row}


def test_patience_counts_as_transformers_does() -> None:
    """The best value is that of any improvement; only one above the threshold begins the count anew."""
    settings = Settings(early_stopping_patience=3, early_stopping_threshold=0.5, eval_steps=1)
    found = Evaluations(settings)
    seen = []
    for step, value in enumerate([3.0, 2.75, 2.5, math.nan, 1.5, 1.5, 9.0, 1.25], 1):
        is_best = found.add({"step": step, "eval_loss": None if math.isnan(value) else value})
        seen.append((is_best, found.num_worse, found.step))
    assert seen == [
        (True, 0, 1), (True, 1, 2), (True, 2, 3), (False, 3, 3),
        (True, 0, 5), (False, 1, 5), (False, 2, 5), (True, 3, 8),
    ]  # fmt: skip
    assert found.is_exhausted()
    assert not found.add({"step": 8, "eval_loss": 0.0}), "each step counts once"
    assert not found.add({"step": 9, "loss": 0.0}), "no evaluation"


def test_of_a_metric_such_as_an_accuracy_more_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Metric", Literal["eval_accuracy"])
    found = Evaluations(Settings(metric_for_best_model="accuracy", greater_is_better=True))
    assert [found.add({"step": step, "eval_accuracy": value}) for step, value in ((1, 0.5), (2, 0.4), (3, 0.6))] == [
        True, False, True,
    ]  # fmt: skip
    assert str(found) == "eval_accuracy 0.6000 at step 3"
    with pytest.raises(ConfigurationError, match="more eval_accuracy is better"):
        check_evaluations(Settings(metric_for_best_model="eval_accuracy", greater_is_better=False))


def test_a_killed_run_stops_early_at_the_same_step_under_another_strategy(run_ranks: Pool, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"eval_steps": 1, "early_stopping_patience": 2, "early_stopping_threshold": 5.0}
    changes |= {"max_eval_samples": 8, "max_steps": 9}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(run_ranks, 2, settings_for(whole, strategy="ddp", **changes)) == 0
    assert list(evaluated(whole)) == [1, 2, 3]
    assert complete_steps(whole / "checkpoints") == [3]
    # As if it had been killed between the save and the evaluation of step 2.
    assert train(run_ranks, 2, settings_for(parts, strategy="zero3", save_steps=2, **changes)) == 0
    (parts / "checkpoints/step-000003/complete").unlink()
    kept = [row for row in rows(parts) if row["step"] == 1 or (row["step"] == 2 and "loss" in row)]
    (parts / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    again = settings_for(parts, strategy="zero1", resume_from_checkpoint="auto", **changes)
    assert train(run_ranks, 2, again) == 0
    assert evaluated(parts) == pytest.approx(evaluated(whole), rel=1e-5)
    assert train(run_ranks, 2, again) == 0, "started once more, it has nothing left to do"
    assert complete_steps(parts / "checkpoints") == [2, 3]


def test_the_best_weights_are_never_removed_and_are_those_at_the_end(run_ranks: Pool, tmp_path: Path) -> None:
    few, other = tmp_path / "few.txt", tmp_path / "other.txt"
    few.write_text("abcdefgh" * 200)
    other.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    folder = tmp_path / "run"
    changes: dict[str, Any] = {"train_file": (str(few),), "eval_file": (str(other),), "save_total_limit": 1}
    changes |= {"eval_steps": 2, "load_best_model_at_end": True, "learning_rate": 3e-2, "export": True}
    assert train(run_ranks, 2, settings_for(folder, strategy="zero3", max_steps=6, async_save=True, **changes)) == 0
    more = settings_for(folder, strategy="ddp", max_steps=10, resume_from_checkpoint="latest", **changes)
    assert train(run_ranks, 2, more) == 0
    seen = evaluated(folder)
    best = min(seen, key=seen.__getitem__)
    assert list(seen) == [2, 4, 6, 8, 10]
    assert best < 6
    assert complete_steps(folder / "checkpoints") == [best, 10]
    place = folder / f"checkpoints/step-{best:06}"
    assert best_or_newest(folder) == place
    assert find_restorable(folder) == folder / "export"
    saved = {name: value for file in place.glob("*.safetensors") for name, value in load_file(file).items()}
    exported = load_file(folder / "export/model.safetensors")
    norm = exported["model.norm.weight"]
    assert any(value.numel() == norm.numel() and torch.equal(value.view(-1), norm) for value in saved.values())


def test_only_evaluations_with_a_checkpoint_can_be_loaded(tmp_path: Path) -> None:
    """As in a run that was resumed with load_best_model_at_end, or whose checkpoints were removed by hand."""
    found = [{"step": step, "eval_loss": value} for step, value in ((2, 1.0), (4, 2.0), (6, 3.0), (8, None))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found) + '{"step": 9, "eval_lo')
    for step in (4, 6, 8):
        (tmp_path / f"checkpoints/step-{step:06}").mkdir(parents=True)
        (tmp_path / f"checkpoints/step-{step:06}/complete").touch()
    for is_wanted, best in ((True, 4), (False, 8)):
        (tmp_path / "config.json").write_text(json.dumps({"load_best_model_at_end": is_wanted}))
        assert best_or_newest(tmp_path) == tmp_path / f"checkpoints/step-{best:06}"
    counted = Evaluations.of(Settings(), tmp_path)
    assert (counted.step, counted.last_step, counted.num_worse) == (2, 8, 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"early_stopping_patience": 3}, "patience 3, but eval_steps is 0 .*it needs evaluations"),
        ({"load_best_model_at_end": True, "eval_steps": 2, "eval_fraction": 0}, "eval_fraction 0: .*or eval_file"),
        ({"eval_prompts": "a.txt", "eval_fraction": 0}, "eval_prompts a.txt, but .*eval_fraction 0"),
        ({"eval_prompts": "a.txt", "sample_tokens": 0}, "sample_tokens 0: give at least 1 token"),
        ({"metric_for_best_model": "loss", "greater_is_better": True}, "less eval_loss is better"),
    ],
)
def test_wrong_requests_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check_evaluations(Settings(**changes))


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="unknown 'eval_los'; did you mean 'eval_loss'"):
        Settings(metric_for_best_model="eval_los")


def test_the_metric_may_be_written_as_in_transformers() -> None:
    settings = Settings(metric_for_best_model="perplexity", greater_is_better=False)
    assert settings.best_metric == "eval_perplexity"
    assert json.loads(settings.to_json())["metric_for_best_model"] == "perplexity"
