"""What lies at a path is recognised, and where nothing does, it is said what was looked for."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardwise import CheckpointError
from shardwise.checkpoint import folder, steps
from shardwise.checkpoint.index import Index, Saved, Stored
from shardwise.checkpoint.index_json import to_json
from shardwise.checkpoint.opened import looks_whole, open_checkpoint

EMPTY = Index((), {"a": Saved(Stored((0,), "F32", ()))}, origin={"format": "shardwise checkpoint"})


def write_own(path: Path) -> Path:
    folder.begin(path)
    folder.complete(path, to_json(EMPTY))
    return path


def test_a_run_leads_to_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    for step in (3, 12):
        write_own(steps.step_folder(root, step))
    folder.begin(steps.step_folder(root, 20))
    for path in (tmp_path / "run", root, root / "step-000012"):
        assert open_checkpoint(path).folder == root / "step-000012"


def test_an_own_checkpoint_comes_before_anything_else_in_its_folder(tmp_path: Path) -> None:
    path = write_own(tmp_path / "x")
    save_file({"b": torch.ones(1)}, path / "model.safetensors")
    assert set(open_checkpoint(path).index.tensors) == {"a"}
    assert looks_whole(path)
    (path / folder.MARKER).unlink()
    with pytest.raises(CheckpointError, match="its save did not finish"):
        open_checkpoint(path)
    assert not looks_whole(path)


def test_what_is_no_checkpoint_is_told_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"not a checkpoint: .*'.metadata' of torch's DCP.*'model.safetensors'"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot read .*notes.txt: .*no zip archive"):
        open_checkpoint(tmp_path / "notes.txt")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        open_checkpoint(tmp_path / "nothing")
