"""`strategy="auto"`: the planner chooses from what is free, all ranks take the same, and the training is unchanged."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.api import sharding
from shardwise.base.errors import ConfigurationError, MemoryExceededError
from shardwise.core.engine.guards import engine_of
from shardwise.core.layout import PRESETS
from shardwise.planner import auto
from shardwise.planner.search import strategy_of
from shardwise.trainer.model import Transformer
from shardwise.trainer.shapes import TransformerShape
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
    before, tie = sharding.free_bytes_here, auto.PROCESSOR_TIE
    if free_bytes is not None:
        sharding.free_bytes_here = lambda: free_bytes
        auto.PROCESSOR_TIE = 0.0
    try:
        model, optimizer = sw.shard(model, optimizer, "auto", precision="fp32", batch=batch)
    finally:
        sharding.free_bytes_here, auto.PROCESSOR_TIE = before, tie
    chosen = sharding.chosen_plan(model)
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
    chosen = sharding.chosen_plan(model)
    assert chosen is not None
    return {entry.name: entry.reserved.high for entry in chosen.found}


def test_with_room_nothing_is_split_that_need_not_be(run_ranks: Pool) -> None:
    (first, strategy, layouts, _), (_, other, _, _) = run_ranks(2, trained, None, BATCH)
    assert strategy == other, "all ranks take the same"
    assert isinstance(strategy, str)
    assert layouts[0].params == "whole"
    assert all(loss > 0 for loss in first)


@pytest.mark.slow
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


def moved(moves: str, disk_path: str | None = None) -> Any:
    model, optimizer = build()
    model, optimizer = sw.shard(model, optimizer, f"auto{moves}", precision="fp32", batch=BATCH, disk_path=disk_path)
    chosen = sharding.chosen_plan(model)
    assert chosen is not None
    layouts = {plan.layout for plan in engine_of(model).schedule.units}
    return losses(model, optimizer), layouts, [entry.name for entry in chosen.found], chosen.why


@pytest.mark.slow
def test_what_was_moved_is_moved_under_whatever_is_chosen(run_ranks: Pool) -> None:
    (seen, layouts, names, why), (_, others, *_) = run_ranks(2, moved, "+optimizer=host:0.5")
    assert layouts == others
    [layout] = layouts
    assert (layout.optimizer_on, layout.kept, layout.params_on) == ("host", 0.5, "device")
    assert "ddp+optimizer=host:0.5" in names
    assert "zero3+optimizer=host:0.5" in names
    assert "the fastest that fits with optimizer=host:0.5" in why
    plain, *_ = run_ranks(2, trained, None, BATCH)[0]
    assert seen == pytest.approx(plain, rel=1e-5)


@pytest.mark.slow
def test_presets_that_cannot_be_moved_so_are_left_out(run_ranks: Pool) -> None:
    _, layouts, names, _ = run_ranks(2, moved, "+params=host+optimizer=host")[0]
    assert names
    assert not any(name.startswith(("ddp", "zero1", "zero2")) for name in names)
    assert {layout.params_on for layout in layouts} == {"host"}


def refused_moves(tmp_path: str) -> list[str]:
    found = []
    for moves, path in (("+params=host", None), ("+optimzer=host", None), ("+optimizer=disk", None), ("", "missing")):
        model, optimizer = build()
        disk_path = path and f"{tmp_path}/{path}"
        with pytest.raises(ConfigurationError) as caught:
            sw.shard(model, optimizer, f"auto{moves}", precision="fp32", batch=BATCH, disk_path=disk_path)
        found.append(str(caught.value))
    return found


def test_moves_that_make_no_sense_are_refused(run_ranks: Pool, tmp_path: Path) -> None:
    for alone, misspelt, homeless, missing in run_ranks(2, refused_moves, str(tmp_path)):
        assert "move the optimizer first" in alone
        assert "did you mean 'optimizer'?" in misspelt
        assert "no folder is named" in homeless
        assert f"{tmp_path}/missing is not a folder" in missing


def test_a_folder_alone_lets_the_disk_be_used_and_need_not(run_ranks: Pool, tmp_path: Path) -> None:
    _, layouts, names, _ = run_ranks(1, moved, "", str(tmp_path))[0]
    assert "zero3_nvme" in names, "it was looked at"
    assert not any(layout.uses_disk for layout in layouts), "there is memory enough"
    _, _, names, _ = run_ranks(1, moved, "")[0]
    assert "zero3_nvme" not in names
    assert list(tmp_path.iterdir()) == []


def test_what_is_free_here(tmp_path: Path) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 1 << 20 < auto.host_bytes_here() <= total
    assert auto.free_bytes_on(tmp_path) == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)
    assert auto.free_bytes_on(tmp_path / "missing") == 0
