"""The scripts of `examples/migrating`: before and after train the same, and the page shows them as they are.

Measured on two CPU ranks over 20 steps and two evaluations, the largest relative difference of a loss:

               fp32      bf16
    ddp        0         0         autocast stays as it is
    fsdp1      1.5e-7    5.4e-4    it adds micro-batches up in bf16; without accumulation 0
    fsdp2      1.5e-7    0
    deepspeed  0         1.1e-3
"""

import difflib
import importlib.util
import math
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from tests.harness import Pool

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "examples/migrating"
PAGE = ROOT / "docs/migrating.md"
LIBRARIES = ["ddp", "fsdp1", "fsdp2", "deepspeed"]
TOLERANCE = {"fp32": 1e-6, "bf16": 5e-3}

Losses = list[tuple[str, float]]


def losses(script: str, checkpoint: Path, precision: str, num_steps: int = 20) -> Losses:
    return losses_of(SCRIPTS / f"{script}.py", checkpoint, precision, num_steps)


def losses_of(script: Path, checkpoint: Path, precision: str, num_steps: int = 20) -> Losses:
    """Of two ranks under torchrun."""
    words = [str(script), "--checkpoint", str(checkpoint), "--steps", str(num_steps)]
    if script.stem == "deepspeed_before":
        words = ["-m", "tests.support.deepspeed_script", *words]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join(map(str, [ROOT / "src", ROOT, SCRIPTS]))
    done = subprocess.run(
        [*torchrun, *words, "--precision", precision],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return losses_in(done.stdout)


def losses_in(printed: str) -> Losses:
    """What rank 0 prints, as pairs of words and number."""
    pairs = re.findall(r"^((?:step \d+|eval) loss) (\S+)$", printed, re.MULTILINE)
    return [(what, float(loss)) for what, loss in pairs]


KEPT: list[object] = []  # a process group that goes while the other rank's is there may wait for it for ever


def losses_here(script: str, folder: str) -> Losses:
    """Of a script of DDP, on ranks that have torchrun's environment."""
    sys.path.insert(0, str(SCRIPTS))
    with redirect_stdout(StringIO()) as out, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, "--checkpoint", f"{folder}/{script}", "--precision", "bf16"])
        KEPT.append(runpy.run_path(str(SCRIPTS / f"{script}.py")))
    return losses_in(out.getvalue())


def assert_close(found: Losses, expected: Losses, precision: str) -> None:
    assert [what for what, _ in found] == [what for what, _ in expected]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=TOLERANCE[precision])


def before(library: str, folder: Path, precision: str) -> Losses:
    if library == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed; it is in the extra 'peers'")
    found = losses(f"{library}_before", folder / "before", precision)
    assert len(found) == 22
    assert found[-1][1] < 0.5 * found[0][1]
    return found


@pytest.mark.slow
@pytest.mark.peers
def test_ddp_is_the_same_to_the_last_digit(run_ranks: Pool, tmp_path: Path) -> None:
    scripts = ("ddp_before", "ddp_after")
    old, new = (run_ranks.throwaway(2, losses_here, s, str(tmp_path), join_group=False)[0].value for s in scripts)
    assert len(old) == 22
    assert new == old


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_losses_are_the_same(library: str, tmp_path: Path) -> None:
    """In fp32; and the new script is stopped after ten steps and started again."""
    expected = before(library, tmp_path, "fp32")
    found = losses(f"{library}_after", tmp_path / "after", "fp32", num_steps=10)
    found += losses(f"{library}_after", tmp_path / "after", "fp32")
    assert_close(found, expected, "fp32")


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_losses_are_the_same_in_mixed_precision(library: str, tmp_path: Path) -> None:
    expected = before(library, tmp_path, "bf16")
    assert_close(losses(f"{library}_after", tmp_path / "after", "bf16"), expected, "bf16")


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("library", ["fsdp1", "fsdp2", "deepspeed"])
def test_the_new_script_goes_on_from_the_old_ones_checkpoint(library: str, tmp_path: Path) -> None:
    """With the lines that the page tells to write."""
    expected = before(library, tmp_path, "fp32")
    found = losses(f"{library}_before", tmp_path / "run", "fp32", num_steps=10)
    script = (SCRIPTS / f"{library}_after.py").read_text()
    line = 'scheduler.last_epoch = saved["step"]'
    assert f"\n{line}\n" in PAGE.read_text()
    script = script.replace('scheduler.load_state_dict(saved["scheduler"])', line)
    script = script.replace("sw.save(args.checkpoint", 'sw.save(args.checkpoint.with_name("new")')
    (tmp_path / "new.py").write_text(script)
    found += losses_of(tmp_path / "new.py", tmp_path / "run", "fp32")
    assert_close(found, expected, "fp32")


# ---------------------------------------------------------------------------------------------------------
# the tables: what no other test asks for


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def encode(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[2](self.blocks[1](self.encode(x)))


def calls() -> dict[str, Any]:
    sw.init()
    model = Model()
    model, optimizer = sw.shard(model, torch.optim.AdamW(model.parameters(), fused=True), "zero3", precision="fp32")
    batch = torch.arange(32.0).view(4, 8) / 32 + dist.get_rank()
    with sw.accumulate(model):
        model(batch).square().mean().backward()
    found = {"norm": [float(optimizer.clip_grad_norm(limit)) for limit in (math.inf, math.inf, 1e-3, math.inf)]}
    optimizer.step()
    with torch.inference_mode():
        found["encoded"] = tuple(model.encode(batch).shape)
    found["has state"] = all("exp_avg" in kept for kept in optimizer.state.values())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch).square().mean()).backward()
    with pytest.raises(sw.StateError, match="GradScaler"):
        scaler.step(optimizer)
    return found


def test_calls_of_the_tables(run_ranks: Pool) -> None:
    first, second = run_ranks(2, calls)
    measured, again, before_clipping, after = first["norm"]
    assert measured == again == before_clipping > 1e-3
    assert after == pytest.approx(1e-3, rel=1e-3)
    assert first == second
    assert first["encoded"] == (4, 8)
    assert first["has state"]


# ---------------------------------------------------------------------------------------------------------
# the page


def changes(library: str) -> list[str]:
    """From the old script to the new, below their imports, with a line around what changed."""
    old, new = ((SCRIPTS / f"{library}_{when}.py").read_text().splitlines() for when in ("before", "after"))
    begin = "args = arguments()"
    lines = difflib.unified_diff(old[old.index(begin) :], new[new.index(begin) :], n=1, lineterm="")
    return ["@@" if line.startswith("@@") else line for line in lines if not line.startswith(("---", "+++"))][1:]


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_page_shows_the_scripts(library: str) -> None:
    blocks = re.findall(r"^```diff\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == len(LIBRARIES)
    assert blocks[LIBRARIES.index(library)].splitlines() == changes(library)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_page_counts_what_changes(library: str) -> None:
    lines = changes(library)
    removed, added = (sum(line.startswith(sign) and line[1:].strip() != "" for line in lines) for sign in "-+")
    row = rf"\[before\]\(\.\./examples/migrating/{library}_before\.py\) .*\| {removed} \| {added} \|"
    assert re.search(row, PAGE.read_text()), f"{library}: {removed} lines go, {added} come"
