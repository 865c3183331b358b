"""`shardwise convert` from the outside."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardwise.checkpoint.opened import open_checkpoint
from tests.checkpoint.by_hand import read_whole, save_by_hand, some_tensors
from tests.cli.asking import Asker


@pytest.fixture
def place(tmp_path: Path) -> Path:
    save_by_hand(tmp_path / "given", some_tensors(), buffers=("running.count",), extra={"step": 5})
    return tmp_path / "given"


def test_into_one_file_of_weights_and_one_of_state(ask: Asker, place: Path, tmp_path: Path) -> None:
    seen = ask("convert", place, tmp_path / "made", "--whole")
    assert (seen.code, seen.err) == (0, "")
    assert "as shardwise" in seen.out
    assert torch.equal(load_file(tmp_path / "made" / "model.safetensors")["scale"], some_tensors()["scale"])
    assert ask("verify", tmp_path / "made").code == 0


def test_into_files_of_a_bounded_size_without_the_optimizer(ask: Asker, place: Path, tmp_path: Path) -> None:
    assert ask("convert", place, tmp_path / "made", "--max_shard_size", "200B", "--model_only").code == 0
    index = open_checkpoint(tmp_path / "made").index
    assert len(index.files) > 2
    assert index.optimizer is None
    assert ask("verify", tmp_path / "made").code == 0


def test_into_bare_weights(ask: Asker, place: Path, tmp_path: Path) -> None:
    assert ask("convert", place, tmp_path / "made", "--to", "hugging_face").code == 0
    found = load_file(tmp_path / "made" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in some_tensors().items())


def test_into_dcp_and_back(ask: Asker, place: Path, tmp_path: Path) -> None:
    assert ask("convert", place, tmp_path / "dcp", "--to", "dcp").code == 0
    assert (tmp_path / "dcp" / ".metadata").is_file()
    assert ask("verify", tmp_path / "dcp").code == 0
    assert ask("convert", tmp_path / "dcp", tmp_path / "back", "--whole").code == 0
    given, back = open_checkpoint(place), open_checkpoint(tmp_path / "back")
    assert set(back.index.tensors) == set(given.index.tensors)
    with given.reader() as before, back.reader() as after:
        for name, saved in given.index.tensors.items():
            other = back.index.tensors[name]
            assert torch.equal(read_whole(before, saved), read_whole(after, other)), name
            assert saved.state.keys() == other.state.keys()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--to", "hugging"), "did you mean 'hugging-face'?"),
        (("--to", "dcp", "--whole"), "--whole is for shardwise checkpoints"),
        (("--max-shard-size", "-3"), "is not a size"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    ask: Asker, place: Path, tmp_path: Path, words: tuple[str, ...], complaint: str
) -> None:
    seen = ask("convert", place, tmp_path / "made", *words)
    assert (seen.code, seen.out) == (2, "")
    assert complaint in seen.err
    assert not (tmp_path / "made").exists()


def test_a_folder_of_somebody_else_is_left_alone(ask: Asker, place: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    for words in ((), ("--to", "hugging-face"), ("--to", "dcp")):
        seen = ask("convert", place, tmp_path / "mine", *words)
        assert seen.code == 2
    assert (tmp_path / "mine" / "file").read_text() == "mine"
    assert ask("convert", tmp_path / "none", tmp_path / "made").code == 2


def test_help_shows_commands_that_parse(ask: Asker) -> None:
    seen = ask("convert", "--help")
    assert seen.code == 0
    for word in ("--to", "--whole", "--model-only", "--max-shard-size", "shardwise convert runs/"):
        assert word in seen.out


def test_what_was_written_before_is_replaced_if_asked_for(ask: Asker, place: Path, tmp_path: Path) -> None:
    for form in ("shardwise", "dcp", "hugging-face"):
        made = tmp_path / form
        assert ask("convert", place, made, "--to", form).code == 0
        refused = ask("convert", place, made, "--to", form)
        assert refused.code == 2
        assert f"{made} holds files: name another folder, or replace it with --overwrite" in refused.err
        assert ask("verify", made).code == 0
        assert ask("convert", place, made, "--to", form, "--overwrite").code == 0


def test_what_dcp_cannot_hold_is_said(ask: Asker, place: Path, tmp_path: Path) -> None:
    assert "torch DCP cannot store step" in ask("convert", place, tmp_path / "dcp", "--to", "dcp").out
