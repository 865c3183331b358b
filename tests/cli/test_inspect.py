"""`shardwise inspect` from the outside."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.by_hand import save_by_hand, some_tensors
from tests.cli.asking import Asker


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (3, 12):
        save_by_hand(
            tmp_path / "run" / "checkpoints" / f"step-{step:06d}",
            some_tensors(),
            tied={"embed.weight": ("head.weight",)},
            frozen=("norm.weight",),
            buffers=("running.count",),
            extra={"step": step, "nested": {"a": 1}},
        )
    return tmp_path / "run"


def test_a_run_shows_its_newest_checkpoint(ask: Asker, run: Path) -> None:
    seen = ask("inspect", run)
    assert seen.code == 0
    lines = seen.out.splitlines()
    assert lines[0].endswith("step-000012")
    for words in (
        "shardwise by hand",
        "step 12",
        "151 in 13 tensors, trained 147, frozen 4",
        "embed.weight = head.weight",
        "F32 146, I64 5, BF16 4, F64 1",
        "weights 600 B, optimizer state 1.18 kB, buffers 40 B",
        "AdamW, 2 groups",
        "lr=0.1",
        "rank-00001.safetensors",
        "blocks.0-2",
        "3 equal",
        "6x4 F32",
        "buffer",
        "frozen",
    ):
        assert words in seen.out, words
    assert not any(line.endswith(" ") for line in lines)
    (headings,) = (line for line in lines if line.split() == ["shape", "elements", "weights", "state"])
    (embed,) = (line for line in lines if line.startswith("  embed.weight "))
    assert headings.index("weights") + len("weights") == embed.index("176 B") + len("176 B")


def test_depth_cuts_the_tree(ask: Asker, run: Path) -> None:
    whole, one, none = (ask("inspect", run, "--depth", depth).out for depth in (9, 1, 0))
    assert "up" in whole
    assert "blocks.0-2" in one
    assert " up" not in one
    assert "blocks" not in none


def test_json_is_complete(ask: Asker, run: Path) -> None:
    about = json.loads(ask("inspect", run / "checkpoints" / "step-000003", "--json").out)
    assert about["extra"] == {"step": 3, "nested": {"a": 1}}
    assert set(about["tensors"]) == set(some_tensors())
    entry = about["tensors"]["blocks.1.up.weight"]
    assert (entry["shape"], entry["dtype"], entry["num_bytes"], entry["num_pieces"]) == ([6, 4], "F32", 96, 2)
    assert entry["state"]["exp_avg"]["shape"] == [6, 4]
    assert entry["state"]["step"] == 3.0
    assert about["tensors"]["embed.weight"]["tied"] == ["head.weight"]
    assert about["optimizer"]["groups"][1]["weight_decay"] == 0
    assert [file["num_checksums"] for file in about["files"]] == [1, 1]


def test_tensors_are_not_read(ask: Asker, run: Path) -> None:
    for file in (run / "checkpoints" / "step-000012").glob("*.safetensors"):
        file.write_bytes(b"")
    assert ask("inspect", run).code == 0


def test_what_others_wrote_is_shown(ask: Asker, tmp_path: Path) -> None:
    save_file({"layers.0.w": torch.ones(2, 2), "layers.1.w": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    seen = ask("inspect", tmp_path)
    assert seen.code == 0
    assert "layers.0-1.w" in seen.out
    assert "8 in 2 tensors, trained unknown, frozen unknown" in seen.out
    assert "buffers unknown" in seen.out
    totals = json.loads(ask("inspect", tmp_path, "--json").out)["totals"]
    assert (totals["num_trained"], totals["num_frozen"], totals["buffers_bytes"]) == (None, None, None)


def test_what_is_not_there_is_refused_in_a_sentence(ask: Asker, tmp_path: Path) -> None:
    seen = ask("inspect", tmp_path / "none")
    assert (seen.code, seen.out) == (2, "")
    assert seen.err == f"shardwise: {tmp_path / 'none'}: there is no such folder\n"
    seen = ask("inspect", tmp_path / ("long" * 100))
    assert (seen.code, seen.err.count("\n")) == (2, 1)
    assert "File name too long" in seen.err
    (tmp_path / "empty").mkdir()
    seen = ask("inspect", tmp_path / "empty")
    assert seen.code == 5
    assert "holds no checkpoint" in seen.err
    assert seen.err.count("\n") == 1
