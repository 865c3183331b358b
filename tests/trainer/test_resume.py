"""Going on from the newest checkpoint that is good, and from those of others."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.interop.dcp_write import write_dcp
from shardwise.checkpoint.opened import open_checkpoint
from tests.harness import Pool
from tests.support.running import losses, rows, save_llama, settings_for, train
from tests.trainer.test_beside import listen


def _flip(path: Path) -> None:
    """A byte of the last tensor of the last file: most is loaded by then."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped byte": (lambda path: _flip(path / "rank-00001.safetensors"), "are not those that were written"),
    "a short file": (lambda path: _cut(path / "rank-00000.safetensors"), "bytes long, and was written with"),
    "a missing file": (lambda path: (path / "rank-00001.safetensors").unlink(), "No such file"),
    "a changed index": (lambda path: _flip(path / "index.json"), "its digest differs"),
    "a changed marker": (lambda path: _flip(path / "complete"), "its digest differs"),
    "no marker": (lambda path: (path / "complete").unlink(), "its save did not finish"),
    "nothing": (lambda path: [file.unlink() for file in path.iterdir()], "is not a checkpoint"),  # type: ignore[return-value]
}


@pytest.fixture(scope="module")
def whole(run_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of nine steps that nobody has damaged, with all its checkpoints."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert train(run_ranks, 2, settings_for(folder, max_steps=9, save_steps=1)) == 0
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def checkpoint(run: Path, step: int) -> Path:
    return run / f"checkpoints/step-{step:06d}"


def go_on(run_ranks: Pool, run: Path, **changes: Any) -> tuple[int, str]:
    settings = settings_for(run, **{"max_steps": 9, "resume_from_checkpoint": "latest", **changes})
    told = run_ranks(2, listen, settings.to_json())
    assert told[0][0] == told[1][0]
    return told[0]  # type: ignore[no-any-return]


@pytest.mark.quick("auto")
@pytest.mark.parametrize("asked", ["latest", "auto", "the run's folder"])
def test_damaged_checkpoints_are_skipped_with_a_word(run_ranks: Pool, whole: Path, run: Path, asked: str) -> None:
    for step, (damage, _) in zip(range(9, 2, -1), DAMAGE.values(), strict=True):
        damage(checkpoint(run, step))
    code, said = go_on(run_ranks, run, resume_from_checkpoint=str(run) if asked == "the run's folder" else asked)
    assert code == 0
    skipped = [line for line in said.splitlines() if line.startswith("skipped ")]
    for line, step, (_, words) in zip(skipped, range(9, 2, -1), DAMAGE.values(), strict=True):
        assert f"step-{step:06d}" in line
        assert words in line
    assert "from step 2 on" in said
    assert losses(run) == losses(whole), "nothing of what broke off is left"
    left = {entry.name for entry in (run / "checkpoints-left-1").iterdir()}
    assert left == {f"step-{step:06d}" for step in range(3, 10)}
    assert (run / "checkpoints/latest").readlink() == Path("step-000009")


def test_a_save_that_did_not_finish_is_skipped_and_cleaned(run_ranks: Pool, whole: Path, run: Path) -> None:
    for step in (8, 9):
        path = checkpoint(run, step)
        path.rename(path.with_name(f"{path.name}.partial"))
    (run / "checkpoints/step-000009.partial/complete").unlink()
    code, said = go_on(run_ranks, run, async_save=True)
    assert code == 0
    assert "step-000009, which cannot be used" in said
    assert "from step 8 on" in said, "it was complete, and had only to be renamed"
    assert losses(run) == losses(whole)
    assert not (run / "checkpoints-left-1").exists()
    assert not list((run / "checkpoints").glob("*.*"))


def test_where_none_is_good_nothing_begins(run_ranks: Pool, run: Path) -> None:
    for step in range(1, 10):
        _cut(checkpoint(run, step) / "rank-00001.safetensors")
    before = sorted(run.rglob("*"))
    for asked in ("latest", "auto"):
        code, said = go_on(run_ranks, run, resume_from_checkpoint=asked)
        assert code == 5
        (line,) = [line for line in said.splitlines() if line.startswith("shardwise: ")]
        assert line.startswith("shardwise: no checkpoint of this run can be used: ")
        assert all(f"step-{step:06d}" in line for step in range(1, 10))
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_checkpoint_that_was_named_is_not_replaced_by_another(run_ranks: Pool, run: Path, kind: str) -> None:
    damage, words = DAMAGE[kind]
    damage(checkpoint(run, 9))
    code, said = go_on(run_ranks, run, max_steps=10, resume_from_checkpoint=str(checkpoint(run, 9)))
    assert code == 5
    assert words in said or kind == "nothing"
    assert "skipped" not in said
    assert (run / "checkpoints/step-000008/complete").exists()


def test_other_precisions_go_on_and_rounding_is_told(run_ranks: Pool, whole: Path, run: Path) -> None:
    code, said = go_on(run_ranks, run, max_steps=11, precision="pure-bf16")
    assert code == 0
    assert "weights are rounded to this run's precision: 'norm.weight' is F32 in it, BF16 in the model" in said
    code, said = go_on(run_ranks, run, max_steps=13, precision="fp32")
    assert code == 0
    assert "rounded" not in said
    assert losses(run)[:9] == losses(whole)
    assert losses(run)[12] == pytest.approx(losses(whole)[8], rel=0.2)


def as_if_saved_by_hand(path: Path, **extra: Any) -> None:
    index = json.loads((path / "index.json").read_text())
    index["extra"] = extra
    text = json.dumps(index)
    (path / "index.json").write_text(text)
    (path / "complete").write_text(hashlib.sha256(text.encode()).hexdigest())


def test_others_checkpoints_bring_weights_and_moments(run_ranks: Pool, run: Path, tmp_path: Path) -> None:
    """Of another program with other groups, and of a loop of one's own: the same from there on, from sample 0."""
    mine, theirs = tmp_path / "by-hand", tmp_path / "dcp"
    write_dcp(open_checkpoint(checkpoint(run, 9)), theirs)
    shutil.copytree(checkpoint(run, 9), mine)
    as_if_saved_by_hand(mine)
    found = {}
    for place in (mine, theirs):
        changes = {"max_steps": 3, "strategy": "zero3", "lr_scheduler_type": "constant"}
        folder = tmp_path / f"from-{place.name}"
        code, said = go_on(run_ranks, folder, resume_from_checkpoint=str(place), **changes)
        assert code == 0
        assert (
            f"{place} was not saved by shardwise train: training continues after step 0, with the data from its begin"
            in said
        )
        found[place] = losses(folder)
        extra = json.loads((folder / "checkpoints/step-000003/index.json").read_text())["extra"]
        assert extra["num_samples_seen"] == 24
    assert found[mine] == found[theirs]
    assert found[mine][0] < losses(run)[0] - 0.5


def test_a_step_that_a_checkpoint_names_counts(run_ranks: Pool, run: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint(run, 9), tmp_path / "mine")
    as_if_saved_by_hand(tmp_path / "mine", step=40)
    code, said = go_on(run_ranks, tmp_path / "new", max_steps=42, resume_from_checkpoint=str(tmp_path / "mine"))
    assert code == 0
    assert "training continues after step 40" in said
    assert [row["step"] for row in rows(tmp_path / "new") if "loss" in row] == [41, 42]


def test_an_extra_that_makes_no_sense_is_refused(run_ranks: Pool, run: Path) -> None:
    extra = json.loads((checkpoint(run, 9) / "index.json").read_text())["extra"]
    as_if_saved_by_hand(checkpoint(run, 9), **{**extra, "num_samples_seen": "many"})
    code, said = go_on(run_ranks, run)
    assert code == 5
    assert all(word in said for word in ("'num_samples_seen'", "'many'"))


def test_a_hugging_face_folder_brings_weights_alone(run_ranks: Pool, tmp_path: Path) -> None:
    llama = save_llama(tmp_path / "llama")
    changes = {"model": str(llama), "shape": {}, "tokenizer": "bytes", "max_steps": 2}
    code, said = go_on(run_ranks, tmp_path / "resumed", resume_from_checkpoint=str(llama), **changes)
    assert code == 0
    assert "holds no optimizer: its weights are used, and the optimizer begins anew" in said
    code, _ = go_on(run_ranks, tmp_path / "begun", resume_from_checkpoint=None, **changes)
    assert losses(tmp_path / "resumed") == losses(tmp_path / "begun")


def test_whole_rows_go_on_under_another_number_of_ranks(run_ranks: Pool, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text(
        "".join(json.dumps({"prompt": "q" * (n % 9), "completion": "a" * (1 + n % 23)}) + "\n" for n in range(90))
    )
    given = {
        "train_file": (str(chats),),
        "save_steps": 2,
        "eval_fraction": 0.1,
        "max_steps": 8,
        "lr_scheduler_type": "constant",
    }
    assert train(run_ranks, 2, settings_for(tmp_path / "two", **given)) == 0
    assert train(run_ranks, 1, settings_for(tmp_path / "one", **{**given, "max_steps": 3})) == 0
    resumed = settings_for(tmp_path / "one", **given, resume_from_checkpoint="latest")
    assert train(run_ranks, 2, resumed) == 0
    assert [row["tokens"] for row in rows(tmp_path / "one") if "loss" in row] == [
        row["tokens"] for row in rows(tmp_path / "two") if "loss" in row
    ]
    checkpoints = [open_checkpoint(tmp_path / run / "checkpoints/step-000008") for run in ("one", "two")]
    assert checkpoints[0].index.extra["num_samples_seen"] == checkpoints[1].index.extra["num_samples_seen"] == 64
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), abs=1e-5)
    changed = {**given, "packing": "padded", "max_steps": 9, "learning_rate": 0.1}
    code, said = go_on(run_ranks, tmp_path / "one", **changed)
    assert code == 0
    assert "the learning rate goes up, from 1.00e-02 at step 8 to" in said
    assert "(packing packed whole, now padded): it is read from its beginning" in said
