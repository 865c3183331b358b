"""A checkpoint in another form is the same checkpoint, to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint import folder
from shardwise.checkpoint.index import Stored
from shardwise.checkpoint.opened import Opened, open_checkpoint
from shardwise.checkpoint.writer import without_optimizer, write_bare_weights, write_own
from tests.checkpoint.by_hand import read_whole, save_by_hand, some_tensors

TIED = {"embed.weight": ("head.weight",)}


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    tensors = some_tensors()
    del tensors["nothing"]
    tensors["empty"] = torch.empty(0, 2)
    save_by_hand(
        tmp_path / "given",
        tensors,
        tied=TIED,
        frozen=("embed.weight",),
        buffers=("running.count",),
        extra={"step": 7, "nested": {"a": [1, 2]}},
    )
    return open_checkpoint(tmp_path / "given")


def nothing(num_bytes: int) -> None:
    pass


def content(opened: Opened) -> dict[str, Any]:
    """All that a checkpoint says, with values in place of places."""
    with opened.reader() as reader:

        def value(item: Any) -> Any:
            return read_whole(reader, item).tolist() if isinstance(item, Stored) else item

        return {
            name: (
                value(saved),
                saved.shape,
                saved.dtype,
                saved.kind,
                saved.is_trained,
                saved.tied,
                saved.group,
                {key: value(item) for key, item in saved.state.items()},
            )
            for name, saved in opened.index.tensors.items()
        }


@pytest.mark.parametrize("max_bytes", [None, 200, 10**9])
def test_nothing_is_lost(opened: Opened, tmp_path: Path, max_bytes: int | None) -> None:
    told: list[int] = []
    write_own(opened, tmp_path / "made", max_bytes, told.append)
    made = open_checkpoint(tmp_path / "made")
    assert content(made) == content(opened)
    assert made.index.optimizer == opened.index.optimizer
    assert made.index.extra == opened.index.extra
    assert made.index.origin.items() >= opened.index.origin.items()
    assert sum(told) == opened.index.num_bytes
    assert all(file.checks for file in made.index.files)
    names = [file.name for file in made.index.files]
    if max_bytes == 200:
        assert names[0].startswith("model-00001-of-")
        assert any(name.startswith("optimizer-00002-of-") for name in names)
    else:
        assert names == ["model.safetensors", "optimizer.safetensors"]


def test_whole_files_have_plain_names(opened: Opened, tmp_path: Path) -> None:
    write_own(opened, tmp_path / "made", None, nothing)
    found = load_file(tmp_path / "made" / "model.safetensors")
    assert set(found) == set(opened.index.tensors)
    assert torch.equal(found["blocks.2.up.weight"], some_tensors()["blocks.2.up.weight"])
    assert "exp_avg/blocks.2.up.weight" in load_file(tmp_path / "made" / "optimizer.safetensors")


def test_the_model_alone(opened: Opened, tmp_path: Path) -> None:
    write_own(without_optimizer(opened), tmp_path / "made", None, nothing)
    index = open_checkpoint(tmp_path / "made").index
    assert index.optimizer is None
    assert index.extra == {}
    assert not any(saved.state for saved in index.tensors.values())
    assert index.tensors["embed.weight"].tied == ("head.weight",)
    assert index.tensors["embed.weight"].is_trained is False


def test_bare_weights_in_files_of_a_bounded_size(opened: Opened, tmp_path: Path) -> None:
    write_bare_weights(without_optimizer(opened), tmp_path / "made", 150, nothing)
    files = sorted((tmp_path / "made").glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    found = {name: value for file in files for name, value in load_file(file).items()}
    assert found.keys() == opened.index.tensors.keys()
    assert content(open_checkpoint(tmp_path / "made")).keys() == content(opened).keys()


def test_damage_is_found_on_the_way_and_leaves_nothing(opened: Opened, tmp_path: Path) -> None:
    write_own(opened, tmp_path / "made", None, nothing)
    before = content(open_checkpoint(tmp_path / "made"))
    file = opened.folder / folder.rank_file(1)
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    file.write_bytes(changed)
    for target in ("made", "new"):
        with pytest.raises(CheckpointError, match="is damaged"):
            write_own(opened, tmp_path / target, None, nothing)
        with pytest.raises(CheckpointError, match="is damaged"):
            write_bare_weights(opened, tmp_path / f"{target} weights", 10**9, nothing)
    assert content(open_checkpoint(tmp_path / "made")) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given", "made"]


def test_a_checkpoint_may_be_replaced_by_its_own_conversion(opened: Opened, tmp_path: Path) -> None:
    before = content(opened)
    write_own(opened, opened.folder, None, nothing)
    assert content(open_checkpoint(tmp_path / "given")) == before
    assert not list((tmp_path / "given").glob("rank-*"))
