"""On a GPU: the Trainer under a strategy beside the plain one, and Accelerate's loop, in a world of one under NCCL."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
pytestmark = pytest.mark.gpu

SCRIPT = """
import sys
from pathlib import Path
import torch.distributed as dist
from tests.integrations.training import train_and_tell

folder, precision = Path(sys.argv[1]), sys.argv[2]
changes = {"use_cpu": False, "bf16": precision == "bf16"}
alone = train_and_tell(folder / "alone", None, 1, **changes)
for strategy in ("ddp", "zero2", "zero3", "zero3_offload"):
    found = train_and_tell(folder / strategy, {"strategy": strategy}, 1, **changes)
    assert dist.get_backend() == "nccl"
    for key, tolerance in (("loss", 1), ("grad_norm", 5)):
        worst = max(abs(a - b) / abs(b) for a, b in zip(found[key], alone[key], strict=True))
        print(strategy, precision, key, f"{worst:.1e}")
        assert worst <= tolerance * (1e-2 if precision == "bf16" else 1e-4), (found[key], alone[key])
"""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_trainer_under_nccl(tmp_path: Path, precision: str) -> None:
    root = Path(__file__).parents[2]
    words = [sys.executable, "-c", SCRIPT, str(tmp_path), precision]
    result = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    print(result.stdout)
