"""Runs of the trainer inside the ranks of a test session, and what is left of them."""

import json
from pathlib import Path
from typing import Any

import torch

from shardwise.trainer.data.sources import manual
from shardwise.trainer.run import run_rank
from shardwise.trainer.settings import Settings
from tests.harness import Pool

TINY = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 48, "max_seq": 64}


def settings_for(folder: Path, **changes: Any) -> Settings:
    """A small, quick run that logs every step. Models from folders get the embedded text as a file: they need data."""
    values: dict[str, Any] = {
        "shape": TINY,
        "seq_length": 32,
        "global_batch_size": 8,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "sample_tokens": 0,
        "export": False,
        "device": "cpu",
        "output_dir": str(folder),
    }
    if "model" in changes and not {"train_file", "dataset"} & set(changes):
        values["train_file"] = (str(manual_in(folder.parent)),)
    return Settings(**{**values, **changes})


def manual_in(folder: Path) -> Path:
    file = folder / "manual.jsonl"
    file.write_text("".join(json.dumps({"text": topic}) + "\n" for topic in manual()))
    return file


def save_llama(folder: Path, hidden: int = 32, layers: int = 2) -> Path:
    """A Hugging Face folder with drawn weights of a real architecture."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=272, hidden_size=hidden, intermediate_size=3 * hidden // 2, num_hidden_layers=layers,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True,
        )
    ).save_pretrained(folder)  # fmt: skip
    return folder


def train(pool: Pool, num_ranks: int, settings: Settings) -> int:
    """The exit code, which all ranks agree on."""
    codes = set(pool(num_ranks, run_rank, settings.to_json()))
    assert len(codes) == 1
    return int(codes.pop())


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    """By step, each step once."""
    found = [row for row in rows(folder) if "loss" in row]
    assert [row["step"] for row in found] == list(range(1, len(found) + 1))
    return [row["loss"] for row in found]
