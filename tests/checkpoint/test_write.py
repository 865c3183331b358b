"""What is written elsewhere is what was there: no number becomes another kind of number on its way."""

from pathlib import Path

import pytest
import torch

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.tensor_files import Source
from shardwise.checkpoint.writer import converted, split, write_sources


def test_what_fp16_cannot_hold_is_refused_by_name() -> None:
    row = torch.tensor([1.0, float("inf"), float("nan"), -65504.0])
    assert converted("w", row, torch.float16).isinf().sum() == 1
    with pytest.raises(CheckpointError, match="'w' reaches to 70000, and fp16 to 65504: use bf16 or fp32"):
        converted("w", torch.tensor([1.0, -7e4]), torch.float16)
    assert converted("w", torch.tensor([7e4]), torch.bfloat16).isfinite().all()


def source(name: str, *rows: torch.Tensor, num_elems: int) -> Source:
    return Source(name, torch.float32, (num_elems,), lambda: rows)


def test_files_are_full_but_never_too_full() -> None:
    sources = [source(str(n), num_elems=n) for n in (3, 1, 9, 2, 2, 4)]
    names = [[s.name for s in file] for file in split(sources, 16)]
    assert names == [["3", "1"], ["9"], ["2", "2"], ["4"]]


def test_a_source_that_breaks_its_word_is_refused(tmp_path: Path) -> None:
    for rows, words in (
        ((torch.ones(2), torch.ones(1)), "'w' was announced with 16 bytes and has 12"),
        ((torch.ones(4).double(),), "'w' was announced as torch.float32 and is torch.float64"),
    ):
        with pytest.raises(CheckpointError, match=words):
            write_sources(tmp_path / "file", [source("w", *rows, num_elems=4)], lambda _: None)
