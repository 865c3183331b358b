"""All that can be wrong with a checkpoint is found, named, and listed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardwise.checkpoint import folder
from shardwise.checkpoint.index import from_json, to_json
from shardwise.checkpoint.verification import Report, checkpoints_in, look_at, verify
from tests.checkpoint.by_hand import save_by_hand, some_tensors


def verified(path: Path) -> Report:
    report, opened = look_at(path)
    told: list[int] = []
    if opened is not None:
        verify(report, opened, told.append)
        if report.num_checksums:
            assert sum(told) == report.num_bytes
    return report


@pytest.fixture
def place(tmp_path: Path) -> Path:
    save_by_hand(tmp_path / "checkpoint", some_tensors(), buffers=("running.count",))
    return tmp_path / "checkpoint"


def test_a_good_one_is_good(place: Path) -> None:
    report = verified(place)
    assert report.is_usable
    assert report.problems == []
    assert (report.num_files, report.num_checksums) == (2, 2)
    assert report.num_bytes == sum(file.stat().st_size for file in place.glob("*.safetensors"))


def flip_a_byte(place: Path) -> None:
    file = place / folder.rank_file(1)
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def cut_a_file(place: Path) -> None:
    file = place / folder.rank_file(0)
    file.write_bytes(file.read_bytes()[:-1])


def lose_a_file(place: Path) -> None:
    (place / folder.rank_file(0)).unlink()


def lose_the_marker(place: Path) -> None:
    (place / folder.MARKER).unlink()


def change_the_index(place: Path) -> None:
    text = (place / folder.INDEX).read_text()
    (place / folder.INDEX).write_text(text.replace('"lr":0.1', '"lr":0.2'))


def spoil_the_index(place: Path) -> None:
    (place / folder.INDEX).write_text("{")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (flip_a_byte, "rank-00001.safetensors is damaged: bytes 0 to"),
        (cut_a_file, "bytes long, and was written with"),
        (lose_a_file, "rank-00000.safetensors: No such file"),
        (lose_the_marker, "is incomplete: its save did not finish"),
        (change_the_index, "its digest differs from the marker's"),
        (spoil_the_index, "the index cannot be understood"),
    ],
)
def test_each_kind_of_damage_is_named(place: Path, spoil: Callable[[Path], None], words: str) -> None:
    spoil(place)
    report = verified(place)
    assert not report.is_usable
    assert any(words in problem for problem in report.damage), report.damage


def test_all_problems_are_listed(place: Path) -> None:
    for spoil in (flip_a_byte, lose_a_file, change_the_index):
        spoil(place)
    assert len(verified(place).damage) == 3


def test_numbers_that_are_not_finite_are_named_with_their_place(tmp_path: Path) -> None:
    tensors = some_tensors()
    tensors["blocks.1.up.weight"][4, 2] = float("nan")
    tensors["blocks.1.up.weight"][5, 0] = float("inf")
    tensors["norm.weight"][3] = float("-inf")
    tensors["scale"] = torch.tensor(float("nan"))
    tensors["turns"] = torch.tensor([1 + 2j, complex(0, float("inf"))])
    tensors["large"] = torch.full((9,), 3e38)  # their sum is not finite, they are
    save_by_hand(tmp_path / "bad", tensors, buffers=("running.count", "turns"))
    report = verified(tmp_path / "bad")
    assert report.is_usable
    assert sorted(report.not_finite) == [
        "'blocks.1.up.weight': 2 of 24 numbers are not finite; the first is element 18, at [4, 2]: nan",
        "'norm.weight': 1 of 4 numbers are not finite; the first is element 3, at [3]: -inf",
        "'scale': 1 of 1 numbers are not finite; the first is element 0, at []: nan",
        "'turns': 1 of 2 numbers are not finite; the first is element 1, at [1]: infj",
    ]


def test_state_that_is_not_finite_is_named(place: Path) -> None:
    index = from_json((place / folder.INDEX).read_text())
    saved = index.tensors["blocks.0.norm"]
    index.tensors["blocks.0.norm"] = replace(saved, state=saved.state | {"step": float("inf")})
    folder.begin(place)
    for file in place.glob("*.safetensors"):
        file.rename(folder.partial_of(place) / file.name)
    folder.complete(place, to_json(index))
    assert verified(place).not_finite == ["step of 'blocks.0.norm' is inf"]


def test_files_of_others_have_no_checksums_but_are_looked_at(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.tensor([1.0, float("nan")], dtype=torch.float16)}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file(tensors, tmp_path / "model.safetensors")
    report = verified(tmp_path)
    assert (report.num_checksums, report.num_tensors, report.damage) == (0, 2, [])
    assert report.not_finite == ["'b': 1 of 2 numbers are not finite; the first is element 1, at [1]: nan"]


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for path in (tmp_path / "none", tmp_path / "other"):
        report = verified(path)
        assert len(report.damage) == 1
        assert not report.is_usable


def test_all_checkpoints_of_a_run_are_found(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    for step in (2, 10):
        save_by_hand(root / f"step-{step:06d}", {"a": torch.ones(3)})
    (root / "step-000020.partial").mkdir()
    expected = [root / f"step-{step:06d}" for step in (2, 10, 20)]
    assert checkpoints_in(tmp_path / "run") == checkpoints_in(root) == expected
    assert [verified(path).is_complete for path in expected] == [True, True, False]
    assert checkpoints_in(root / "step-000002") == []
    assert checkpoints_in(tmp_path / "none") == []
