"""Hugging Face's Trainer: what it logs, saves and goes on from under every strategy is what it does alone."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import LlamaForCausalLM, Trainer

from shardwise.integrations.transformers import sharded
from tests.harness import Pool
from tests.integrations.scripts import NUM_STEPS, Sentences, arguments, forget_accelerate, logged, tiny_llama

TOLERANCE = 1e-5
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {},
    "zero2": {},
    "zero3": {},
    "hsdp": {"node_size": 1},
    "zero3_offload": {},
}


def lora(model: LlamaForCausalLM) -> PeftModel:
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"))


def train(folder: Path, words: dict[str, Any] | None, change: Callable[..., Any] | None = None, **changes: Any) -> Any:
    """The script. `words` is what is asked of the engine: None where there is none."""
    forget_accelerate()
    resume = changes.pop("resume", None)
    num_ranks = dist.get_world_size() if dist.is_initialized() and words is not None else 1
    model = tiny_llama()
    model = model if change is None else change(model)
    trainer_class = Trainer if words is None else sharded(Trainer, **words)
    trainer = trainer_class(
        model=model,
        args=arguments(folder, num_ranks, **changes),
        train_dataset=Sentences(),
        eval_dataset=Sentences(24),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def seen(trainer: Trainer) -> dict[str, list[float]]:
    return {key: logged(trainer, key) for key in ("loss", "grad_norm", "learning_rate", "eval_loss")}


def train_and_tell(*args: Any, **kwargs: Any) -> dict[str, list[float]]:
    return seen(train(*args, **kwargs))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """One process without shardwise."""
    return train_and_tell(tmp_path_factory.mktemp("alone"), None, eval_strategy="steps", eval_steps=10)


def assert_equal(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, abs=TOLERANCE, rel=TOLERANCE), key


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=() if name == "zero3" else pytest.mark.slow) for name in STRATEGIES]
)
def test_losses_norms_and_evaluations_are_those_of_one_process(
    run_ranks: Pool, tmp_path: Path, alone: dict[str, list[float]], strategy: str
) -> None:
    words = {"strategy": strategy, **STRATEGIES[strategy]}
    found = run_ranks(2, train_and_tell, tmp_path, words, eval_strategy="steps", eval_steps=10)
    assert len(found[0]["loss"]) == NUM_STEPS
    assert_equal(found[0], alone)
    assert found[1]["grad_norm"] == found[0]["grad_norm"]
