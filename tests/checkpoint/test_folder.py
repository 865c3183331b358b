"""A checkpoint on disk: whether it is complete, and that there is always one."""

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint import folder


def write(path: Path, text: str = "{}") -> None:
    (folder.begin(path) / folder.rank_file(0)).write_bytes(b"tensors")
    folder.complete(path, text)


def names(root: Path) -> set[str]:
    return {entry.name for entry in root.iterdir()}


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
    assert folder.find(path) == folder.partial_of(path)
    folder.abandon(path)  # the next save failed before it began
    assert folder.read_index(path)[1] == b"new"
    folder.begin(path)  # the next save, which may fail: the checkpoint is put in its place first
    assert folder.read_index(path) == (path, b"new")
    write(path, "newer")
    assert names(tmp_path) == {"step-000007"}


def test_a_file_system_may_sync_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def refusing(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(file)

    monkeypatch.setattr(os, "fsync", refusing)
    write(tmp_path / "here", "new")
    assert folder.read_index(tmp_path / "here")[1] == b"new"


def test_an_old_one_that_does_not_go_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "here"
    write(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", Path.rmdir)  # which is not empty
        write(path, "new")
    assert folder.read_index(path) == (path, b"new")
    assert names(tmp_path) == {"here", "here.replaced"}
    write(path, "newer")
    assert names(tmp_path) == {"here"}


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


def test_a_path_without_a_name_has_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert folder.partial_of(Path()) == tmp_path / "here.partial"
    assert folder.find(Path()) is None
    assert folder.find(Path("/")) is None
