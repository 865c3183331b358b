"""A shape from a name (`llama-3-8b`) or from words (`layers=32,hidden=4096,heads=32,vocab=128256`).

A name with an owner (`meta-llama/Llama-3.2-1B`) means the published model, run by transformers. A name without an owner
means the trainer's in-tree shape of this name, as in `shardwise train --model`, or else the published model. Exception:
MPT without an owner means the models whose speed MosaicML measured, with learned positions and biases. GPT-175B and
GPT-1T are Megatron's. All of them are in `models.json`.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...base.documents import find
from ...base.dtypes import dtype_of
from ...base.errors import ConfigurationError, nearest_names
from ...base.text import key_values
from ..hardware.links import quantity
from ..training import Training
from .hf_config import shape_of_config
from .shape import MOST_OF_A_SIZE, Code, ModelShape, StatesOnly

_DATA: dict[str, Any] = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))


def _shapes(key: str) -> dict[str, ModelShape]:
    found = {}
    for group in _DATA[key]:
        fields = {**group["fields"], "dtype": dtype_of(group["fields"]["dtype"])}
        for row in group["rows"]:
            found[row[0]] = ModelShape(**dict(zip(_DATA["columns"], row, strict=True)), **fields)
    return found


PUBLISHED = _shapes("published")
IN_TREE = _shapes("in-tree")
NAMED = {**PUBLISHED, **_shapes("measured by MosaicML"), **IN_TREE}

NOTES: dict[str, str] = _DATA["notes"]
_ALIASES: dict[str, str] = _DATA["aliases"]
# Suffixes that describe fine-tuning and not the shape.
_VARIANT = r"-(hf|base|instruct(-2507)?|thinking-2507|chat|it|bf16|v0\.[12])(?=-|$)"


def shape_of(model: str) -> ModelShape:
    """Return the shape for a value of `--model`: a name, a config.json, or its folder."""
    return shape_of_config(model) if is_file(model) else shape_named(model)


def is_file(model: str) -> bool:
    """Return True for a config.json or its folder, False for the name of a shape."""
    path = find(model) if model.strip() else None
    return model not in IN_TREE and (model.endswith(".json") or (path is not None and path.is_dir()))


def shape_named(name: str) -> ModelShape:
    """Look up a shape; case, hyphens, underscores and suffixes of fine-tuning (`-Instruct`) are ignored."""
    if not name.strip():
        raise ConfigurationError("model: its name is empty; give one like llama-3-8b, a config.json, or its folder")
    owner, _, bare = name.strip().lower().rpartition("/")
    known = PUBLISHED if owner else NAMED
    words = re.sub(_VARIANT, "", bare.replace("_", "-")).removeprefix("meta-")
    words = _ALIASES.get(bare, _ALIASES.get(words, words))
    found = {_letters(key): shape for key, shape in known.items()}.get(_letters(words))
    if found is None:
        hint = "" if name.startswith(("/", ".", "~")) else f"; {nearest_names(words, known)}"  # none for a path
        raise ConfigurationError(
            f"model {name!r}: no shape has this name, and there is no such file or folder{hint or '.'} "
            "Or give a config.json, or --shape layers=..."
        )
    return replace(found, name=name.strip()) if owner else found


def coded(shape: ModelShape, training: Training) -> ModelShape:
    """Return the shape with the model code that `training` asks for. By default, models known by name without an owner
    run torchtitan's code under FSDP2, if it has such blocks; in-tree shapes run transformers' under other engines."""
    if training.code != "auto":
        return replace(shape, code=training.code)
    if training.engine == "shardwise" or (shape.code != "in-tree" and shape.name not in NAMED):
        return shape
    usual: dict[str, Code] = {"fsdp2": "titan"}
    try:
        return replace(shape, code=usual.get(training.engine, "hf"))
    except ConfigurationError:  # torchtitan has no such blocks
        return shape


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name)


EXAMPLE = "layers=32,hidden=4096,heads=32,kv-heads=8,ffn=14336,vocab=128256"
_FIELDS = {"positions": "num_positions", "experts": "num_experts", "active-experts": "num_active_experts",
           "norms": "num_norms"}  # fmt: skip
_NUMBERS = ("layers", "hidden", "heads", "kv-heads", "head-dim", "ffn", "vocab", "expert-ffn", *_FIELDS)
_SWITCHES = ("tied", "gated", "bias", "qkv-bias", "qk-norm")
_KEYS = (*_NUMBERS, *_SWITCHES, "norm", "code", "params")
_BOOLEANS = dict.fromkeys(("yes", "true", "on", "1"), True) | dict.fromkeys(("no", "false", "off", "0"), False)
_SCALES = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def parse_shape(text: str) -> ModelShape | StatesOnly:
    """Parse a shape. `layers`, `hidden`, `heads` and `vocab` are required. The default is the in-tree transformer: as
    many key-value heads as heads, of size hidden / heads, and a gated feed-forward of 8/3 hidden, rounded up to a
    multiple of 256 (4 hidden with `gated=no`). `bias` applies to all projections. With a feature that the in-tree
    transformer lacks, it is a model of transformers. `params=7.5e9` alone plans the training state only."""

    def refused(why: str) -> ConfigurationError:
        return ConfigurationError(f"--shape {text!r}: {why}; an example: {EXAMPLE}")

    words = [word.strip().lower() for word in text.split(",")]
    words = [f"{word}=yes" if word.replace("_", "-") in _SWITCHES else word for word in words]
    given = key_values(words, _KEYS, refused)
    if "params" in given:
        if len(given) > 1:
            raise refused("params= stands alone: it is for models whose sizes are not known")
        num_params = quantity(given["params"].replace("_", ""), _SCALES) or 0
        if not 1 <= num_params < 1e18:
            raise refused(f"params={given['params']}, but it must be a number like 7.5e9 or 7.5b")
        return StatesOnly(round(num_params))
    if missing := [key for key in ("layers", "hidden", "heads", "vocab") if key not in given]:
        raise refused(f"it lacks {', '.join(missing)}")
    values: dict[str, Any] = {}
    for key, word in given.items():
        value: Any = word
        if key in _SWITCHES:
            value = _BOOLEANS.get(word)
            if value is None:
                raise refused(f"{key}={word} is neither yes nor no")
        elif key in _NUMBERS:
            digits = word.replace("_", "")
            if not re.fullmatch("0*[1-9][0-9]{0,9}", digits) or int(digits) > MOST_OF_A_SIZE:
                raise refused(f"{key}={word}, but it must be a whole number from 1 to {MOST_OF_A_SIZE:,}")
            value = int(digits)
        values[_FIELDS.get(key, key.replace("-", "_"))] = value
    values.setdefault("qkv_bias", values.get("bias", False))
    hidden = values["hidden"]
    values.setdefault("ffn", -(-hidden * 8 // 3 // 256) * 256 if values.get("gated", True) else 4 * hidden)
    if "code" not in values:
        try:
            return ModelShape(name=text, **values, code="in-tree")
        except ConfigurationError:
            pass
    return ModelShape(name=text, **values)
