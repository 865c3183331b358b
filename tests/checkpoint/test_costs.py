"""What a load costs: each rank reads what it holds and hardly more, and needs a unit's memory beside it at most."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint.opened import open_checkpoint
from shardwise.checkpoint.tensor_files import check_bytes
from tests.harness import Pool

NUM_BLOCKS, WIDTH = 8, 1600
UNIT_BYTES = 4 * WIDTH * WIDTH
CHECK_BYTES = check_bytes(NUM_BLOCKS * UNIT_BYTES)


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build(strategy: str) -> tuple[nn.Module, Any]:
    sw.init()
    model = Large()
    return sw.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), strategy, precision="fp32")


def save_large(path: Path, strategy: str, whole: bool) -> None:
    model, optimizer = build(strategy)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    sw.save(path, model, optimizer, whole=whole)


def load_large(path: Path, strategy: str) -> tuple[int, int, int]:
    """Runs on every rank: what it holds, what it read for that, and how much memory it needed beside it."""
    model, optimizer = build(strategy)
    sw.load(path, model, optimizer)  # makes the optimizer's state, which stays
    dist.barrier()
    read_before, memory_before = num_read(), forget_peak()
    sw.load(path, model, optimizer)
    held = sum(
        tensor.numel() * tensor.element_size()
        for group in optimizer.param_groups
        for param in group["params"]
        for tensor in (param, *(value for value in optimizer.state[param].values() if isinstance(value, Tensor)))
    )
    return held, num_read() - read_before, peak() - memory_before


def num_read() -> int:
    return int(Path("/proc/self/io").read_text().splitlines()[0].removeprefix("rchar:"))


def forget_peak() -> int:
    """From here on, the kernel's record of this process's largest memory begins anew; returns what it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return in_status("VmRSS")


def peak() -> int:
    return in_status("VmHWM")


def in_status(key: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


@pytest.mark.quick("zero3-True-zero1-2")
@pytest.mark.parametrize(
    ("saving", "whole", "loading", "world"), [("ddp", False, "zero3", 3), ("zero3", True, "zero1", 2)]
)
def test_a_load_costs_what_it_brings(
    run_ranks: Pool, tmp_path: Path, saving: str, whole: bool, loading: str, world: int
) -> None:
    run_ranks(2, save_large, tmp_path / "here", saving, whole)
    stored = [stored for _, stored in open_checkpoint(tmp_path / "here").index.every_stored()]
    num_pieces = sum(len(each.pieces) for each in stored)
    for held, num_bytes, memory in run_ranks(world, load_large, tmp_path / "here", loading):
        assert num_bytes <= held + num_pieces * CHECK_BYTES
        assert num_bytes <= 0.6 * sum(each.num_bytes for each in stored)
        assert memory <= UNIT_BYTES
