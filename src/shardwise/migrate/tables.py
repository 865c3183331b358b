"""Keys with a fixed answer. Each library has a table of them in a YAML file next to this one (`deepspeed.yaml`).

A table is read when a file of its library is. A rule has the type of a key, and why the key is ignored or refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources

from ..base.documents import Tree, yaml_tree
from .account import Block

MAX_DEPTH = 4
# Values with which a key asks for nothing.
OFF = ("false", "none", "no", "", "0", "[]", "{}")
# Reads a value as its type; refuses the key if the value has another type.
Check = Callable[[Block, str], object]


def _mapping(block: Block, key: str) -> object:
    if not isinstance(block.values[key], dict):
        block.refused(key, "it is not a mapping of keys to values")
    return block.values[key]


def _special_tokens(block: Block, key: str) -> object:
    """Tokens without the padding token, which is never trained on."""
    tokens = block.values[key]
    if not isinstance(tokens, dict):
        block.refused(key, "it is not a mapping of names to tokens")
        return {}
    return {name: token for name, token in tokens.items() if name != "pad_token" and token is not None}


CHECKS: dict[str, Check] = {
    "any": lambda block, key: block.values[key],
    "flag": Block.flag,
    "text": Block.text,
    "names": Block.texts,
    "number": Block.number,
    "whole": Block.whole,
    "size": partial(Block.whole, least=0),
    "count": partial(Block.whole, least=1),
    "mapping": _mapping,
    "special tokens": _special_tokens,
}


@dataclass(frozen=True, slots=True)
class Rule:
    """`unless` are values with which a refused key is ignored. None: the key is always ignored."""

    check: Check
    reason: str
    unless: tuple[str, ...] | None = None


@cache
def table(library: str) -> dict[str, Tree]:
    """The sections of a library's YAML file."""
    name = f"{library}.yaml"
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return dict(yaml_tree(text, name, MAX_DEPTH))


@cache
def rules(library: str, block: str) -> Mapping[str, Rule]:
    """The rules for the keys of one block."""
    found: dict[str, Rule] = {}
    for row in table(library)[block]:
        keys = row["keys"] if isinstance(row["keys"], dict) else dict.fromkeys(row["keys"], "any")
        unless = None
        if "refused" in row:
            unless = tuple(word for part in row.get("unless", ["off"]) for word in (OFF if part == "off" else [part]))
        found |= {key: Rule(_check(kind), row.get("refused", row.get("ignored")), unless) for key, kind in keys.items()}
    return found


def apply_rules(block: Block, known: Mapping[str, Rule]) -> None:
    """Settle every key of the block that has a rule."""
    for key, rule in known.items():
        if not block.has(key):
            continue
        value = rule.check(block, key)
        if rule.unless is None:
            block.ignored(key, rule.reason)
        elif _normalised(value) in rule.unless:
            block.ignored(key, "this value changes nothing")
        else:
            block.refused(key, rule.reason)


def with_prefix(known: Mapping[str, Rule], prefix: str) -> dict[str, Rule]:
    """The rules for keys that may begin with a prefix."""
    return {**known, **{f"{prefix}{key}": rule for key, rule in known.items()}}


def _check(kind: str) -> Check:
    """A name of `CHECKS`, words to choose from (`fp32 | fp16`), or either with "or auto"."""
    if kind.endswith(" or auto"):
        inner = _check(kind.removesuffix(" or auto"))
        return lambda block, key: block.auto(key, "") or inner(block, key)
    if " | " in kind:
        return partial(Block.word, choices=kind.split(" | "), default="")
    return CHECKS[kind]


def _normalised(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(map(str, value)).lower() if isinstance(value, list) else str(value).lower()
