"""The scripts of `examples/migrating`: before and after train the same, and the page shows them as they are.

Measured on two CPU ranks over 20 steps and two evaluations, the largest relative difference of a loss:

               fp32      bf16
    ddp        0         0         autocast stays as it is
    fsdp1      1.5e-7    5.4e-4    FSDP casts buffers and the inputs of every unit
    fsdp2      1.5e-7    0
    deepspeed  0         1.1e-3    its masters are made from weights that were rounded to bf16
"""

import difflib
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from tests.harness import Pool

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "examples/migrating"
PAGE = ROOT / "docs/migrating-loops.md"
LIBRARIES = ["ddp", "fsdp1", "fsdp2", "deepspeed"]
TOLERANCE = {"fp32": 1e-6, "bf16": 5e-3}


def losses(script: str, checkpoint: Path, precision: str, num_steps: int = 20) -> list[tuple[str, float]]:
    """What rank 0 of two prints, as pairs of words and number."""
    words = [str(SCRIPTS / f"{script}.py"), "--checkpoint", str(checkpoint), "--steps", str(num_steps)]
    if script == "deepspeed_before":
        words.insert(0, str(ROOT / "tests/support/deepspeed_script.py"))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
        + ["--precision", precision],
        capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return losses_in(done.stdout)


def losses_here(folder: str) -> list[list[tuple[str, float]]]:
    """Of both scripts of DDP, one after the other, on ranks that have torchrun's environment."""
    sys.path.insert(0, str(SCRIPTS))
    told = []
    for script in ("ddp_before", "ddp_after"):
        with redirect_stdout(StringIO()) as out, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [script, "--checkpoint", f"{folder}/{script}", "--precision", "bf16"])
            runpy.run_path(str(SCRIPTS / f"{script}.py"))
        told.append(losses_in(out.getvalue()))
    return told


def losses_in(printed: str) -> list[tuple[str, float]]:
    return [
        (what, float(loss)) for what, loss in re.findall(r"^((?:step \d+|eval) loss) (\S+)$", printed, re.MULTILINE)
    ]


def assert_close(found: list[tuple[str, float]], expected: list[tuple[str, float]], precision: str) -> None:
    assert [what for what, _ in found] == [what for what, _ in expected]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=TOLERANCE[precision])


def need(library: str) -> None:
    if importlib.util.find_spec(library) is None and library == "deepspeed":
        pytest.skip("deepspeed is not installed; it is in the extra 'peers'")


def before(library: str, folder: Path, precision: str) -> list[tuple[str, float]]:
    need(library)
    found = losses(f"{library}_before", folder / "before", precision)
    assert len(found) == 22
    assert found[-1][1] < 0.5 * found[0][1]
    return found


@pytest.mark.peers
def test_ddp_is_the_same_to_the_last_digit(run_ranks: Pool, tmp_path: Path) -> None:
    first, _ = run_ranks.throwaway(2, losses_here, str(tmp_path), join_group=False)
    old, new = first.value
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
