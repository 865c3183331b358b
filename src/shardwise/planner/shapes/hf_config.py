"""Reads a Hugging Face config.json as a `ModelShape` or, if sizes alone do not describe it, as a meta-device module.

`families.json` lists how model families differ from Llama, and under which keys a config has its sizes. A model has no
shape (`why_no_shape`) if its family is unknown, it takes more than text, its blocks differ, or its attention has no
plain keys and values. Then transformers builds the module. Nothing is downloaded; no code of a model repository runs.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.documents import find, read_object
from ...base.dtypes import FP32, dtype_of
from ...base.errors import ConfigurationError, import_library
from .shape import ModelShape

if TYPE_CHECKING:
    from torch import nn

Config = Mapping[str, Any]
Fields = dict[str, Any]

_DATA: dict[str, Any] = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))
# Supported families by the config's model_type. Their sizes were compared with transformers' own modules.
FAMILIES: dict[str, Fields] = _DATA["families"]
_KEYS: dict[str, list[str]] = _DATA["keys of a size"]
SHAPE_KEY = "shardwise_shape"  # key of the in-tree shape, in a config that the trainer exports
QUANTISED = "quantization_config"
# Keys of a quantization_config in the form of nf4 that can be used as it is.
NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
}


def is_nf4(about: object) -> bool:
    """True for a `quantization_config` of bitsandbytes' 4-bit layers, in the form that can be used as it is."""
    return isinstance(about, dict) and all(about.get(key) == value for key, value in NF4.items())


def _read_bool(config: Config, key: str, default: bool = False) -> bool:
    """Read a boolean. A text such as "false" is an error."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ConfigurationError(f"config.json: {key} is {value!r}, but must be true or false")
    return value


def _biases(config: Config, sizes: Fields) -> Fields:
    """Read Llama's two bias options: one for the four projections of attention, one for the feed-forward."""
    attention, ffn = _read_bool(config, "attention_bias"), _read_bool(config, "mlp_bias")
    if attention == ffn:
        return {"qkv_bias": attention, "bias": ffn, "other_elems": 0}
    return {"qkv_bias": attention, "other_elems": sizes["hidden"] + (2 * sizes["ffn"] if ffn else 0)}


def _falcon(config: Config, sizes: Fields) -> Fields:
    if _read_bool(config, "new_decoder_architecture"):
        return {"num_norms": config.get("num_ln_in_parallel_attn") or 2}
    num_norms = 1 if _read_bool(config, "parallel_attn", True) else 2
    return {"num_norms": num_norms, "kv_heads": 1 if _read_bool(config, "multi_query", True) else sizes["heads"]}


def _head_dim(sizes: Fields) -> int:
    return int(sizes.get("head_dim") or sizes["hidden"] // sizes["heads"])


def _fields_of_family(config: Config, sizes: Fields) -> Fields:
    """Apply the columns of families.json, in the order in which later ones replace earlier ones."""
    family = FAMILIES[config["model_type"]]
    fields = {**_biases(config, sizes), **family.get("fields", {})}
    for name, terms in family.get("sums", {}).items():
        fields[name] = sum(sizes[term] if isinstance(term, str) else term for term in terms)
    for key, (default, if_true, if_false) in family.get("switches", {}).items():
        fields |= if_true if _read_bool(config, key, default) else if_false
    if "rotary" in family:
        key, default = family["rotary"]
        share = config.get(key, (config.get("rope_parameters") or {}).get("partial_rotary_factor", default))
        fields["rotary_dim"] = int(share * _head_dim(sizes))
    if config["model_type"] == "stablelm" and _read_bool(config, "qk_layernorm"):  # a norm for each head
        fields["other_elems"] = (sizes["heads"] + sizes["kv_heads"]) * _head_dim(sizes)
    return {**fields, **_falcon(config, sizes)} if config["model_type"] == "falcon" else fields


def shape_of_config(config: str | Path | Config) -> ModelShape:
    """Return the shape of a config.json, which is given as its path, its folder or its contents."""
    name, config = read_config(config)
    if why := why_no_shape(config):
        raise ConfigurationError(f"model {name!r}: {why}; this is not planned for by sizes alone")
    if isinstance(in_tree := config.get(SHAPE_KEY), Mapping):
        keys = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
        sizes: Fields = {key: in_tree.get(key) or None for key in keys}
        return ModelShape(name=name, tied=_read_bool(in_tree, "tied"), code="in-tree", **sizes)
    config = _with_defaults(config)
    fields = _read_sizes(name, config)
    is_tied = FAMILIES[config["model_type"]].get("tied", False)
    fields["tied"] = _read_bool(config, "tie_word_embeddings", is_tied)
    fields |= _fields_of_family(config, fields)
    num_shared, _ = fields.pop("num_shared", 0), fields.pop("plain_dim", 0)
    fields["shared_ffn"] = fields.get("shared_ffn") or num_shared * fields.get("expert_ffn", 0)
    dtype = config.get("dtype", config.get("torch_dtype", FP32.name))
    if not isinstance(dtype, str):
        raise ConfigurationError(
            f"model {name!r}: the dtype in its config.json is {dtype!r}, not a word like 'bfloat16'"
        )
    return ModelShape(name=name, dtype=dtype_of(dtype), **fields)


def read_config(config: str | Path | Config) -> tuple[str, Config]:
    """Return the model's name, for errors, and the contents of its config.json. Quantised weights are an error."""
    if isinstance(config, Mapping):
        name = str(config.get("_name_or_path") or config.get("model_type") or "config")
    else:
        name, path = str(config), find(config)
        if path is not None and path.is_dir():
            path = find(path / "config.json")
        if path is None:
            raise ConfigurationError(f"model {name!r}: there is no such file, or no config.json in this folder")
        config = read_object(path, f"model {name!r}")
    if config.get(QUANTISED) and not is_nf4(config[QUANTISED]):
        raise ConfigurationError(
            f"model {name!r}: its config.json has {QUANTISED}: weights are quantised in another way than nf4 of "
            "bitsandbytes with double quantisation; use the unquantised ones, or take this key out of the file"
        )
    return name, config


def why_no_shape(config: Config) -> str:
    """Return why sizes alone do not describe the model; empty if they do."""
    if isinstance(config.get(SHAPE_KEY), Mapping):
        return ""
    kind = str(config.get("model_type", ""))
    part_keys = ("text_config", "vision_config", "audio_config")
    if parts := [key for key in part_keys if isinstance(config.get(key), Mapping)]:
        return f"its config.json has {' and '.join(parts)}: it is made of several models"
    if kind not in FAMILIES:
        return f"its model_type {kind!r} is none of those whose sizes are known here"
    for key, why in _obstacles(_with_defaults(config)):
        return f"its config.json has {key}: {why}"
    return ""


def _with_defaults(config: Config) -> Fields:
    defaults = FAMILIES[str(config["model_type"])].get("defaults", {})
    return {**defaults, **{key: value for key, value in config.items() if value is not None}}


_ATTENTIONS = ("full_attention", "sliding_attention", "chunked_attention")


def _obstacles(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key that shows that the model is not a chain of equal blocks, with an explanation."""
    family = FAMILIES[str(config["model_type"])]
    reads = family.get("reads", ())
    known = _DATA["keys of models without a shape"]
    yield from ((key, why) for key, why in known.items() if config.get(key) and key not in reads)
    if config.get("decoder_sparse_step", 1) != 1:
        yield "decoder_sparse_step", "some blocks have no experts"
    for key, wanted in family.get("fixed", {}).items():
        wanted = config.get(wanted) if isinstance(wanted, str) else wanted
        if (value := config.get(key, wanted)) != wanted:
            yield key, f"{value!r}, which sizes do not describe: they describe {wanted!r}"
    for key, value in config.items():
        # Qwen3-Next, Jamba, Bamba
        if (
            value
            and key not in reads
            and key.startswith(("linear_", "mamba_", "attn_layer_", "layers_block_type", "hybrid_"))
        ):
            yield key, "some blocks have something else than attention"
    kinds = config.get("layer_types", [])
    if not isinstance(kinds, list):
        yield "layer_types", f"{kinds!r} is no list of them"
    elif "layer_types" in reads:
        every = config["full_attention_interval"]
        if [kind == "full_attention" for kind in kinds] != [(i + 1) % every == 0 for i in range(len(kinds))]:
            yield "layer_types", f"full attention is not in every {every}th block alone"
    elif other := [kind for kind in kinds if kind not in _ATTENTIONS]:
        yield "layer_types", f"{other[0]!r} is no plain attention"


_OF_EXPERTS = {"num_experts", "num_active_experts", "expert_ffn"}
_OF_LATENT = {"kv_rank", "rope_dim", "value_dim", "plain_dim"}
_MAY_BE_0 = ("dense_layers", "num_shared", "shared_ffn")


def _read_sizes(name: str, config: Config) -> Fields:
    """Return the sizes of `ModelShape`; those that the config does not have get their defaults."""
    family = FAMILIES[config["model_type"]]
    keys_of = {**_KEYS, **family.get("keys", {})}
    keys = {size: next((key for key in known if key in config), "") for size, known in keys_of.items()}
    required = {"layers", "hidden", "heads", "vocab", *family.get("needs", ())}
    if not family.get("four_hidden"):
        required.add("ffn")
    if family.get("has_experts") or keys["num_experts"]:
        required |= _OF_EXPERTS
    if missing := [" or ".join(keys_of[size]) for size in keys_of if size in required and not keys[size]]:
        raise ConfigurationError(f"model {name!r}: its config.json has no {', no '.join(missing)}")
    unused = (_OF_EXPERTS | _OF_LATENT) - required
    read = {size: key for size, key in keys.items() if key and size not in unused}
    for size, key in read.items():
        least = 0 if size in _MAY_BE_0 else 1
        if type(config[key]) is not int or config[key] < least:
            raise ConfigurationError(
                f"model {name!r}: {key} in its config.json is {config[key]!r}, not a whole number of at least {least}"
            )
    sizes: Fields = {size: config[key] for size, key in read.items()}
    return {"kv_heads": sizes["heads"], "ffn": 4 * sizes["hidden"]} | sizes


MOST_LAYERS = 1_000
# transformers' tables of model classes, used if `architectures` names no class; the most complete models first.
_MAPPINGS = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_MAPPING",
)
_ALTERNATIVES = "or give --shape layers=..., or the module itself: sw.plan(model, ...)"


def module_of_config(name: str, config: Config, why: str) -> "nn.Module":
    """Build the module on the meta device. `why`: why sizes are not enough, for the error if it cannot be built."""
    import torch

    transformers = import_library("transformers", f"model {name!r}: {why}, so the model itself is counted, which")
    kind = str(config.get("model_type"))
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigurationError(
            f"model {name!r}: {why}, and transformers {transformers.__version__} does not know it either; install one "
            f"that does, {_ALTERNATIVES}"
        )
    for key, value in _numbers_in(config):
        if ("layer" in key and value > MOST_LAYERS) or (key == "num_hidden_layers" and value < 1):
            raise ConfigurationError(f"model {name!r}: {key} is {value:,}, but 1 to {MOST_LAYERS:,} are planned for")
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            hf_config: Any = transformers.CONFIG_MAPPING[kind].from_dict(_decoded(config))
            return _class_for(transformers, hf_config, config)._from_config(hf_config)
    except Exception as error:  # the code of any transformers model runs here
        reason = str(error).strip().partition("\n")[0].rstrip(":")
        raise ConfigurationError(
            f"model {name!r}: {why}, so the model itself is counted, and transformers cannot build it: "
            f"{type(error).__name__}: {reason}; {_ALTERNATIVES.removeprefix('or ')}"
        ) from error


def num_positions_in(model: "nn.Module") -> int:
    """Return the maximum sequence length of a built model, or 0 if its config has none."""
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    values = (getattr(text, key, None) for key in ("max_position_embeddings", "n_positions", "max_target_positions"))
    return next((value for value in values if type(value) is int and value > 0), 0)


def _class_for(transformers: Any, hf_config: Any, config: Config) -> Any:
    for name in config.get("architectures") or ():
        model_class: Any = getattr(transformers, str(name), None)
        is_model = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
        if is_model and model_class.config_class is type(hf_config):
            return model_class
    for mapping in (getattr(transformers, name) for name in _MAPPINGS):
        if type(hf_config) in mapping:
            model_class = mapping[type(hf_config)]
            return model_class[0] if isinstance(model_class, tuple) else model_class
    raise ValueError("no class of it is one that is trained on tokens or images, and architectures names none")


def _decoded(value: Any) -> Any:
    """Decode numbers that JSON cannot express, which the config has as {"__float__": text}, and switch off the download
    of backbone weights from other libraries."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: False if key == "use_pretrained_backbone" else _decoded(part) for key, part in value.items()}
    return [_decoded(part) for part in value] if isinstance(value, list) else value


def _numbers_in(config: Config) -> Iterator[tuple[str, int]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _numbers_in(value)
        elif type(value) is int:
            yield str(key), value
