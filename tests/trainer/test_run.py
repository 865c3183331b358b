"""Whole runs on real ranks: the same training from any split, and from any point where it was stopped."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.trainer.out_of_memory import FailureContext
from shardwise.trainer.run import run_rank
from shardwise.trainer.settings import Lora
from tests.harness import Pool
from tests.support.running import TINY, losses, rows, save_llama, settings_for, train
from tests.support.strategies import slow_but


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of very different lengths, of which only the answers are trained on."""
    file = tmp_path_factory.mktemp("data") / "questions.jsonl"
    texts = [("what is " + "x" * (7 * n % 23), "an answer, " * (1 + n % 5)) for n in range(60)]
    file.write_text("".join(json.dumps({"prompt": prompt, "completion": answer}) + "\n" for prompt, answer in texts))
    return file


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "llama")


# ---------------------------------------------------------------------------------------------------------
# any split


SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 x 8": (1, {}),
    "2 x 4": (2, {"strategy": "zero3"}),
    "4 x 2": (4, {"strategy": "hsdp", "node_size": 2}),
    "1 x 8, accumulated": (1, {"per_device_train_batch_size": 1}),
    "2 x 4, accumulated": (2, {"strategy": "zero2", "gradient_accumulation_steps": 2}),
    "4 x 2, accumulated": (4, {"strategy": "zero1", "per_device_train_batch_size": 1}),
}


@pytest.mark.slow
def test_any_split_of_the_global_batch_gives_the_same_losses(run_ranks: Pool, questions: Path, tmp_path: Path) -> None:
    """Micro-batches hold very different numbers of targets, some none at all."""
    found = {}
    for name, (num_ranks, changes) in SPLITS.items():
        folder = tmp_path / name
        changes = {**changes, "train_file": (str(questions),), "packing": "padded", "eval_fraction": 0.1}
        assert train(run_ranks, num_ranks, settings_for(folder, **changes)) == 0
        found[name] = [*losses(folder), rows(folder)[-1]["eval_loss"]]
    expected = found["1 x 8"]
    assert expected[5] < expected[0]
    for name, seen in found.items():
        assert seen == pytest.approx(expected, rel=1e-5), name


# ---------------------------------------------------------------------------------------------------------
# any stop


def stop_at(run_ranks: Pool, num_ranks: int, step: int, folder: Path, **changes: Any) -> None:
    """A run of all its steps that has saved after `step` of them and was then lost."""
    assert train(run_ranks, num_ranks, settings_for(folder, save_steps=step, **changes)) == 0
    for later in (folder / "checkpoints").glob("step-*"):
        if later.name != f"step-{step:06d}":
            (later / "complete").unlink()


@pytest.mark.parametrize("kind", slow_but(["in-tree"], ["in-tree", "full", "lora"]))
def test_a_run_goes_on_with_other_ranks_under_another_strategy(
    run_ranks: Pool, llama: Path, tmp_path: Path, kind: str
) -> None:
    changes: dict[str, Any] = {"eval_fraction": 0.01}
    if kind != "in-tree":
        changes |= {"model": str(llama), "shape": {}, "tokenizer": "bytes"}
    if kind == "lora":
        changes |= {"lora": Lora(r=4, targets=("q_proj", "v_proj", "down_proj"))}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(run_ranks, 2, settings_for(whole, strategy="ddp", **changes)) == 0
    stop_at(run_ranks, 2, 2, parts, strategy="zero3", **changes)
    again = settings_for(parts, resume_from_checkpoint="latest", strategy="zero1", export=True, **changes)
    assert train(run_ranks, 4, again) == 0
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)
    written = {path.name for path in (parts / "export").iterdir()}
    assert {"in-tree": "model.safetensors", "full": "config.json", "lora": "adapter_model.safetensors"}[kind] in written


def run_without_compiler(settings: str) -> int:
    """torchao compiles its updates, which takes longer than all the rest."""
    with torch.compiler.set_stance("force_eager"):
        return run_rank(settings)


@pytest.mark.slow
def test_eight_bit_moments_go_on_too(run_ranks: Pool, tmp_path: Path) -> None:
    """The shape is large enough for 8 bits. Blocks of another layout begin elsewhere, so moments are rounded anew."""
    changes: dict[str, Any] = {"optimizer": "adamw8bit", "shape": {**TINY, "hidden": 128}, "save_steps": 3}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert set(run_ranks(2, run_without_compiler, settings_for(whole, **changes).to_json())) == {0}
    checkpoint = str(whole / "checkpoints/step-000003")
    again = settings_for(parts, resume_from_checkpoint=checkpoint, strategy="zero3", **changes)
    assert set(run_ranks(2, run_without_compiler, again.to_json())) == {0}
    assert [row["loss"] for row in rows(parts) if "loss" in row] == pytest.approx(losses(whole)[3:], rel=2e-3)
    assert losses(whole)[-1] < losses(whole)[0] - 0.5


def test_samples_and_batches_may_change_on_the_way(run_ranks: Pool, tmp_path: Path) -> None:
    """Another global batch goes on where the samples were left; other data begins at its beginning."""
    folder = tmp_path / "run"
    stop_at(run_ranks, 2, 3, folder)
    again = settings_for(folder, resume_from_checkpoint="latest", global_batch_size=4)
    assert train(run_ranks, 2, again) == 0
    state = json.loads((folder / "checkpoints/step-000006/index.json").read_text())
    assert state["extra"]["num_samples_seen"] == 3 * 8 + 3 * 4


def test_going_on_from_an_older_checkpoint_leaves_the_other_branch(run_ranks: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert train(run_ranks, 2, settings_for(folder, save_steps=2)) == 0
    older = str(folder / "checkpoints/step-000002")
    again = settings_for(folder, resume_from_checkpoint=older, max_steps=3, save_total_limit=1)
    assert train(run_ranks, 2, again) == 0
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == ["step-000003"]
    left = sorted(path.name for path in (folder / "checkpoints-left-1").iterdir())
    assert left == ["step-000004", "step-000006"]
    assert len(losses(folder)) == 3


def hyper_parameters(settings: str) -> list[dict[str, Any]]:
    from shardwise.core import mesh
    from shardwise.core.optim.groups import plain_settings
    from shardwise.trainer.checks import completed
    from shardwise.trainer.run import set_up
    from shardwise.trainer.settings import settings_from_json

    mesh.init(device="cpu")
    asked = completed(settings_from_json(settings), has_gpu=False)
    return plain_settings(set_up(asked, FailureContext()).optimizer)


def test_hyper_parameters_are_those_asked_for_now(run_ranks: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert train(run_ranks, 2, settings_for(folder)) == 0
    changes = {"weight_decay": 0.7, "adam_beta2": 0.5, "adam_epsilon": 1e-3}
    again = settings_for(folder, resume_from_checkpoint="latest", max_steps=8, **changes)
    for group in run_ranks(2, hyper_parameters, again.to_json())[0]:
        assert group["betas"] == (0.9, 0.5)
        assert group["eps"] == 1e-3
        assert group["weight_decay"] in (0.7, 0.0)


def test_a_global_batch_that_nobody_named_does_not_change_with_the_ranks(run_ranks: Pool, tmp_path: Path) -> None:
    changes = {"global_batch_size": None, "per_device_train_batch_size": 4}
    folder = tmp_path / "run"
    assert train(run_ranks, 2, settings_for(folder, **changes)) == 0
    again = settings_for(folder, resume_from_checkpoint="latest", max_steps=8, **changes)
    assert train(run_ranks, 4, again) == 2
    assert json.loads((folder / "config.json").read_text())["max_steps"] == 6, "the folder is as it was"


# ---------------------------------------------------------------------------------------------------------
# what is asked between steps


@pytest.mark.parametrize(("file", "code", "num_saved"), [("STOP", 130, 1), ("SAVE", 0, 2)])
def test_files_in_the_run_folder_are_requests(
    run_ranks: Pool, tmp_path: Path, file: str, code: int, num_saved: int
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / file).touch()
    settings = settings_for(folder)
    assert set(run_ranks(2, run_and_forget, settings.to_json())) == {code}
    assert not (folder / file).exists()
    assert len(list((folder / "checkpoints").glob("step-*"))) == num_saved


def run_and_forget(settings: str) -> int:
    """The ranks are used again, and a request to stop stays with a process."""
    from shardwise.trainer import signals

    try:
        return run_rank(settings)
    finally:
        signals._received.stop = None


def test_saving_keeps_the_last_ones_only(run_ranks: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert train(run_ranks, 2, settings_for(folder, save_steps=1, save_total_limit=2)) == 0
    assert sorted(path.name for path in (folder / "checkpoints").glob("step-*")) == ["step-000005", "step-000006"]


def test_evaluation_every_so_many_steps(run_ranks: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = settings_for(folder, eval_steps=2, save_steps=1 / 3, max_eval_samples=11)  # a third of six steps
    assert train(run_ranks, 2, settings) == 0
    assert len(list((folder / "checkpoints").glob("step-*"))) == 3
    found = [row for row in rows(folder) if "eval_loss" in row]
    assert [row["step"] for row in found] == [2, 4, 6]
    assert all(row["eval_perplexity"] == pytest.approx(math.exp(row["eval_loss"])) for row in found)
    assert found[-1]["eval_loss"] < found[0]["eval_loss"]


# ---------------------------------------------------------------------------------------------------------
# what a run says


def test_a_row_tells_of_speed_and_memory(run_ranks: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert train(run_ranks, 2, settings_for(folder, strategy="zero3")) == 0
    row = rows(folder)[3]
    keys = {"step", "time", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_s", "memory_params",
            "memory_grads", "memory_optimizer", "memory_buffers", "memory_now", "memory_peak"}  # fmt: skip
    assert keys <= set(row)
    assert row["tokens"] == 4 * 8 * 32


@pytest.mark.quick("fp16")
@pytest.mark.parametrize("precision", ["bf16", "fp16", "pure-bf16"])
def test_other_precisions_learn_too(run_ranks: Pool, tmp_path: Path, precision: str) -> None:
    folder = tmp_path / "run"
    assert train(run_ranks, 2, settings_for(folder, precision=precision, strategy="zero2")) == 0
    assert losses(folder)[-1] < losses(folder)[0] - 0.5


@pytest.mark.parametrize("changes", [{"optimizer": "sgd", "learning_rate": 0.3}, {"seed": 2**62 + 1}])
def test_other_ways_to_train(run_ranks: Pool, tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = tmp_path / "run"
    assert train(run_ranks, 2, settings_for(folder, **changes)) == 0
    assert losses(folder)[-1] < losses(folder)[0] - 0.1


@pytest.mark.slow
def test_checkpointing_changes_no_loss(run_ranks: Pool, tmp_path: Path) -> None:
    found = []
    for mode in ("none", "selective", "full"):
        assert train(run_ranks, 2, settings_for(tmp_path / mode, gradient_checkpointing=mode)) == 0
        found.append(losses(tmp_path / mode))
    assert found[0] == found[1] == found[2]


def test_a_trace_of_three_steps(run_ranks: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert train(run_ranks, 2, settings_for(folder, profile=True, strategy="zero3")) == 0
    assert (folder / "trace-rank-0.json.gz").stat().st_size > 1000


# ---------------------------------------------------------------------------------------------------------
# what goes wrong


def test_a_run_that_diverges_leaves_what_is_needed_to_look_into_it(run_ranks: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = settings_for(folder, learning_rate=1e30, max_grad_norm=0, warmup_steps=2, max_steps=12, save_steps=1)
    assert train(run_ranks, 2, settings) == 4
    report = json.loads((folder / "diverged/report.json").read_text())
    assert "nan" in report["complaint"]
    assert report["parameters_not_finite"]
    assert report["last_steps"][-1]["step"] == 2
    assert len(report["samples"]) == 8
    assert (folder / "diverged/checkpoint/complete").exists()
    again = settings_for(tmp_path / "again", resume_from_checkpoint=str(folder / "diverged/checkpoint"), max_steps=12)
    assert train(run_ranks, 2, again) == 4, "it can be looked into from there"
    assert (folder / "checkpoints/step-000001/complete").exists()


@pytest.mark.parametrize("changes", [{"seq_length": 65}, {"lora": Lora(targets=("nowhere",))}])
def test_what_one_rank_refuses_all_refuse(run_ranks: Pool, tmp_path: Path, changes: dict[str, Any]) -> None:
    settings = settings_for(tmp_path / "run", **changes)
    assert train(run_ranks, 2, settings) == 2
    assert not (tmp_path / "run/config.json").exists(), "the folder is still free"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda s: {"shape": {**s.shape, "layers": 3}}, 5),
        (lambda s: {"optimizer": "sgd"}, 5),
    ],
)
def test_a_checkpoint_of_something_else_is_unusable(
    run_ranks: Pool, tmp_path: Path, change: Callable[[Any], dict[str, Any]], code: int
) -> None:
    folder = tmp_path / "run"
    assert train(run_ranks, 2, settings_for(folder)) == 0
    changes = change(settings_for(folder))
    again = settings_for(folder, resume_from_checkpoint="latest", max_steps=8, **changes)
    assert train(run_ranks, 2, again) == code
    assert (folder / "checkpoints/step-000006/complete").exists()
