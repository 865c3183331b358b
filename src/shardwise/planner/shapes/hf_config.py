"""A shape from a Hugging Face config.json.

Sizes have a few names each, under which all families keep them; what families do otherwise than Llama is in
`hf_families.py`. A family that is not there, a model that has more than text, blocks that differ from each other, or
attention that keeps something else than keys and values make no shape (`why_no_shape`): the module itself has to be
counted (`hf_module.py`).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...base.dtypes import FP32, DType, dtype_of
from ...base.errors import ConfigurationError
from ...base.json_file import find, read_object
from .hf_families import DEFAULTS, FOUR_HIDDEN, KNOWN, TIED, Config, Fields, habits_of, switch
from .shape import ModelShape

SHAPE_KEY = "shardwise_shape"  # in what the trainer exports: the in-tree shape itself

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
# Keys that are not 0, and what they mean.
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
# How keys begin that only models have whose blocks differ (Qwen3-Next, Jamba, Bamba).
_NO_ATTENTION = ("linear_", "mamba_", "attn_layer_", "layers_block_type", "hybrid_")
_MORE_THAN_TEXT = ("text_config", "vision_config", "audio_config")
_ATTENTIONS = ("full_attention", "sliding_attention")


def shape_of_config(config: str | Path | Config) -> ModelShape:
    """Of a config.json, the folder it lies in, or what is in it."""
    name, config = read_config(config)
    if why := why_no_shape(config):
        raise ConfigurationError(f"model {name!r}: {why}; this is not planned for by sizes alone")
    if isinstance(config.get(SHAPE_KEY), Mapping):
        return _in_tree(name, config[SHAPE_KEY])
    kind = _kind(config)
    return _shape(name, kind, {**DEFAULTS.get(kind, {}), **_said(config)})


def read_config(config: str | Path | Config) -> tuple[str, Config]:
    """What errors call a model, and what is in its config.json. Weights that cannot be trained are refused."""
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
    """Why sizes alone do not say what a model has; empty: they do."""
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
    """Keys of models that are no row of equal blocks, and why."""
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
