"""DeepSpeed's JSON."""

from pathlib import Path
from typing import Any

from .account import Block
from .migrated import Original
from .names import STAGES


def read_deepspeed(top: Block, folder: Path) -> tuple[dict[str, Any], Original]:
    """Settings of the trainer, and what DeepSpeed would run."""
    zero = top.inner("zero_optimization")
    stage = zero.whole("stage", 0, least=0, most=3)
    zero.used("stage", f"strategy {STAGES[stage]}")
    return {"strategy": STAGES[stage], "precision": "fp32"}, Original("deepspeed")
