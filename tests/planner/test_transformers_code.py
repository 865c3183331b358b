"""A shape tells the memory of transformers' code as torch's autograd holds it, loss and adapters included."""

from dataclasses import replace

import pytest
import torch

from shardwise.planner.training import Lora

pytest.importorskip("transformers")
from benchmarks.planner_transformers import Case, planned_bytes, seen_bytes

META = torch.device("meta")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FAMILIES = [
    "llama", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "glm4", "gpt_neox", "opt", "qwen2_moe", "gpt_oss",
]  # fmt: skip


@pytest.mark.quick("none-gemma2")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_memory_of_a_step(family: str, checkpointing: str) -> None:
    case = Case(family, seq=512, vocab=512, checkpointing=checkpointing)
    assert planned_bytes(case) == pytest.approx(seen_bytes(case, META), rel=0.02)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "llama4_text"])
def test_memory_of_experts_that_are_shared_and_of_latent_attention(family: str) -> None:
    case = Case(family, seq=512, vocab=512)
    assert planned_bytes(case) == pytest.approx(seen_bytes(case, META), rel=0.035)


@pytest.mark.parametrize("upcast", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("targets", [ALL, ("q_proj", "v_proj")])
def test_memory_of_adapters(targets: tuple[str, ...], dropout: float, upcast: bool) -> None:
    case = Case("llama", seq=512, vocab=512, lora=Lora(16, targets, dropout, upcast))
    assert planned_bytes(case) == pytest.approx(seen_bytes(case, META), rel=0.015)
    plain = replace(case, lora=Lora(16, targets))
    assert (planned_bytes(case) > planned_bytes(plain)) == bool(dropout or upcast)


def test_memory_of_the_loss() -> None:
    case = Case("llama", seq=512)
    assert planned_bytes(case) == pytest.approx(seen_bytes(case, META), rel=0.001)
