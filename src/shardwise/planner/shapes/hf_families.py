"""What families of Hugging Face models do otherwise than Llama: fields of a shape, from a config and its sizes."""

from collections.abc import Callable, Mapping
from typing import Any

from ...base.errors import ConfigurationError

Config = Mapping[str, Any]
Fields = dict[str, Any]
Habits = Callable[[Config, Fields], Fields]

# Keys that published files leave out.
DEFAULTS: dict[str, Fields] = {
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256},
    "gemma3_text": {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208},
    "gpt2": {"n_positions": 1024},
    "gpt_bigcode": {"multi_query": True},
    "glm": {"attention_bias": True},
    "glm4": {"attention_bias": True},
    "seed_oss": {"attention_bias": True},
    "gpt_oss": {"num_experts_per_tok": 4},
    "phimoe": {"num_experts_per_tok": 2},
}
# A feed-forward of four times the hidden size, where no other is given.
FOUR_HIDDEN = {"gpt2", "gptj", "gpt_bigcode", "gpt_neo", "bloom", "falcon", "mpt"}
# The output projection is the embedding, where nothing is said.
TIED = {
    "gpt2", "gpt_bigcode", "gpt_neo", "opt", "bloom", "falcon", "mpt", "gemma", "gemma2", "gemma3_text", "cohere",
    "cohere2", "starcoder2", "smollm3",
}  # fmt: skip

_LAYER_NORM = {"norm": "layer", "gated": False}


def habits_of(kind: str, config: Config, sizes: Fields) -> Fields:
    """`kind` is the config's model_type."""
    return {**_biases(config, sizes), **_OTHERWISE.get(kind, _has())(config, sizes)}


def switch(config: Config, key: str, default: bool = False) -> bool:
    """Words for true and false are not taken for either."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ConfigurationError(f"config.json: {key} is {value!r}, but must be true or false")
    return value


def _biases(config: Config, sizes: Fields) -> Fields:
    """As Llama has them: one switch for the four projections of attention, one for the feed-forward."""
    attention, ffn = switch(config, "attention_bias", False), switch(config, "mlp_bias", False)
    if attention == ffn:
        return {"qkv_bias": attention, "bias": ffn, "other_elems": 0}
    return {"qkv_bias": attention, "other_elems": sizes["hidden"] + (2 * sizes["ffn"] if ffn else 0)}


def _has(**fields: Any) -> Habits:
    return lambda config, sizes: fields


def _switched(key: str, default: bool, **fields: Any) -> Habits:
    """One switch for all biases."""

    def habits(config: Config, sizes: Fields) -> Fields:
        bias = switch(config, key, default)
        return {**_LAYER_NORM, "bias": bias, "qkv_bias": bias, **fields}

    return habits


def _learned(key: str, more: int = 0, **fields: Any) -> Habits:
    """GPT-2's, with as many learned positions as the config says, and some more."""

    def habits(config: Config, sizes: Fields) -> Fields:
        num_positions = config.get(key)
        if type(num_positions) is not int:
            raise ConfigurationError(f"config.json: it has no {key}, the number of learned positions")
        kv_heads = 1 if switch(config, "multi_query") else sizes["heads"]
        return {**_BIASED, "num_positions": num_positions + more, "kv_heads": kv_heads, **fields}

    return habits


def _opt(config: Config, sizes: Fields) -> Fields:
    if config.get("word_embed_proj_dim", sizes["hidden"]) != sizes["hidden"]:
        raise ConfigurationError("config.json: word_embed_proj_dim is not hidden_size; this is not planned for")
    if not switch(config, "do_layer_norm_before", True):
        raise ConfigurationError("config.json: do_layer_norm_before is false; this is not planned for")
    return _learned("max_position_embeddings", more=2)(config, sizes)


def _gptj(config: Config, sizes: Fields) -> Fields:
    """Biases of the feed-forward only."""
    return {**_LAYER_NORM, "num_norms": 1, "other_elems": sizes["ffn"] + sizes["hidden"], "head_bias": True}


def _gpt_neox(config: Config, sizes: Fields) -> Fields:
    if switch(config, "attention_bias", True):
        return _BIASED
    return {**_LAYER_NORM, "qkv_bias": False, "other_elems": sizes["ffn"] + sizes["hidden"]}


def _falcon(config: Config, sizes: Fields) -> Fields:
    if switch(config, "new_decoder_architecture"):
        num_norms, kv_heads = config.get("num_ln_in_parallel_attn") or 2, sizes["kv_heads"]
    else:
        num_norms = 1 if switch(config, "parallel_attn", True) else 2
        kv_heads = 1 if switch(config, "multi_query", True) else sizes["heads"]
    return _switched("bias", False, num_norms=num_norms, kv_heads=kv_heads)(config, sizes)


def _phi(config: Config, sizes: Fields) -> Fields:
    return {**_BIASED, "num_norms": 1, "head_bias": True, "qk_norm": switch(config, "qk_layernorm")}


def _stablelm(config: Config, sizes: Fields) -> Fields:
    norms = _norms_of_heads(sizes) if switch(config, "qk_layernorm") else 0
    num_norms = 1 if switch(config, "use_parallel_residual") else 2
    return {"norm": "layer", "qkv_bias": switch(config, "use_qkv_bias"), "num_norms": num_norms, "other_elems": norms}


def _cohere(config: Config, sizes: Fields) -> Fields:
    norms = _norms_of_heads(sizes) if switch(config, "use_qk_norm") else 0
    other = _biases(config, sizes)["other_elems"] + norms
    return {"norm": "layer", "norm_bias": False, "num_norms": 1, "other_elems": other}


def _olmo2(config: Config, sizes: Fields) -> Fields:
    """Queries and keys are normalised, all heads together."""
    return {"other_elems": _biases(config, sizes)["other_elems"] + _norms_of_heads(sizes)}


def _norms_of_heads(sizes: Fields) -> int:
    return int((sizes["heads"] + sizes["kv_heads"]) * sizes["head_dim"])


def _gpt_oss(config: Config, sizes: Fields) -> Fields:
    """A sink for every head; biases of the output, the router and the experts."""
    of_expert = 1 + 2 * sizes["expert_ffn"] + sizes["hidden"]
    other = sizes["heads"] + sizes["hidden"] + sizes["num_experts"] * of_expert
    return {"qkv_bias": True, "bias": False, "other_elems": other}


_BIASED = {**_LAYER_NORM, "bias": True, "qkv_bias": True, "other_elems": 0}
_OTHERWISE: dict[str, Habits] = {
    "qwen2": _has(qkv_bias=True),
    "qwen3": _has(qk_norm=True),
    "qwen3_moe": _has(qk_norm=True),
    "hunyuan_v1_dense": _has(qk_norm=True),
    "exaone4": _has(qk_norm=True),
    "gemma2": _has(num_norms=4),
    "gemma3_text": _has(num_norms=4, qk_norm=True),
    "gpt2": _learned("n_positions"),
    "gpt_bigcode": _learned("n_positions"),
    "gpt_neo": _learned("max_position_embeddings", qkv_bias=False),
    "opt": _opt,
    "gptj": _gptj,
    "gpt_neox": _gpt_neox,
    "bloom": lambda config, sizes: {**_BIASED, "other_outside_elems": 2 * sizes["hidden"]},
    "falcon": _falcon,
    "mpt": _has(**_LAYER_NORM, norm_bias=False),
    "phi": _phi,
    "phimoe": _has(norm="layer"),
    "stablelm": _stablelm,
    "cohere": _cohere,
    "cohere2": _cohere,
    "starcoder2": _switched("use_bias", True),
    "olmo2": _olmo2,
    "olmo3": _olmo2,
    "olmoe": _olmo2,
    "gpt_oss": _gpt_oss,
    # No bias of the attention's output.
    "glm": _has(other_elems=0),
    "glm4": _has(num_norms=4, other_elems=0),
    "seed_oss": _has(other_elems=0),
    "nemotron": _has(**_LAYER_NORM),
    "arcee": _has(gated=False),
}

# Families whose sizes have been held against transformers' own modules.
KNOWN = {
    *DEFAULTS, *FOUR_HIDDEN, *TIED, *_OTHERWISE, "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "phi3",
    "olmo2", "granite",
}  # fmt: skip
