"""Lightning Fabric: the same loop under its DistributedDataParallel and under our strategy."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from torch import Tensor, nn

import shardwise as sw
from shardwise.base.errors import ConfigurationError
from shardwise.integrations.fabric import ShardwiseStrategy
from tests.harness import Pool

NUM_STEPS = 6


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 20)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(20, 20), nn.GELU()) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


def new_fabric(words: dict[str, Any] | None, **keywords: Any) -> Fabric:
    os.environ["TORCHELASTIC_RUN_ID"] = "as torchrun has it"
    strategy = DDPStrategy() if words is None else ShardwiseStrategy(**words)
    fabric = Fabric(strategy=strategy, devices=2, accelerator="cpu", **keywords)
    fabric.launch()
    return fabric


def loop(words: dict[str, Any] | None, folder: Path, first: int = 0) -> list[float]:
    """Every rank draws other weights and begins with the first one's; it saves in the middle, or goes on from there."""
    fabric = new_fabric(words)
    torch.manual_seed(fabric.global_rank)
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=NUM_STEPS)
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    if first:
        assert fabric.load(folder / "state", state) == {}
        assert state["step"] == first
    seen = []
    for step in range(first, NUM_STEPS):
        for micro in range(2):
            batch = torch.randn(
                4, 6, generator=torch.Generator().manual_seed(10 * step + 2 * fabric.global_rank + micro)
            )
            with fabric.no_backward_sync(model, enabled=micro == 0):
                loss = (model(batch) - 1).square().mean() / 2
                fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, clip_val=0.4)
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5, norm_type=2 if step % 2 else "inf")
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen += [float(fabric.all_reduce(loss.detach())), float(norm), scheduler.get_last_lr()[0]]
        if step == NUM_STEPS // 2 - 1 and words is not None:
            fabric.save(folder / "state", {**state, "step": step + 1})
    return seen


@pytest.mark.quick("words1")
@pytest.mark.parametrize("words", [{"strategy": "zero2"}, {"strategy": "zero3"}, {"strategy": "zero3_offload"}])
def test_a_loop_trains_as_under_ddp_and_goes_on(run_ranks: Pool, tmp_path: Path, words: dict[str, Any]) -> None:
    expected = run_ranks(2, loop, None, tmp_path)[0]
    found = run_ranks(2, loop, words, tmp_path)
    assert found[0] == found[1] == pytest.approx(expected, abs=1e-6, rel=1e-6)
    resumed = run_ranks(2, loop, {"strategy": "zero1"}, tmp_path, first=NUM_STEPS // 2)[0]
    assert resumed == pytest.approx(expected[len(expected) // 2 :], abs=1e-6, rel=1e-6)


def precision_of_the_engine() -> str:
    model, _ = _set_up(new_fabric({"strategy": "zero3", "precision": "bf16"}))
    return sw.describe(model.module).splitlines()[1]


def _set_up(fabric: Fabric) -> Any:
    model = Blocks()
    return fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_precision_is_said_to_the_strategy(run_ranks: Pool) -> None:
    assert run_ranks(2, precision_of_the_engine)[0].startswith("computes in bfloat16, updates in float32")


def twice_the_precision() -> None:
    new_fabric({"strategy": "zero3"}, precision="bf16-mixed")


def optimizer_apart() -> None:
    fabric = new_fabric({"strategy": "zero3"})
    model = fabric.setup_module(Blocks())
    fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (twice_the_precision, "write ShardwiseStrategy(precision='bf16')"),
        (optimizer_apart, "fabric.setup(model, optimizer)"),
    ],
)
def test_what_is_refused(run_ranks: Pool, script: Any, reason: str) -> None:
    for error in run_ranks.errors(2, script):
        assert error is not None
        assert reason in error


def test_a_misspelt_word() -> None:
    with pytest.raises(ConfigurationError, match=r"did you mean 'strategy'"):
        ShardwiseStrategy(stratgy="zero3")
