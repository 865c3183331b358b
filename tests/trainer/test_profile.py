"""Three steps of a run, traced with the engine's own ranges."""

import gzip
import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.core.engine.guards import engine_of
from shardwise.trainer.profile import FILE, traced_steps
from tests.harness import Pool
from tests.support.models import MODELS, tokens
from tests.support.training import adamw


def train(folder: Path, num_steps: int, strategy: str = "zero3") -> list[int]:
    """Steps that had been taken when the trace was there."""
    sw.init()
    model: nn.Module = MODELS["in-tree"].fresh()
    model, optimizer = sw.shard(model, adamw(list(model.parameters())), strategy, precision="fp32")
    there = []
    engine = engine_of(model)
    traced = traced_steps(folder, "cpu", engine.gathers.settle, engine.finish_updates)
    with traced if dist.get_rank() == 0 else nullcontext(lambda: None) as after_step:
        for step in range(1, num_steps + 1):
            MODELS["in-tree"].loss(model, tokens(step, dist.get_rank(), 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
            after_step()
            if (folder / FILE).exists():
                there.append(step)
    return there


def names_in(file: Path) -> Counter[str]:
    with gzip.open(file) as trace:
        return Counter(event.get("name", "") for event in json.load(trace)["traceEvents"])


def test_steps_3_to_5_are_traced_on_one_rank(run_ranks: Pool, tmp_path: Path) -> None:
    first, _ = run_ranks(2, train, tmp_path, 7)
    assert first == [5, 6, 7]
    assert [file.name for file in tmp_path.iterdir()] == ["trace-rank-0.json.gz"]
    names = names_in(tmp_path / "trace-rank-0.json.gz")
    assert names["shardwise::reduce blocks.3"] == 3
    assert names["shardwise::gather blocks.3"] >= 3
    # A step begins where the one before ended; the first is number 0.
    assert [number for number in range(9) if f"ProfilerStep#{number}" in names] == [2, 3, 4]


def test_what_leaves_the_device_and_the_host_updates_is_traced_too(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, train, tmp_path, 6, "zero3_offload")
    names = names_in(tmp_path / "trace-rank-0.json.gz")
    assert names["shardwise::leave blocks.3"] == 3
    assert names["shardwise::host update blocks.3"] == 3


def test_a_shorter_run_is_traced_as_far_as_it_goes(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, train, tmp_path, 3)
    assert names_in(tmp_path / "trace-rank-0.json.gz")["shardwise::reduce blocks.3"] == 1


def test_after_an_error_nobody_is_waited_for(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), traced_steps(tmp_path, "cpu", pytest.fail, pytest.fail):
        raise ZeroDivisionError
