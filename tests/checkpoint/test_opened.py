"""What lies at a path is recognised, and where nothing does, it is said what was looked for."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardwise import CheckpointError
from shardwise.checkpoint import folder
from shardwise.checkpoint.index import Index, Saved, to_json
from shardwise.checkpoint.opened import has_all_files, open_checkpoint

EMPTY = Index((), {"a": Saved((0,), "F32", ())}, origin={"format": "shardwise checkpoint"})


def write_own(path: Path) -> Path:
    folder.begin(path)
    folder.complete(path, to_json(EMPTY))
    return path


def test_a_run_leads_to_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    for step in (3, 12):
        write_own(folder.step_folder(root, step))
    folder.begin(folder.step_folder(root, 20))
    for path in (tmp_path / "run", root, root / "step-000012"):
        assert open_checkpoint(path).folder == root / "step-000012"


def test_an_own_checkpoint_comes_before_anything_else_in_its_folder(tmp_path: Path) -> None:
    path = write_own(tmp_path / "x")
    save_file({"b": torch.ones(1)}, path / "model.safetensors")
    assert set(open_checkpoint(path).index.tensors) == {"a"}
    assert has_all_files(path)
    (path / folder.MARKER).unlink()
    with pytest.raises(CheckpointError, match="its save did not finish"):
        open_checkpoint(path)
    assert not has_all_files(path)


def test_what_is_no_checkpoint_is_told_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(
        CheckpointError, match=r"holds no checkpoint of .*torch DCP \(.metadata\).*Hugging Face \(model.safetensors"
    ):
        open_checkpoint(tmp_path)
    for content in (b"hello", b"", b"PK"):
        (tmp_path / "notes.txt").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"^/\S+notes.txt is no checkpoint: what can be opened is a folder"):
            open_checkpoint(tmp_path / "notes.txt")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        open_checkpoint(tmp_path / "nothing")


def test_what_cannot_be_read_is_named_once(tmp_path: Path) -> None:
    for name, content, words in (
        ("cut.pt", b"PK\3\4", "no zip archive, .* or it was truncated"),
        ("cut.safetensors", b"123", "its header claims"),
        ("list.safetensors", b"\2\0\0\0\0\0\0\0[]", "is no safetensors file"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=words) as told:
            open_checkpoint(tmp_path / name)
        assert str(told.value).count(name) == 1


def test_one_file_of_a_checkpoint_leads_to_its_folder(tmp_path: Path) -> None:
    path = write_own(tmp_path / "x")
    save_file({"b": torch.ones(1)}, path / "rank-00000.safetensors")
    for name in (folder.INDEX, folder.MARKER, "rank-00000.safetensors"):
        with pytest.raises(CheckpointError, match=rf"{name} is one file of a checkpoint: give the folder, {path}$"):
            open_checkpoint(path / name)
    save_file({"b": torch.ones(1)}, tmp_path / "rank-00000.safetensors")
    assert set(open_checkpoint(tmp_path / "rank-00000.safetensors").index.tensors) == {"b"}


def test_a_folder_of_runs_names_the_newest(tmp_path: Path) -> None:
    for age, run in enumerate(("b", "c", "a")):
        path = write_own(folder.step_folder(tmp_path / run / "checkpoints", 3))
        os.utime(path, (100 - age, 100 - age))
    (tmp_path / "d" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=rf"holds runs.*: name one, the newest is {tmp_path / 'b'}$"):
        open_checkpoint(tmp_path)
