"""A run's checkpoints on disk: which are complete, which is the newest, which go; and that one is always there."""

from pathlib import Path

import pytest

from shardwise.checkpoint import folder
from shardwise.errors import CheckpointError


def write(path: Path, text: str = "{}") -> None:
    (folder.begin(path) / folder.rank_file(0)).write_bytes(b"tensors")
    folder.complete(path, text)


def names(root: Path) -> set[str]:
    return {entry.name for entry in root.iterdir()}


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    assert folder.latest(tmp_path / "nothing") is None
    for step in (5, 100, 20):
        write(folder.step_folder(tmp_path, step))
    write(folder.step_folder(tmp_path, 1_000_000))
    folder.begin(folder.step_folder(tmp_path, 200))
    (tmp_path / "step-000300").mkdir()
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-000400").write_text("a file")
    assert folder.complete_steps(tmp_path) == [5, 20, 100, 1_000_000]
    assert folder.latest(tmp_path) == tmp_path / "step-1000000"
    assert folder.step_folder(tmp_path, 100) == tmp_path / "step-000100"


def test_a_branch_that_is_left_is_out_of_the_way(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        write(folder.step_folder(root, step))
    assert folder.set_aside(root, 3) is None
    assert folder.set_aside(root, 2) == tmp_path / "checkpoints-left-1"
    assert folder.set_aside(root, 1) == tmp_path / "checkpoints-left-2"
    assert names(root) == {"step-000001"}
    assert folder.complete_steps(tmp_path / "checkpoints-left-1") == [3]


def test_prune_keeps_the_newest_and_what_is_being_written(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write(folder.step_folder(tmp_path, step))
    for step in (2, 9):
        folder.begin(folder.step_folder(tmp_path, step))
    (tmp_path / "notes").write_text("mine")
    folder.prune(tmp_path, 2)
    assert names(tmp_path) == {"step-000003", "step-000004", "step-000009.partial", "notes"}
    folder.prune(tmp_path / "nothing", 1)
    with pytest.raises(ValueError, match="keep at least 1"):
        folder.prune(tmp_path, 0)


def test_a_checkpoint_is_replaced_only_when_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "here"
    write(path, "old")
    folder.begin(path)
    assert folder.read_index(path) == (path, b"old")
    folder.abandon(path)
    assert names(tmp_path) == {"here"}
    write(path, "new")
    assert folder.read_index(path) == (path, b"new")
    assert names(tmp_path) == {"here"}


def test_a_death_between_the_two_renames_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step-000007"
    write(path, "old")

    rename = Path.rename

    def die_at_the_second(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            write(path, "new")
    assert not path.exists()
    assert folder.read_index(path)[1] == b"new"
    assert folder.latest(tmp_path) == path
    folder.abandon(path)  # the next save failed before it began
    assert folder.read_index(path)[1] == b"new"
    folder.begin(path)  # the next save, which may fail: the checkpoint is put in its place first
    assert folder.read_index(path) == (path, b"new")
    write(path, "newer")
    assert names(tmp_path) == {"step-000007"}


def test_a_rename_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "here"
    write(path, "old")
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write(path, "new")
    assert folder.read_index(path) == (path, b"old")


def test_what_is_no_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    file = tmp_path / "file"
    file.write_text("a file")
    for path in (home, file):
        with pytest.raises(CheckpointError, match="is not a checkpoint, so it is not replaced"):
            folder.begin(path)
    empty = tmp_path / "empty"
    empty.mkdir()
    write(empty)
    assert folder.find(empty) == empty


def test_reading_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    write(tmp_path / "unfinished")
    (tmp_path / "unfinished" / folder.MARKER).unlink()
    folder.begin(tmp_path / "begun")
    write(tmp_path / "changed")
    (tmp_path / "changed" / folder.INDEX).write_text("{ }")
    write(tmp_path / "gone")
    (tmp_path / "gone" / folder.INDEX).unlink()
    for name, words in {
        "nowhere": "there is no checkpoint",
        "other": "is not a checkpoint",
        "unfinished": "its save did not finish",
        "begun": "its save did not finish",
        "changed": "its digest differs",
        "gone": "No such file",
    }.items():
        with pytest.raises(CheckpointError, match=words):
            folder.read_index(tmp_path / name)
