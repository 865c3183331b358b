"""`save_pretrained` of a sharded model, as scripts of Hugging Face call it after the training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

import shardwise as sw
from shardwise.integrations.accelerate import Accelerator
from tests.harness import Pool
from tests.integrations.scripts import Sentences, forget_accelerate, tiny_llama
from tests.integrations.training import plain

STRATEGIES = ["ddp", "zero2", "zero3", "zero3_offload"]


def trained(strategy: str, kind: Any = plain, precision: str = "fp32") -> tuple[Any, Tensor]:
    """A model after two steps, and its logits."""
    forget_accelerate()
    sw.init()
    model = kind(tiny_llama())
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    model, optimizer = sw.shard(model, optimizer, strategy, precision=precision)
    tokens = Sentences().tokens[:4]
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, logits_of(model)


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=Sentences().tokens[:2]).logits
    return logits


def save_as_scripts_do(folder: Path, strategy: str) -> Tensor:
    """In the words of the examples of transformers and Accelerate, and in the shortest."""
    model, logits = trained(strategy)
    accelerator = Accelerator(cpu=True, strategy=strategy)
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        folder / "script", is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    state = accelerator.get_state_dict(model)
    unwrapped.save_pretrained(folder / "state", accelerator.is_main_process, state_dict=state)
    model.save_pretrained(folder / "short")
    with sw.whole(model):
        model.save_pretrained(folder / "whole", is_main_process=accelerator.is_main_process)
    return logits


@pytest.mark.quick("zero2", "zero3_offload")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_was_trained_opens(run_ranks: Pool, tmp_path: Path, strategy: str) -> None:
    expected = run_ranks(2, save_as_scripts_do, tmp_path, strategy)[0]
    for place in tmp_path.iterdir():
        assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(place)), expected), place.name
    assert {place.name for place in tmp_path.iterdir()} == {"script", "state", "short", "whole"}


def save_in_bf16(folder: Path) -> dict[str, Tensor]:
    model, _ = trained("zero3", precision="bf16")
    model.save_pretrained(folder)
    return sw.full_state_dict(model)


def test_masters_are_written_and_the_configuration_says_so(run_ranks: Pool, tmp_path: Path) -> None:
    weights = run_ranks(2, save_in_bf16, tmp_path)[0]
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert opened.dtype == torch.float32
    assert all(torch.equal(value, weights[name]) for name, value in opened.state_dict().items())


def adapted(model: Any) -> PeftModel:
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))


def save_adapter_and_merged(folder: Path, strategy: str) -> Tensor:
    model, logits = trained(strategy, adapted)
    model.save_pretrained(folder / "adapter")
    with sw.whole(model, write=True):
        merged = model.merge_and_unload()
    assert torch.allclose(logits_of(merged), logits, atol=1e-5)
    merged.save_pretrained(folder / "merged")
    return logits


@pytest.mark.quick("zero3")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_adapter_is_written_alone_and_merged(run_ranks: Pool, tmp_path: Path, strategy: str) -> None:
    expected = run_ranks(2, save_adapter_and_merged, tmp_path, strategy)[0]
    assert {file.name for file in (tmp_path / "adapter").glob("*.safetensors")} == {"adapter_model.safetensors"}
    opened = PeftModel.from_pretrained(tiny_llama(), tmp_path / "adapter")
    assert torch.allclose(logits_of(opened), expected, atol=1e-5)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits_of(merged), expected, atol=1e-5)


def save_on_wrong_rank(folder: Path) -> None:
    model, _ = trained("zero3")
    model.save_pretrained(folder, is_main_process=torch.distributed.get_rank() == 1)


def save_where_nothing_can_be() -> None:
    trained("zero3")[0].save_pretrained("/proc/nothing")


def test_what_rank_0_cannot_write_fails_on_every_rank(run_ranks: Pool, tmp_path: Path) -> None:
    assert all("is_main_process" in str(error) for error in run_ranks.errors(2, save_on_wrong_rank, tmp_path))
    assert all("/proc/nothing" in str(error) for error in run_ranks.errors(2, save_where_nothing_can_be))
