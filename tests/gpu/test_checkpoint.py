"""On a GPU: a run goes on from a checkpoint bit for bit, also within a captured step, and on ranks that share it."""

from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.trainer.model import Transformer
from tests.gpu.test_gpu import SHAPE, batch
from tests.harness import Pool

pytestmark = pytest.mark.gpu


def built(strategy: str, seed: int, **settings: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    sw.init(device="cuda:0")
    torch.manual_seed(seed)
    with torch.device("cuda"):
        model = Transformer(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **settings)
    return sw.shard(model, optimizer, strategy, precision="bf16")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        model(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def go_on(path: Path, settings: dict[str, object], way: str = "save") -> dict[str, bool]:
    """Which weights are the same after six steps in one go, and after three and three."""
    straight = built("zero3", 0, **settings)
    train(*straight, 0, 6)
    first = built("zero3", 0, **settings)
    train(*first, 0, 3)
    if way == "background":
        saving = sw.start_save(path, *first, extra={"step": 3})
        train(*first, 3, 6)
        saving.finish()
    else:
        sw.save(path, *first, extra={"step": 3}, whole=way == "whole")
    second = built("zero3", 1, **settings)
    assert sw.load(path, *second) == {"step": 3}
    train(*second, 3, 6)
    expected, seen = sw.full_state_dict(straight[0]), sw.full_state_dict(second[0])
    return {key: torch.equal(seen[key], value) for key, value in expected.items()}


@pytest.mark.parametrize("settings", [{"fused": True}, {"capturable": True}, {}], ids=str)
def test_a_run_on_a_gpu_goes_on_bit_for_bit(run_ranks: Pool, tmp_path: Path, settings: dict[str, object]) -> None:
    (same,) = run_ranks(1, go_on, tmp_path / "here", settings)
    assert all(same.values()), same


@pytest.mark.parametrize("way", ["save", "background", "whole"])
def test_ranks_that_share_a_gpu(run_ranks: Pool, tmp_path: Path, way: str) -> None:
    for same in run_ranks(2, go_on, tmp_path / "here", {"fused": True}, way):
        assert all(same.values()), same


def test_a_save_in_the_background_sees_the_step_it_began_at(run_ranks: Pool, tmp_path: Path) -> None:
    (same,) = run_ranks(1, go_on, tmp_path / "here", {"fused": True}, "background")
    assert all(same.values()), same


def go_back(path: Path) -> dict[str, bool]:
    """A captured step reads weights and state where they were when it was recorded: a load must write them there."""
    model, optimizer = built("zero3", 0, capturable=True)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    captured = sw.capture(model, optimizer, step)
    for number in range(6):
        captured(*batch(number))
    sw.save(path, model, optimizer)
    found = []
    for _ in range(2):
        for number in range(6, 9):
            captured(*batch(number))
        found.append(sw.full_state_dict(model))
        sw.load(path, model, optimizer)
    return {key: torch.equal(found[1][key], value) for key, value in found[0].items()}


def test_a_captured_step_goes_on(run_ranks: Pool, tmp_path: Path) -> None:
    (same,) = run_ranks(1, go_back, tmp_path / "here")
    assert all(same.values()), same
