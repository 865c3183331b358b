"""Profiler traces name what the engine does, and for which unit."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import shardwise as sw
from shardwise.core.engine.guards import engine_of
from shardwise.core.engine.streams import Lane
from tests.harness import Pool
from tests.support.models import MODELS, tokens
from tests.support.training import adamw


def ranges(strategy: str) -> dict[str, int]:
    """How often each of shardwise's ranges comes in one step, after a first one without a profiler."""
    sw.init()
    model: nn.Module = MODELS["in-tree"].fresh()
    model, optimizer = sw.shard(model, adamw(list(model.parameters())), strategy, precision="fp32")

    def step(index: int) -> None:
        MODELS["in-tree"].loss(model, tokens(index, dist.get_rank(), 2)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    engine_of(model).gathers.settle()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(1)
        # torch's profiler crashes on an operation of gloo that began inside and ends outside.
        engine_of(model).gathers.settle()
    return {event.key: event.count for event in profiler.key_averages() if event.key.startswith("shardwise::")}


UNITS = ["root", "embed", "head", *(f"blocks.{index}" for index in range(5))]


@pytest.mark.quick("zero3")
@pytest.mark.parametrize("strategy", ["zero1", "zero3", "shard_grad_op"])
def test_gathers_and_reductions_are_named(run_ranks: Pool, strategy: str) -> None:
    for seen in run_ranks(2, ranges, strategy):
        reduced = {key.removeprefix("shardwise::reduce ") for key in seen if "::reduce " in key}
        gathered = {key.removeprefix("shardwise::gather ") for key in seen if "::gather " in key}
        assert reduced == gathered
        assert {"root", "blocks.0", "blocks.4"} <= gathered <= set(UNITS)
        assert all(count == 1 for key, count in seen.items() if "::reduce " in key)


def test_where_nothing_is_gathered_no_trace_says_so(run_ranks: Pool) -> None:
    for seen in run_ranks(2, ranges, "ddp"):
        assert not [key for key in seen if "::gather " in key]
        assert "shardwise::reduce blocks.3" in seen


def test_no_range_without_a_profiler() -> None:
    lane = Lane(torch.device("cpu"))
    assert lane.after_compute("gather x")._range is None
    with profile(activities=[ProfilerActivity.CPU]), lane.after_compute("gather x"):
        assert lane._range is not None
    assert lane._range is None
