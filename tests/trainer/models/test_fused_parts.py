"""Fused parts of Hugging Face models: the same losses and gradients, fewer saved tensors, the same names."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.trainer.models import headloss
from shardwise.trainer.models.fused_parts import use_fused_parts
from shardwise.trainer.models.headloss import find_path, loss_sum, set_path
from tests.trainer.models.architectures import CONFIGS, batch

SIZES = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.1, "bos_token_id": 0,
    "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
# The norms of each model; those of Qwen3 include queries and keys.
KINDS = {"llama": 5, "mistral": 5, "qwen2": 5, "qwen3": 9, "phi3": 5, "olmo2": 9, "gemma": 0}


def model_of(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES)
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" in name:
                param.uniform_(0.5, 1.5)
    return model.train()


def losses_and_grads(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    set_path(model, find_path(model))
    loss = loss_sum(model, batch())
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_the_plain_model(kind: str) -> None:
    plain, fused = model_of(kind), model_of(kind)
    assert use_fused_parts(fused) == KINDS[kind]
    assert use_fused_parts(fused) == 0, "once is enough"
    assert [type(part).__name__ for part in fused.modules()] == [type(part).__name__ for part in plain.modules()]
    assert fused.state_dict().keys() == plain.state_dict().keys()
    loss, grads = losses_and_grads(fused)
    expected, expected_grads = losses_and_grads(plain)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for name, grad in grads.items():
        torch.testing.assert_close(
            grad, expected_grads[name], rtol=1e-4, atol=1e-6 * float(expected_grads[name].abs().max())
        )


def test_in_bf16_the_results_differ_by_rounding() -> None:
    exact, plain, fused = model_of("llama"), model_of("llama", torch.bfloat16), model_of("llama", torch.bfloat16)
    use_fused_parts(fused)
    (right, right_grads), (loss, grads), (other, other_grads) = map(losses_and_grads, (exact, fused, plain))
    assert abs(float(loss - right)) <= 1.5 * abs(float(other - right)) + 1e-3 * float(right)
    for name, grad in right_grads.items():
        error, usual = (float((found[name].float() - grad).norm()) for found in (grads, other_grads))
        assert error <= 1.5 * usual, name


def test_weights_in_another_dtype_are_multiplied_as_before() -> None:
    plain, fused = model_of("llama").model.norm, model_of("llama").model.norm
    use_fused_parts(fused)
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    assert torch.equal(fused(x), plain(x))
    assert fused(x).dtype == torch.float32


def test_changed_code_is_left_alone() -> None:
    class LlamaRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.ones(3)), 1e-6

        def forward(self, hidden_states: Any) -> Any:
            input_dtype = hidden_states.dtype
            hidden_states = hidden_states.to(torch.float32)
            variance = hidden_states.pow(4).mean(-1, keepdim=True)
            hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
            return self.weight * hidden_states.to(input_dtype)

    assert use_fused_parts(LlamaRMSNorm()) == 0


def test_nothing_searches_for_documents_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, masking_utils

    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    model.config.use_cache = False
    set_path(model, find_path(model))
    expected = loss_sum(model, batch())
    searched = []
    search = masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(
        masking_utils, "find_packed_sequence_indices", lambda ids: (searched.append(ids), search(ids))[1]
    )
    model(input_ids=batch().tokens)
    assert len(searched) == 1, "transformers searches, and waits for the device"
    assert torch.equal(loss_sum(model, batch()), expected)
    assert len(searched) == 1
    loss_sum(model, batch(isolated=True))
    assert len(searched) == 2
    assert headloss.path_of(model).isolates


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma"])
def test_llama_like_models_have_the_chunked_loss_also_with_adapters(tmp_path: Path, kind: str) -> None:
    from shardwise.trainer.models.build import build
    from shardwise.trainer.settings import Lora, Settings

    model_of(kind).config.save_pretrained(tmp_path)
    settings = Settings(model=str(tmp_path / "config.json"), random_weights=True, lora=Lora(r=4, targets=("o_proj",)))
    for asked in (settings, Settings(model=settings.model, random_weights=True)):
        built = build(asked, 257, torch.device("cpu"))
        assert headloss.path_of(built.model) == headloss.LossPath("chunked", isolates=True)
