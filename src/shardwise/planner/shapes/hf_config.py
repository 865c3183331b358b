"""A shape from a Hugging Face config.json.

Every size has a few possible keys; the tables below say how families differ from Llama. An unknown family, a model for
more than text, blocks that differ from each other, or attention without plain keys and values cannot be expressed as a
shape (`why_no_shape`): the module itself has to be counted (`hf_module.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...base.dtypes import FP32, DType, dtype_of
from ...base.errors import ConfigurationError
from ...base.json_file import find, read_object
from .shape import ModelShape

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
# Families whose feed-forward is four times the hidden size by default.
FOUR_HIDDEN = {"gpt2", "gptj", "gpt_bigcode", "gpt_neo", "bloom", "falcon", "mpt"}
# Families whose output projection is the embedding by default.
TIED = {
    "gpt2", "gpt_bigcode", "gpt_neo", "opt", "bloom", "falcon", "mpt", "gemma", "gemma2", "gemma3_text", "cohere",
    "cohere2", "starcoder2", "smollm3",
}  # fmt: skip

_LAYER_NORM = {"norm": "layer", "gated": False}


def habits_of(kind: str, config: Config, sizes: Fields) -> Fields:
    """Return the fields in which a family differs from Llama. `kind`: the config's model_type."""
    return {**_biases(config, sizes), **_OTHERWISE.get(kind, _has())(config, sizes)}


def switch(config: Config, key: str, default: bool = False) -> bool:
    """Read a boolean; text such as "false" is refused."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ConfigurationError(f"config.json: {key} is {value!r}, but must be true or false")
    return value


def _biases(config: Config, sizes: Fields) -> Fields:
    """Read Llama's biases: one switch for the four projections of attention, one for the feed-forward."""
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
    """GPT-2's fields, with the number of learned positions in the config plus `more`."""

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
    """Add biases of the feed-forward only."""
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
    """Add norms of queries and keys over all heads together."""
    return {"other_elems": _biases(config, sizes)["other_elems"] + _norms_of_heads(sizes)}


def _norms_of_heads(sizes: Fields) -> int:
    return int((sizes["heads"] + sizes["kv_heads"]) * sizes["head_dim"])


def _gpt_oss(config: Config, sizes: Fields) -> Fields:
    """Add a sink for every head, and biases of the output, the router and the experts."""
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

# Families whose sizes were compared with transformers' own modules.
KNOWN = {
    *DEFAULTS, *FOUR_HIDDEN, *TIED, *_OTHERWISE, "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "phi3",
    "olmo2", "granite",
}  # fmt: skip


SHAPE_KEY = "shardwise_shape"  # the in-tree shape, in a config that the trainer exports

_SIZES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "vocab": ("vocab_size",),
}
_FFN = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_EXPERTS = ("num_local_experts", "num_experts", "moe_num_experts")
_EXPERT_FFN = ("moe_intermediate_size", "intermediate_size")
QUANTISED = "quantization_config"
# Keys that rule out a shape unless they are 0, and why.
_NO_SHAPE = {
    "is_encoder_decoder": "it has an encoder",
    "kv_lora_rank": "attention keeps a latent vector in place of keys and values",
    "n_routed_experts": "experts are routed as DeepSeek's are",
    "n_shared_experts": "some experts are shared by all tokens",
    "num_shared_experts": "some experts are shared by all tokens",
    "shared_expert_intermediate_size": "some experts are shared by all tokens",
    "first_k_dense_replace": "some blocks have no experts",
    "mlp_only_layers": "some blocks have no experts",
    "interleave_moe_layer_step": "some blocks have no experts",
}
# Prefixes of keys that only models with different blocks have (Qwen3-Next, Jamba, Bamba).
_NO_ATTENTION = ("linear_", "mamba_", "attn_layer_", "layers_block_type", "hybrid_")
_MORE_THAN_TEXT = ("text_config", "vision_config", "audio_config")
_ATTENTIONS = ("full_attention", "sliding_attention")


def shape_of_config(config: str | Path | Config) -> ModelShape:
    """The shape of a config.json: its path, its folder, or its contents."""
    name, config = read_config(config)
    if why := why_no_shape(config):
        raise ConfigurationError(f"model {name!r}: {why}; this is not planned for by sizes alone")
    if isinstance(config.get(SHAPE_KEY), Mapping):
        return _in_tree(name, config[SHAPE_KEY])
    kind = _kind(config)
    return _shape(name, kind, {**DEFAULTS.get(kind, {}), **_said(config)})


def read_config(config: str | Path | Config) -> tuple[str, Config]:
    """The name of a model for errors, and the contents of its config.json. Refuse untrainable weights."""
    if isinstance(config, Mapping):
        name = str(config.get("_name_or_path") or config.get("model_type") or "config")
    else:
        name, config = str(config), _read(config)
    if config.get(QUANTISED):
        raise ConfigurationError(
            f"model {name!r}: its config.json has {QUANTISED}: weights are quantised, which cannot be trained; use the "
            "unquantised ones, or take this key out of the file"
        )
    return name, config


def why_no_shape(config: Config) -> str:
    """Return why sizes alone do not describe the model; empty if they do."""
    if isinstance(config.get(SHAPE_KEY), Mapping):
        return ""
    kind = _kind(config)
    if more := [key for key in _MORE_THAN_TEXT if isinstance(config.get(key), Mapping)]:
        return f"its config.json has {' and '.join(more)}: it is made of several models"
    if kind not in KNOWN:
        return f"its model_type {kind!r} is none of those whose sizes are known here"
    for key, why in _peculiarities({**DEFAULTS.get(kind, {}), **_said(config)}):
        return f"its config.json has {key}: {why}"
    return ""


def _kind(config: Config) -> str:
    return str(config.get("model_type", ""))


def _said(config: Config) -> Fields:
    return {key: value for key, value in config.items() if value is not None}


def _peculiarities(config: Config) -> Iterator[tuple[str, str]]:
    """Yield keys of models that are not a chain of equal blocks, and their meaning."""
    yield from ((key, why) for key, why in _NO_SHAPE.items() if config.get(key))
    if config.get("decoder_sparse_step", 1) != 1:
        yield "decoder_sparse_step", "some blocks have no experts"
    for key, value in config.items():
        if value and key.startswith(_NO_ATTENTION):
            yield key, "some blocks have something else than attention"
    kinds = config.get("layer_types", [])
    if not isinstance(kinds, list):
        yield "layer_types", f"{kinds!r} is no list of them"
    elif other := [kind for kind in kinds if kind not in _ATTENTIONS]:
        yield "layer_types", f"{other[0]!r} is no plain attention"


def _shape(name: str, kind: str, config: Config) -> ModelShape:
    missing = [" or ".join(keys) for keys in _SIZES.values() if _first(config, keys) is None]
    has_ffn = kind in FOUR_HIDDEN or _first(config, (*_FFN, *_EXPERT_FFN)) is not None
    missing += [] if has_ffn else [" or ".join(_FFN)]
    if _first(config, _EXPERTS) is not None and "num_experts_per_tok" not in config:
        missing.append("num_experts_per_tok")
    if missing:
        raise ConfigurationError(f"model {name!r}: its config.json has no {', no '.join(missing)}")
    fields: Fields = {size: _whole(name, config, keys) for size, keys in _SIZES.items()}
    hidden, heads = fields["hidden"], fields["heads"]
    fields["kv_heads"] = _whole(name, config, _KV_HEADS, heads)
    if config.get("head_dim") is None and hidden % heads:
        raise ConfigurationError(
            f"model {name!r}: its config.json has no head_dim, and {hidden} does not divide into {heads} heads"
        )
    fields["head_dim"] = _whole(name, config, ("head_dim",), hidden // heads)
    fields["ffn"] = _whole(name, config, (*_FFN, *_EXPERT_FFN), 4 * hidden)
    if _first(config, _EXPERTS) is not None:
        fields["num_experts"] = _whole(name, config, _EXPERTS)
        fields["num_active_experts"] = _whole(name, config, ("num_experts_per_tok",))
        fields["expert_ffn"] = _whole(name, config, _EXPERT_FFN)
    fields["tied"] = switch(config, "tie_word_embeddings", kind in TIED)
    fields |= habits_of(kind, config, fields)
    return ModelShape(name=name, dtype=_dtype(name, config), **fields)


def _in_tree(name: str, sizes: Mapping[str, Any]) -> ModelShape:
    keys = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    missing = [key for key in keys if type(sizes.get(key)) is not int or sizes[key] < 1]
    if missing:
        raise ConfigurationError(f"model {name!r}: the {SHAPE_KEY} in its config.json has no {', no '.join(missing)}")
    head_dim = sizes["hidden"] // sizes["heads"]
    values = {key: sizes[key] for key in keys}
    return ModelShape(name=name, head_dim=head_dim, tied=switch(sizes, "tied"), code="in-tree", **values)


def _first(config: Config, keys: tuple[str, ...]) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _whole(name: str, config: Config, keys: tuple[str, ...], default: int | None = None) -> int:
    key = next((key for key in keys if config.get(key) is not None), None)
    value = default if key is None else config[key]
    if type(value) is not int or value < 1:
        raise ConfigurationError(
            f"model {name!r}: {key or keys[0]} in its config.json is {value!r}, not a whole number of at least 1"
        )
    return value


def _dtype(name: str, config: Config) -> DType:
    key = "dtype" if "dtype" in config else "torch_dtype"
    given = config.get(key, FP32.name)
    if not isinstance(given, str):
        raise ConfigurationError(f"model {name!r}: {key} in its config.json is {given!r}, not a word like 'bfloat16'")
    return dtype_of(given)


def _read(given: str | Path) -> Config:
    path = find(given)
    if path is not None and path.is_dir():
        path = find(path / "config.json")
        given = Path(given, "config.json")
    if path is None:
        raise ConfigurationError(f"model {str(given)!r}: there is no such file")
    return read_object(path, f"model {str(given)!r}")
