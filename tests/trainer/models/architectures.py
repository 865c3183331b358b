"""Real architectures, tiny, with random weights, as folders that were saved by transformers."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.trainer.data.samples import Batch

VOCAB = 300
SEQ = 16

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def _llama(**changes: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**{**COMMON, **changes})


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**COMMON, head_dim=8, tie_word_embeddings=True)


def _gemma2() -> Any:
    from transformers import Gemma2Config

    return Gemma2Config(**COMMON, head_dim=8, query_pre_attn_scalar=8, sliding_window=6, final_logit_softcapping=5.0)


def _granite() -> Any:
    from transformers import GraniteConfig

    return GraniteConfig(**COMMON, logits_scaling=3.0)


def _gpt2() -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=VOCAB, n_positions=64, n_embd=16, n_layer=3, n_head=2, initializer_range=0.1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def _opt() -> Any:
    from transformers import OPTConfig

    return OPTConfig(
        vocab_size=VOCAB, hidden_size=16, ffn_dim=40, num_hidden_layers=3, num_attention_heads=2, dropout=0.0,
        max_position_embeddings=64, init_std=0.1, word_embed_proj_dim=16, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **COMMON, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1
    )


def _deepseek_v3() -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 2}, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        n_group=2, topk_group=1,
    )  # fmt: skip


def _mamba() -> Any:
    from transformers import MambaConfig

    return MambaConfig(vocab_size=VOCAB, hidden_size=16, state_size=4, num_hidden_layers=2)


CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": _llama,
    "qwen3": _qwen3,  # tied
    "gemma2": _gemma2,  # tied, capped logits, a sliding window
    "granite": _granite,  # scaled logits
    "gpt2": _gpt2,  # tied, positions are learned
    "opt": _opt,  # attention does not stop at documents
    "qwen3_moe": _qwen3_moe,  # experts that lie apart in files
    "deepseek_v3": _deepseek_v3,  # a buffer that is saved
    "mamba": _mamba,
}


def saved(name: str, folder: Path, **changes: Any) -> Any:
    """The model that was saved into `folder`, for comparison."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[name](**changes))
    model.save_pretrained(folder)
    model.config.use_cache = False
    return model.train()


def batch(isolated: bool = False, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(VOCAB, (2, 2, SEQ), generator=generator)
    targets[0, :5] = -100
    positions = torch.arange(SEQ).repeat(2, 1)
    positions[0, 7:] -= 7  # two documents in the first row
    positions[1, 3:] -= 3  # three in the second
    positions[1, 12:] -= 9
    return Batch(tokens, targets, positions if isolated else None)


def documents(given: Batch) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets of each document by itself."""
    assert given.positions is not None
    found = []
    for tokens, targets, positions in zip(given.tokens, given.targets, given.positions, strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        found += [(tokens[None, a:b], targets[None, a:b]) for a, b in pairwise(starts)]
    return found
