"""Texts that a run generates at each evaluation."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.errors import ConfigurationError
from shardwise.report.run import read_run, text
from shardwise.trainer.checks import prompts_in
from tests.harness import Pool
from tests.support.running import rows, settings_for, train


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def numbers(folder: Path) -> list[tuple[Any, ...]]:
    return [tuple(row.get(key) for key in ("step", "loss", "grad_norm", "eval_loss")) for row in rows(folder)]


def test_samples_change_no_loss_and_a_resumed_run_writes_the_same(run_ranks: Pool, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("The with statement\n\nclass \n")
    changes: dict[str, Any] = {"eval_steps": 2, "max_eval_samples": 8, "strategy": "zero3"}
    without, whole, parts = tmp_path / "without", tmp_path / "whole", tmp_path / "parts"
    assert train(run_ranks, 2, settings_for(without, **changes)) == 0
    changes |= {"eval_prompts": str(file), "sample_tokens": 8}
    assert train(run_ranks, 2, settings_for(whole, **changes)) == 0
    assert numbers(whole) == numbers(without), "bit for bit"
    assert [(row["step"], row["prompt"]) for row in samples(whole)] == [
        (step, prompt) for step in (2, 4, 6) for prompt in ("The with statement", "class")
    ]
    assert all(row["text"] for row in samples(whole))
    assert train(run_ranks, 2, settings_for(parts, save_steps=3, **changes)) == 0
    (parts / "checkpoints/step-000006/complete").unlink()
    again = settings_for(parts, resume_from_checkpoint="latest", **changes)
    assert train(run_ranks, 2, again) == 0
    assert samples(parts) == samples(whole)
    shown = text(read_run(whole)[0])
    assert "generated at step 6" in shown
    assert "The with statement -> " in shown


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "\n \n", "has 0 prompts; give 1 to 100"),
        ("a.txt", "a\n" * 101, "has 101 prompts"),
        ("a.txt", None, "cannot be read: No such file"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, name: str, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigurationError, match=words):
        prompts_in(str(tmp_path / name))
