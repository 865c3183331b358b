"""Published transformers by name, and the trainer's own shapes.

A name with an owner (`meta-llama/Llama-3.2-1B`) means the published files, which transformers runs. A name without one
means the trainer's in-tree shape, as in `shardwise train --model`, else the published model. MPT without an owner is
the series with which its authors measured speeds, with learned positions and biases; GPT-175B and GPT-1T are
Megatron's.
"""

import re
from dataclasses import replace
from typing import Any

from ...base.dtypes import BF16, FP16, FP32
from ...base.errors import ConfigurationError, did_you_mean
from ...base.json_file import find
from .hf_config import shape_of_config
from .shape import ModelShape


def _shape(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **rest: Any
) -> ModelShape:
    return ModelShape(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab,
        **{"head_dim": hidden // heads, "dtype": BF16, **rest},
    )  # fmt: skip


def _gpt(name: str, layers: int, hidden: int, heads: int, vocab: int, num_positions: int) -> ModelShape:
    return _shape(
        name, layers, hidden, heads, heads, 4 * hidden, vocab, num_positions=num_positions, tied=True, gated=False,
        bias=True, qkv_bias=True, norm="layer", dtype=FP32,
    )  # fmt: skip


def _llama3(name: str, layers: int, hidden: int, heads: int, ffn: int, tied: bool = False) -> ModelShape:
    return _shape(name, layers, hidden, heads, 8, ffn, 128256, tied=tied)


def _qwen3(name: str, layers: int, hidden: int, heads: int, ffn: int, tied: bool = False, **rest: Any) -> ModelShape:
    sizes = {"kv_heads": 8, "head_dim": 128, **rest}
    return _shape(name, layers, hidden, heads, ffn=ffn, vocab=151936, tied=tied, qk_norm=True, **sizes)


def _qwen2(name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> ModelShape:
    return _shape(name, layers, hidden, heads, kv_heads, ffn, vocab, qkv_bias=True, tied=vocab == 151936)


def _gemma(name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **rest: Any) -> ModelShape:
    return _shape(name, layers, hidden, heads, kv_heads, ffn, 256000, tied=True, **{"head_dim": 256, **rest})


def _mpt(name: str, layers: int, hidden: int) -> ModelShape:
    return _shape(
        name, layers, hidden, hidden // 128, hidden // 128, 4 * hidden, 50432, tied=True, gated=False, norm="layer",
        norm_bias=False,
    )  # fmt: skip


def _in_tree(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, tied: bool
) -> ModelShape:
    return _shape(name, layers, hidden, heads, kv_heads, ffn, vocab, tied=tied, code="in-tree", dtype=FP32)


_PUBLISHED = (
    _gpt("gpt2", 12, 768, 12, 50257, 1024),
    _gpt("gpt2-medium", 24, 1024, 16, 50257, 1024),
    _gpt("gpt2-large", 36, 1280, 20, 50257, 1024),
    _gpt("gpt2-xl", 48, 1600, 25, 50257, 1024),
    _shape("llama-2-7b", 32, 4096, 32, 32, 11008, 32000, dtype=FP16),
    _shape("llama-2-13b", 40, 5120, 40, 40, 13824, 32000, dtype=FP16),
    _shape("llama-2-70b", 80, 8192, 64, 8, 28672, 32000, dtype=FP16),
    _llama3("llama-3-8b", 32, 4096, 32, 14336),
    _llama3("llama-3-70b", 80, 8192, 64, 28672),
    _llama3("llama-3.1-8b", 32, 4096, 32, 14336),
    _llama3("llama-3.1-70b", 80, 8192, 64, 28672),
    _llama3("llama-3.1-405b", 126, 16384, 128, 53248),
    _llama3("llama-3.2-1b", 16, 2048, 32, 8192, tied=True),
    _llama3("llama-3.2-3b", 28, 3072, 24, 8192, tied=True),
    _llama3("llama-3.3-70b", 80, 8192, 64, 28672),
    _qwen3("qwen3-0.6b", 28, 1024, 16, 3072, tied=True),
    _qwen3("qwen3-1.7b", 28, 2048, 16, 6144, tied=True),
    _qwen3("qwen3-4b", 36, 2560, 32, 9728, tied=True),
    _qwen3("qwen3-8b", 36, 4096, 32, 12288),
    _qwen3("qwen3-14b", 40, 5120, 40, 17408),
    _qwen3("qwen3-32b", 64, 5120, 64, 25600),
    _qwen3("qwen3-30b-a3b", 48, 2048, 32, 6144, kv_heads=4, num_experts=128, num_active_experts=8, expert_ffn=768),
    _qwen3("qwen3-235b-a22b", 94, 4096, 64, 12288, kv_heads=4, num_experts=128, num_active_experts=8, expert_ffn=1536),
    _qwen2("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151936),
    _qwen2("qwen2.5-1.5b", 28, 1536, 12, 2, 8960, 151936),
    _qwen2("qwen2.5-3b", 36, 2048, 16, 2, 11008, 151936),
    _qwen2("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064),
    _qwen2("qwen2.5-14b", 48, 5120, 40, 8, 13824, 152064),
    _qwen2("qwen2.5-32b", 64, 5120, 40, 8, 27648, 152064),
    _qwen2("qwen2.5-72b", 80, 8192, 64, 8, 29568, 152064),
    _shape("mistral-7b", 32, 4096, 32, 8, 14336, 32000),
    _shape("mistral-7b-v0.3", 32, 4096, 32, 8, 14336, 32768),
    _shape("mixtral-8x7b", 32, 4096, 32, 8, 14336, 32000, num_experts=8, num_active_experts=2),
    _shape("mixtral-8x22b", 56, 6144, 48, 8, 16384, 32000, num_experts=8, num_active_experts=2),
    _gemma("gemma-2b", 18, 2048, 8, 1, 16384),
    _gemma("gemma-7b", 28, 3072, 16, 16, 24576),
    _gemma("gemma-2-2b", 26, 2304, 8, 4, 9216, num_norms=4),
    _gemma("gemma-2-9b", 42, 3584, 16, 8, 14336, num_norms=4),
    _gemma("gemma-2-27b", 46, 4608, 32, 16, 36864, num_norms=4, head_dim=128),
    _shape("yi-34b", 60, 7168, 56, 8, 20480, 64000),
    _mpt("mpt-7b", 32, 4096),
    _mpt("mpt-30b", 48, 7168),
    _gpt("gpt-175b", 96, 12288, 96, 51200, 2048),
    _gpt("gpt-1t", 128, 25600, 160, 51200, 2048),
)
PUBLISHED = {shape.name: shape for shape in _PUBLISHED}

IN_TREE = {
    shape.name: shape
    for shape in (
        _in_tree("tiny", 4, 192, 6, 2, 512, 257, tied=False),
        _in_tree("50m", 12, 512, 8, 8, 1408, 8192, tied=False),
        _in_tree("llama-3.2-1b", 16, 2048, 32, 8, 8192, 128256, tied=True),
        _in_tree("llama-3.2-3b", 28, 3072, 24, 8, 8192, 128256, tied=True),
        _in_tree("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, tied=False),
        _in_tree("llama-3-70b", 80, 8192, 64, 8, 28672, 128256, tied=False),
    )
}
_MEASURED_MPT = {
    shape.name: shape
    for shape in (
        _gpt("mpt-125m", 12, 768, 12, 50368, 2048),
        _gpt("mpt-350m", 24, 1024, 16, 50368, 2048),
        _gpt("mpt-760m", 24, 1536, 12, 50368, 2048),
        _gpt("mpt-1b", 24, 2048, 16, 50368, 2048),
        _gpt("mpt-3b", 32, 2560, 20, 50368, 2048),
        _gpt("mpt-7b", 32, 4096, 32, 50368, 2048),
        _gpt("mpt-13b", 40, 5120, 40, 50368, 2048),
        _gpt("mpt-30b", 48, 7168, 56, 50368, 2048),
        _gpt("mpt-70b", 80, 8192, 64, 50368, 2048),
    )
}
NAMED = {**PUBLISHED, **_MEASURED_MPT, **IN_TREE}

_SAID = {"gpt-3": "gpt-175b", "gpt3-175b": "gpt-175b"}
# Suffixes that describe fine-tuning and not the shape.
_VARIANT = r"-(hf|base|instruct(-2507)?|thinking-2507|chat|it|bf16|v0\.[12])(?=-|$)"


def shape_of(model: str) -> ModelShape:
    """Return the shape for a value of `--model`: a name, a config.json, or its folder."""
    if not model.strip():
        raise ConfigurationError("model: its name is empty; give one like llama-3-8b, a config.json, or its folder")
    return shape_of_config(model) if is_file(model) else shape_named(model)


def is_file(model: str) -> bool:
    """Return True for a config.json or its folder, False for the name of a shape."""
    path = find(model)
    return model not in IN_TREE and (model.endswith(".json") or (path is not None and path.is_dir()))


def shape_named(name: str) -> ModelShape:
    """Look up a shape; case, hyphens, underscores and suffixes of fine-tuning (`-Instruct`) are ignored."""
    owner, _, bare = name.strip().lower().rpartition("/")
    known = PUBLISHED if owner else NAMED
    words = _SAID.get(bare, re.sub(_VARIANT, "", bare.replace("_", "-")).removeprefix("meta-"))
    shapes = {_letters(key): shape for key, shape in known.items()}
    found = shapes.get(_letters(words))
    if found is None:
        raise ConfigurationError(
            f"model {name!r}: no shape has this name, and there is no such file or folder; {did_you_mean(words, known)}"
            "; or give a config.json, or --shape layers=..."
        )
    return replace(found, name=name.strip()) if owner else found


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name)
