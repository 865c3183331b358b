"""Accelerate's YAML."""

from pathlib import Path
from typing import Any

from .account import Block
from .migrated import Original
from .names import REPLICATED


def read_accelerate(top: Block, folder: Path) -> tuple[dict[str, Any], Original]:
    """Settings of the trainer, and what Accelerate would run."""
    return {"strategy": REPLICATED, "precision": "fp32"}, Original("ddp")
