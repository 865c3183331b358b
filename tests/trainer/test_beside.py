"""What a run does beside its steps: it saves, now or in the background, and what it says of that is true."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint import saving as save
from shardwise.checkpoint.folder import complete_steps, latest
from shardwise.trainer import run_checkpoints
from shardwise.trainer.run import run_rank
from tests.harness import Pool
from tests.support.running import losses, rows, settings_for, train
from tests.trainer.test_run import run_and_forget


def listen(settings: str) -> tuple[int, str]:
    """The exit code, and what was said."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = run_and_forget(settings)
    return code, said.getvalue()


def saved_in(said: str) -> list[str]:
    return [line.split("/")[-1] for line in said.splitlines() if line.startswith("saved ")]


def test_saving_in_the_background_changes_nothing_but_the_time(run_ranks: Pool, tmp_path: Path) -> None:
    for name in ("now", "beside"):
        settings = settings_for(tmp_path / name, save_steps=2, save_total_limit=2, async_save=name == "beside")
        (code, said), (_, other) = run_ranks(2, listen, settings.to_json())
        assert code == 0
        assert len(saved_in(said)) == 3
        assert not saved_in(other), "the first rank speaks"
    assert "in the background from a copy of" in said
    assert all(line.endswith(" s, in the background") for line in saved_in(said))
    assert losses(tmp_path / "beside") == losses(tmp_path / "now")
    for name in ("now", "beside"):
        root = tmp_path / name / "checkpoints"
        assert {entry.name for entry in root.iterdir()} == {"step-000004", "step-000006", "latest"}
        assert (root / "latest").readlink() == Path("step-000006")
        row = rows(tmp_path / name)[-2]
        assert row["step"] == 6
        assert {"loss", "grad_norm", "memory_params"} <= set(row)


def test_a_stop_waits_for_its_save(run_ranks: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "STOP").touch()
    settings = settings_for(folder, async_save=True)
    ((code, said), _) = run_ranks(2, listen, settings.to_json())
    assert code == 130
    (saved,) = saved_in(said)
    assert latest(folder / "checkpoints") == folder / "checkpoints" / saved.split()[0]
    again = settings_for(folder, async_save=True, resume_from_checkpoint="latest")
    assert train(run_ranks, 2, again) == 0
    assert len(losses(folder)) == 6


def watch_what_is_complete(settings: str, root: str) -> list[list[int]]:
    """The complete checkpoints, whenever one is written."""
    seen, write = [], save._write_own_file

    def look_and_write(*args: Any) -> Any:
        seen.append(complete_steps(Path(root)))
        return write(*args)

    save._write_own_file = look_and_write
    try:
        assert run_rank(settings) == 0
    finally:
        save._write_own_file = write
    return seen


@pytest.mark.parametrize("is_beside", [False, True])
def test_older_ones_go_when_the_new_one_is_complete(run_ranks: Pool, tmp_path: Path, is_beside: bool) -> None:
    settings = settings_for(tmp_path / "run", save_steps=1, save_total_limit=1, async_save=is_beside)
    for seen in run_ranks(2, watch_what_is_complete, settings.to_json(), str(tmp_path / "run/checkpoints")):
        assert seen == [[], [1], [2], [3], [4], [5]]


def fail_once(settings: str) -> None:
    """The third save finds a full disk, on one rank."""
    write, num_left = save._write_own_file, [3]

    def write_or_fail(*args: Any) -> Any:
        num_left[0] -= 1
        if num_left[0] == 0 and dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return write(*args)

    save._write_own_file = write_or_fail
    try:
        run_rank(settings)
    finally:
        save._write_own_file = write


@pytest.mark.parametrize("is_beside", [False, True])
def test_a_save_that_fails_ends_the_run_on_every_rank(run_ranks: Pool, tmp_path: Path, is_beside: bool) -> None:
    """With exit code 1, which is what a SaveError has: another start may do."""
    folder = tmp_path / "run"
    settings = settings_for(folder, save_steps=2, max_steps=40, save_total_limit=1, async_save=is_beside)
    told = run_ranks.errors(2, fail_once, settings.to_json())
    assert told[0] == told[1]
    assert str(told[0]).startswith(
        f"SaveError: rank 1: OSError: [Errno 28] No space left on device; see to it that {folder}"
    )
    assert {entry.name for entry in (folder / "checkpoints").iterdir()} == {"step-000004", "latest"}
    again = settings_for(folder, max_steps=8, resume_from_checkpoint="latest", async_save=is_beside)
    assert train(run_ranks, 2, again) == 0
    assert len(losses(folder)) == 8


def test_what_a_checkpoint_says_of_its_run(run_ranks: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = settings_for(folder, save_steps=3, seed=11, packing="packed")
    assert train(run_ranks, 2, settings) == 0
    extra = json.loads((folder / "checkpoints/step-000003/index.json").read_text())["extra"]
    assert (extra["step"], extra["num_samples_seen"], extra["num_tokens_seen"]) == (3, 24, 3 * 8 * 32)
    assert extra["num_tokens_seen"] == rows(folder)[2]["tokens"]
    assert extra["rng"]["seed"] == 11
    assert "the step and the rank" in extra["rng"]["policy"]
    assert extra["data"]["seq_length"] == 32
    assert len(extra["data"]["digest"]) >= 16
    resolved = json.loads((folder / "config.json").read_text())
    differ = {key for key, value in extra["configuration"].items() if resolved[key] != value}
    assert differ == {"output_dir"}


def listen_where_nothing_can_be_removed(settings: str) -> tuple[int, str]:
    remove = folders.remove

    def refuse(folder: Path) -> None:
        if folder.exists():
            raise PermissionError(1, "Operation not permitted", str(folder))

    folders.remove = refuse
    try:
        return listen(settings)
    finally:
        folders.remove = remove


def test_older_checkpoints_that_cannot_be_removed_do_not_end_a_run(run_ranks: Pool, tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "run", save_steps=3, save_total_limit=1)
    ((code, said), _) = run_ranks(2, listen_where_nothing_can_be_removed, settings.to_json())
    assert code == 0
    assert "older checkpoints cannot be removed: [Errno 1] Operation not permitted" in said
    assert complete_steps(tmp_path / "run/checkpoints") == [3, 6]


def listen_on_a_small_disk(settings: str, free_bytes: int) -> tuple[int, str]:
    patch = pytest.MonkeyPatch()
    patch.setattr(run_checkpoints, "free_bytes_on", lambda _: free_bytes)
    try:
        return listen(settings)
    finally:
        patch.undo()


def test_a_disk_without_room_for_a_checkpoint_is_refused_before_the_first_step(run_ranks: Pool, tmp_path: Path) -> None:
    (code, error), _ = run_ranks(2, listen_on_a_small_disk, settings_for(tmp_path / "a").to_json(), 100_000)
    assert code == 2
    assert "a checkpoint takes" in error
    assert "but its disk has 100 kB free" in error
    assert not (tmp_path / "a/config.json").exists(), "the folder is not taken"
    one = settings_for(tmp_path / "b", max_steps=3).to_json()
    code, said = run_ranks(2, listen_on_a_small_disk, one, 500_000)[0]
    assert (code, "checkpoints at once take" in said) == (0, False)
    three = settings_for(tmp_path / "c", max_steps=3, save_steps=1, save_total_limit=1).to_json()
    code, said = run_ranks(2, listen_on_a_small_disk, three, 500_000)[0]
    assert code == 0
    assert "has 500 kB free, and 2 checkpoints at once take" in said
