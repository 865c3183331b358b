"""The Trainer's script: what is compared between one process without us and ranks under a strategy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM, Trainer

from shardwise.integrations.transformers import sharded
from tests.integrations.scripts import NUM_STEPS, Sentences, arguments, forget_accelerate, logged, tiny_llama

TOLERANCE = 1e-5
HALF = NUM_STEPS // 2
Logs = dict[str, list[float]]


def plain(model: LlamaForCausalLM) -> LlamaForCausalLM:
    return model


def lora(model: LlamaForCausalLM) -> PeftModel:
    """Adapters, drawn at random on each rank."""
    torch.seed()
    targets = ["q_proj", "up_proj"]
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"))


def train(
    folder: Path, words: dict[str, Any] | None, num_ranks: int, kind: Any = plain, resume: Any = None, **changes: Any
) -> Any:
    """The script. `words` is what is asked of the engine: None where there is none."""
    forget_accelerate()
    trainer = (Trainer if words is None else sharded(Trainer, **words))(
        model=kind(tiny_llama()),
        args=arguments(folder, num_ranks, **changes),
        train_dataset=Sentences(),
        eval_dataset=Sentences(24),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def train_and_tell(*args: Any, **kwargs: Any) -> Logs:
    trainer = train(*args, **kwargs)
    found = {key: logged(trainer, key) for key in ("loss", "grad_norm", "learning_rate", "eval_loss")}
    return {**found, "flos": [trainer.state.total_flos]}


def assert_equal(found: Logs, expected: Logs, keys: tuple[str, ...] = ("loss", "grad_norm", "learning_rate")) -> None:
    for key in keys:
        assert found[key] == pytest.approx(expected[key], abs=TOLERANCE, rel=TOLERANCE), key
