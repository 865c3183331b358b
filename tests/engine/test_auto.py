"""`strategy="auto"`: the planner chooses from what is free, all ranks take the same, and the training is unchanged."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.engine import api, auto
from shardwise.engine.guards import engine_of
from shardwise.errors import ConfigurationError, MemoryExceededError
from shardwise.layout import PRESETS
from shardwise.plan.search import strategy_of
from shardwise.train.model import Transformer
from shardwise.train.shapes import TransformerShape
from tests.harness import Pool

SHAPE = TransformerShape(vocab=512, hidden=512, layers=6, heads=4, kv_heads=2, ffn=1024, max_seq=64)
BATCH = (2, 16)


def build() -> tuple[Transformer, torch.optim.Optimizer]:
    sw.init()
    torch.manual_seed(0)
    model = Transformer(SHAPE)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def losses(model: nn.Module, optimizer: Any, num_steps: int = 3) -> list[float]:
    """Of the whole batch: every rank tells its part's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(0, SHAPE.vocab, (4, 17), generator=generator)[rank::world]
        loss: Tensor = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def trained(free_bytes: int | None, batch: tuple[int, int] | None) -> Any:
    model, optimizer = build()
    before, tie = api.free_bytes_here, auto.PROCESSOR_TIE
    if free_bytes is not None:
        api.free_bytes_here = lambda: free_bytes
        auto.PROCESSOR_TIE = 0.0
    try:
        model, optimizer = sw.shard(model, optimizer, "auto", precision="fp32", batch=batch)
    finally:
        api.free_bytes_here, auto.PROCESSOR_TIE = before, tie
    chosen = engine_of(model).chosen
    assert chosen is not None
    assert chosen.recommended is not None
    layouts = [plan.layout for plan in engine_of(model).schedule.units]
    return (
        losses(model, optimizer),
        strategy_of(chosen.recommended),
        layouts,
        chosen.recommended.needed_bytes,
    )


def needed() -> dict[str, int]:
    """What the presets need of a rank."""
    model, optimizer = build()
    model, _ = sw.shard(model, optimizer, "auto", precision="fp32", batch=BATCH)
    chosen = engine_of(model).chosen
    assert chosen is not None
    return {entry.name: entry.reserved.high for entry in chosen.found}


def test_with_room_nothing_is_split_that_need_not_be(run_ranks: Pool) -> None:
    (first, strategy, layouts, _), (_, other, _, _) = run_ranks(2, trained, None, BATCH)
    assert strategy == other, "all ranks take the same"
    assert isinstance(strategy, str)
    assert layouts[0].params == "whole"
    assert all(loss > 0 for loss in first)


def test_memory_that_is_left_keeps_units_gathered(run_ranks: Pool) -> None:
    """Between what zero3 and zero2 need, a part of the units is kept: that is the memory's size, not a preset's."""
    sizes = run_ranks(2, needed)[0]
    between = (sizes["zero3"] + min(sizes["zero2"], sizes["shard_grad_op"])) // 2
    (seen, strategy, layouts, used), _ = run_ranks(2, trained, between, BATCH)
    assert isinstance(strategy, dict)
    assert len(set(layouts)) == 2
    assert PRESETS["zero3"] in layouts
    assert used <= between
    plain, *_ = run_ranks(2, trained, None, BATCH)[0]
    assert seen == pytest.approx(plain, rel=1e-5)


def test_without_a_batch_a_quarter_is_left_to_activations(run_ranks: Pool) -> None:
    (_, strategy, _, _), _ = run_ranks(2, trained, None, None)
    assert isinstance(strategy, str)


def refused() -> str:
    with pytest.raises(MemoryExceededError) as caught:
        trained(1_000_000, BATCH)
    return str(caught.value)


def test_nothing_fits(run_ranks: Pool) -> None:
    for message in run_ranks(2, refused):
        assert "nothing fits" in message
        assert "zero3" in message


def with_a_batch_for_nothing() -> None:
    model, optimizer = build()
    with pytest.raises(ConfigurationError, match="only 'auto' asks for it"):
        sw.shard(model, optimizer, "zero3", batch=BATCH)


def test_a_batch_is_for_auto_alone(run_ranks: Pool) -> None:
    run_ranks(1, with_a_batch_for_nothing)
