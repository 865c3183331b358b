"""With `whole=True` every tensor lies in one piece, under its own name, in files that anybody's safetensors reads."""

import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint.index import Check, File
from shardwise.checkpoint.opened import open_checkpoint
from shardwise.checkpoint.saving import WHOLE_FILES, merge_checks
from tests.checkpoint.by_hand import require_good
from tests.checkpoint.test_refusals import refused
from tests.checkpoint.test_state import Odd, build, in_groups, steps
from tests.harness import Pool


def save_whole(path: Path, strategy: str) -> dict[str, Tensor]:
    """Runs on every rank; returns the weights."""
    sw.init()
    model, optimizer = build(in_groups, strategy, 0)
    steps(model, optimizer, 0, 2)
    sw.save(path, model, optimizer, extra={"step": 2}, whole=True)
    return sw.full_state_dict(model)


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "hsdp"])
def test_anybody_reads_whole_tensors(run_ranks: Pool, tmp_path: Path, strategy: str) -> None:
    (weights, *_) = run_ranks(3, save_whole, tmp_path / "here", strategy)
    assert {entry.name for entry in (tmp_path / "here").iterdir()} == {*WHOLE_FILES, "index.json", "complete"}
    model, optimizer = (load_file(tmp_path / "here" / name) for name in WHOLE_FILES)
    assert set(model) == set(weights)
    for name, value in weights.items():
        assert model[name].dtype == value.dtype
        assert torch.equal(model[name], value), name
    Odd().load_state_dict(model)
    updated = ["first.weight", "first.bias", "scale.0", "last.weight", "last.bias"]
    keys = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    assert {f"{key}/{name}" for name in updated for key in keys} == set(optimizer)
    for name in updated:
        assert optimizer[f"exp_avg/{name}"].shape == weights[name].shape
        assert float(optimizer[f"step/{name}"]) == 2.0


def test_every_tensor_is_one_piece_and_every_byte_is_summed(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(3, save_whole, tmp_path / "here", "zero3")
    opened = open_checkpoint(tmp_path / "here")
    assert all(len(stored.pieces) == (stored.num_elems > 0) for _, stored in opened.index.every_stored())
    with opened.reader() as reader:
        for number, file in enumerate(opened.index.files):
            assert sum(check.num_bytes for check in file.checks) == file.num_bytes
            require_good(reader, number)


def save_model_alone(path: Path) -> None:
    sw.init()
    model, none = sw.shard(nn.Linear(30, 40), None, "zero3", precision="fp32")
    assert none is None
    sw.save(path, model, whole=True)


def test_a_model_alone_is_one_file(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, save_model_alone, tmp_path / "here")
    assert {entry.name for entry in (tmp_path / "here").iterdir()} == {WHOLE_FILES[0], "index.json", "complete"}
    nn.Linear(30, 40).load_state_dict(load_file(tmp_path / "here" / WHOLE_FILES[0]))


def fail_to_save(path: Path) -> None:
    """One rank may write no further than a few bytes; whatever was there before stays."""
    sw.init()
    model, optimizer = build(in_groups, "zero3", 0)
    sw.save(path, model, optimizer, extra={"step": 1}, whole=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        refused(
            lambda: sw.save(path, model, optimizer, extra={"step": 2}, whole=True),
            r"rank 1: cannot write .*model.safetensors: File too large",
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sw.load(path, model, optimizer) == {"step": 1}
    rank = dist.get_rank()
    refused(lambda: sw.save(path, model, whole=rank == 0), "the ranks differ in whether they save whole", sw.WireError)
    dist.barrier()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_full_disk_on_one_rank_fails_on_all(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, fail_to_save, tmp_path / "run" / "here")


def test_what_the_ranks_wrote_into_a_file_comes_together_in_order() -> None:
    first = [File("a", 30, (Check(0, 10, 1), Check(20, 5, 3))), File("b", 7, ())]
    second = [File("a", 30, (Check(25, 5, 4), Check(10, 10, 2))), File("b", 7, (Check(0, 7, 9),))]
    assert merge_checks([first, second]) == [
        File("a", 30, (Check(0, 10, 1), Check(10, 10, 2), Check(20, 5, 3), Check(25, 5, 4))),
        File("b", 7, (Check(0, 7, 9),)),
    ]
