"""A shape from words: `layers=32,hidden=4096,heads=32,kv-heads=8,ffn=14336,vocab=128256`.

`layers`, `hidden`, `heads` and `vocab` are required. The default is the in-tree transformer: as many key-value heads as
heads, of size hidden / heads, and a gated feed-forward of 8/3 hidden, rounded up to a multiple of 256 (4 hidden with
`gated=no`). `bias` applies to all projections. A feature that the in-tree transformer lacks makes it a model of
transformers. `params=7.5e9` alone is a model for which only the training state is planned.
"""

import re
from typing import Any

from ...base.errors import ConfigurationError, did_you_mean
from .shape import MOST_OF_A_SIZE, ModelShape, StatesOnly

EXAMPLE = "layers=32,hidden=4096,heads=32,kv-heads=8,ffn=14336,vocab=128256"

_NUMBERS = {
    "layers": "layers", "hidden": "hidden", "heads": "heads", "kv-heads": "kv_heads", "head-dim": "head_dim",
    "ffn": "ffn", "vocab": "vocab", "positions": "num_positions", "experts": "num_experts",
    "active-experts": "num_active_experts", "expert-ffn": "expert_ffn", "norms": "num_norms",
}  # fmt: skip
_SWITCHES = {"tied": "tied", "gated": "gated", "bias": "bias", "qkv-bias": "qkv_bias", "qk-norm": "qk_norm"}
_WORDS = {"norm": "norm", "code": "code"}
_KEYS = (*_NUMBERS, *_SWITCHES, *_WORDS, "params")
_NEEDED = ("layers", "hidden", "heads", "vocab")
_SCALES = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def parse_shape(text: str) -> ModelShape | StatesOnly:
    given = _words(text)
    if "params" in given:
        if len(given) > 1:
            other = next(key for key in given if key != "params")
            raise _refused(text, f"params= stands alone, without {other}=: it is for models whose sizes are not known")
        return StatesOnly(_num_params(text, given["params"]))
    missing = [key for key in _NEEDED if key not in given]
    if missing:
        raise _refused(text, f"it lacks {', '.join(missing)}")
    values: dict[str, Any] = {_NUMBERS[key]: _number(text, key, given[key]) for key in _NUMBERS if key in given}
    values |= {_SWITCHES[key]: _switch(text, key, given[key]) for key in _SWITCHES if key in given}
    values |= {key: given[key] for key in _WORDS if key in given}
    hidden, heads = values["hidden"], values["heads"]
    values.setdefault("qkv_bias", values.get("bias", False))
    if "head_dim" not in values:
        if hidden % heads:
            raise _refused(text, f"hidden {hidden} does not divide into {heads} heads; say head-dim=")
        values["head_dim"] = hidden // heads
    values.setdefault("kv_heads", heads)
    values.setdefault("ffn", -(-hidden * 8 // 3 // 256) * 256 if values.get("gated", True) else 4 * hidden)
    if "code" not in values:
        values["code"] = "in-tree" if _is_in_tree(values) else "hf"
    return ModelShape(name=text, **values)


def _is_in_tree(values: dict[str, Any]) -> bool:
    try:
        ModelShape(name="", **values, code="in-tree")
    except ConfigurationError:
        return False
    return True


def _words(text: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for word in (part.strip() for part in text.split(",")):
        key, equals, value = word.partition("=")
        key = key.strip().lower().replace("_", "-")
        if key not in _KEYS:
            raise _refused(text, f"unknown part {word!r}; {did_you_mean(key, _KEYS)}")
        if key in given:
            raise _refused(text, f"{key} is given twice")
        if not equals and key in _SWITCHES:
            value = "yes"
        if not value.strip():
            raise _refused(text, f"{word!r} has no value")
        given[key] = value.strip().lower()
    return given


def _number(text: str, key: str, value: str) -> int:
    digits = value.replace("_", "")
    if not digits.isdecimal() or len(digits) > len(str(MOST_OF_A_SIZE)) or int(digits) < 1:
        raise _refused(
            text, f"{key}={value}, but it must be a whole number of at least 1, and at most {MOST_OF_A_SIZE:,}"
        )
    return int(digits)


def _num_params(text: str, value: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\+?\d+)?)([kmbt]?)", value.replace("_", ""))
    num_params = float(found[1]) * _SCALES[found[2]] if found else 0
    if not 1 <= num_params < 1e18:
        raise _refused(text, f"params={value}, but it must be a number like 7.5e9 or 7.5b")
    return round(num_params)


def _switch(text: str, key: str, value: str) -> bool:
    if value in ("yes", "true", "on", "1"):
        return True
    if value in ("no", "false", "off", "0"):
        return False
    raise _refused(text, f"{key}={value} is neither yes nor no")


def _refused(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"--shape {text!r}: {why}; an example: {EXAMPLE}")
