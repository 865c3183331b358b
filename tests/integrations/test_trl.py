"""TRL: the example that ships, and losses of fine-tuning and of preferences beside those of one process without us."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from shardwise.integrations.transformers import sharded
from shardwise.trainer.data.tokenizer import write_byte_tokenizer
from tests.harness import Pool
from tests.integrations.scripts import ROOT, arguments, forget_accelerate, logged, tiny_llama, torchrun

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5


def train(folder: Path, words: dict[str, Any] | None, num_ranks: int, adapters: bool) -> dict[str, list[float]]:
    forget_accelerate()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    pairs = [("one and " * (number % 4), f"{number} makes {number + 1}") for number in range(48)]
    dataset = Dataset.from_dict({"prompt": [prompt for prompt, _ in pairs], "completion": [text for _, text in pairs]})
    plain = arguments(folder, num_ranks)
    keys = ("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "logging_steps")
    same = {key: getattr(plain, key) for key in (*keys, "output_dir", "use_cpu", "learning_rate", "disable_tqdm")}
    args = SFTConfig(**same, bf16=False, report_to="none", save_strategy="no", dataloader_pin_memory=False)
    trainer = (SFTTrainer if words is None else sharded(SFTTrainer, **words))(
        model=tiny_llama(vocab_size=257),
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if adapters else None,
    )
    trainer.train()
    return {key: logged(trainer, key) for key in ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")}


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "adapters"])
def test_losses_are_those_of_one_process(run_ranks: Pool, tmp_path: Path, adapters: bool) -> None:
    write_byte_tokenizer(tmp_path, 64)
    torch.manual_seed(0)  # as the ranks do, for the adapters
    expected = train(tmp_path, None, 1, adapters)
    for words in ({"strategy": "zero3"}, {"strategy": "hsdp", "node_size": 1}):
        found = run_ranks(2, train, tmp_path, words, 2, adapters)[0]
        assert found["num_tokens"] == expected["num_tokens"]
        for key in ("loss", "grad_norm"):
            assert found[key] == pytest.approx(expected[key], abs=TOLERANCE, rel=TOLERANCE), key


def prefer(folder: Path, words: dict[str, Any] | None, num_ranks: int) -> dict[str, list[float]]:
    """Preferences, beside a reference model that is not trained."""
    forget_accelerate()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    columns = {"prompt": "{} plus", "chosen": " one is {}1", "rejected": " no"}
    dataset = Dataset.from_dict({key: [text.format(number) for number in range(32)] for key, text in columns.items()})
    args = DPOConfig(
        output_dir=str(folder), max_steps=6, per_device_train_batch_size=4 // num_ranks, learning_rate=1e-3,
        logging_steps=1, bf16=False, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = (DPOTrainer if words is None else sharded(DPOTrainer, **words))(
        model=tiny_llama(vocab_size=257),
        ref_model=tiny_llama(vocab_size=257),
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    trainer.train()
    return {key: logged(trainer, key) for key in ("loss", "grad_norm")}


def test_preferences_are_learnt_as_by_one_process(run_ranks: Pool, tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, 64)
    expected = prefer(tmp_path, None, 1)
    found = run_ranks(2, prefer, tmp_path, {"strategy": "zero3"}, 2)[0]
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, abs=TOLERANCE, rel=TOLERANCE), key


def losses_of(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"\{'loss': '([\d.]+)'", printed)]


def test_the_example_runs_and_goes_on_under_another_strategy(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "trl_sft.py")
    losses = losses_of(torchrun(script, "--output_dir", "run", cwd=tmp_path))
    assert len(losses) == 10
    assert losses[-1] < 0.1 < 3 < losses[0]
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    question = AutoTokenizer.from_pretrained(tmp_path / "run")("3 + 1 = ", return_tensors="pt").input_ids
    assert opened(input_ids=question).logits[0, -1].argmax().item() == AutoTokenizer.from_pretrained(
        tmp_path / "run"
    ).convert_tokens_to_ids("4")
    again = torchrun(
        script, "--output_dir", "other", "--strategy", "zero1", "--resume_from_checkpoint", "run/checkpoint-50",
        cwd=tmp_path,
    )  # fmt: skip
    assert losses_of(again) == losses[5:]


def test_the_example_trains_adapters(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "trl_sft.py")
    torchrun(script, "--lora", "--strategy", "zero2", "--max_steps", "10", "--output_dir", "run", cwd=tmp_path)
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()
