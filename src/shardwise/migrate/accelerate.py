"""Accelerate's YAML."""

from pathlib import Path
from typing import Any

from .account import Block
from .migrated import Original
from .names import REPLICATED


def read_accelerate(top: Block, folder: Path) -> tuple[dict[str, Any], Any, Original]:
    """Settings of the trainer, units of `sw.shard`, and what Accelerate would run."""
    return {"strategy": REPLICATED, "precision": "fp32"}, "auto", Original("ddp")
