"""The tables of a library: `deepspeed.yaml`, `accelerate.yaml` and `hugging_face.yaml`, next to this file.

Most keys in a table have a fixed answer, a `Rule`: the type of the key, and what the key becomes, or why it is ignored
or refused. A table is loaded when the first file of its library is read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from importlib import resources
from typing import Any

from ..base.documents import Tree, yaml_tree
from ..trainer.settings import LIMITS, Settings
from .account import Block, Fate, as_flag, as_number, as_text, as_texts, as_word

MAX_DEPTH = 4
# Values that switch an option off.
OFF = ("false", "none", "no", "", "0", "[]", "{}")
FIELDS = {entry.name: entry for entry in fields(Settings)}
# Reads a value as its type; raises ValueError if the value has another type.
Convert = Callable[[Tree], object]


def _as_mapping(value: Tree) -> Tree:
    if not isinstance(value, dict):
        raise ValueError("it is not a mapping of keys to values")
    return value


CONVERTERS: dict[str, Convert] = {
    "any": lambda value: value,
    "flag": as_flag,
    "text": as_text,
    "names": as_texts,
    "number": as_number,
    "positive": partial(as_number, least=0),
    "whole": partial(as_number, is_whole=True),
    "size": partial(as_number, is_whole=True, least=0),
    "count": partial(as_number, is_whole=True, least=1),
    "mapping": _as_mapping,
}


@dataclass(frozen=True, slots=True)
class Rule:
    """The answer for a key. If `refused` has a reason, the key is refused unless its value is one of `unless`."""

    convert: Convert
    fate: Fate
    text: str
    refused: str = ""
    unless: tuple[str, ...] = ()


@cache
def table(library: str) -> dict[str, Tree]:
    """The sections of a library's YAML file."""
    name = f"{library}.yaml"
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return dict(yaml_tree(text, name, MAX_DEPTH))


@cache
def rules(library: str, section: str, prefix: str = "") -> Mapping[str, Rule]:
    """The rules for the keys of one block. Keys may begin with the prefix."""
    known: dict[str, Rule] = {}
    for row in table(library)[section]:
        keys = row["keys"] if isinstance(row["keys"], dict) else dict.fromkeys(row["keys"], "any")
        fate: Fate = "used" if "used" in row else "ignored"
        unless = tuple(word for part in row.get("unless", ["off"]) for word in (OFF if part == "off" else [part]))
        answer = (fate, row.get(fate, "this value changes nothing"), row.get("refused", ""), unless)
        known |= {key: Rule(_converter(kind), *answer) for key, kind in keys.items()}
    return known | {f"{prefix}{key}": rule for key, rule in known.items()}


def apply_rules(block: Block, library: str, section: str, prefix: str = "") -> Block:
    """Record the result for every key of the block that has a rule."""
    for key, rule in rules(library, section, prefix).items():
        is_open = not rule.refused and block.auto(key, "")  # "auto" for a key that is ignored whatever its value
        value = None if is_open else block.read(key, rule.convert, None)
        if rule.refused and _normalised(value) not in rule.unless:
            block.refused(key, rule.refused)
        block.settle(key, rule.fate, rule.text)
    return block


def _converter(kind: str) -> Convert:
    """Return the converter of a type: a name in `CONVERTERS`, or choices (`fp32 | fp16`)."""
    return partial(as_word, choices=kind.split(" | ")) if " | " in kind else CONVERTERS[kind]


def _normalised(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(map(str, value)).lower() if isinstance(value, list) else str(value).lower()


def read_setting(block: Block, key: str, name: str, default: float | None = None, auto: bool = False) -> Any:
    """Set the setting `name` of the trainer from a key, with its type and limits. Return it; None if it has no value.

    `auto` says whether the key may be "auto", which leaves the setting to the trainer.
    """
    if auto and block.auto(key, f"--{name.replace('_', '-')} of the trainer"):
        return None
    value = block.read(key, partial(_as_setting, name), None)
    value = default if value is None else value
    if value is None:
        block.ignored(key, "it is empty")
    else:
        block.sets(key, **{name: value})
    return value


def _as_setting(name: str, value: Tree) -> Any:
    """Convert the value to the type of the setting, and check its limits; None if the text is empty."""
    kind, limits = str(FIELDS[name].type), FIELDS[name].metadata
    bounds = {bound: limits[bound] for bound in ("least", "most") if bound in limits}
    if "int" in kind and "str" not in kind:
        return int(as_number(value, **bounds, is_whole=True))
    if "float" in kind:
        number = as_number(value, **bounds)
        for bound in ("above", "below"):
            if bound in limits and LIMITS[bound][1](number, limits[bound]):
                raise ValueError(f"it must be {bound} {limits[bound]:g}")
        return number
    text = as_text(value)
    return None if text.lower() in ("", "none", "null") else text
