"""Keys that need no thought, as tables: what type each has, and why it is ignored or refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .account import Block

Kind = Literal["flag", "whole", "number", "text", "texts", "mapping", "any"]
OFF = ("false", "none", "no", "", "0", "[]", "{}")


@dataclass(frozen=True, slots=True)
class Rule:
    kind: Kind
    why: str
    # Values with which it asks for nothing, and is ignored; any other is refused. None: it is ignored whatever it says.
    off: tuple[str, ...] | None = None


def ignored(kind: Kind, why: str) -> Rule:
    return Rule(kind, why)


def refused(kind: Kind, why: str, off: tuple[str, ...] = OFF) -> Rule:
    return Rule(kind, why, off)


def settle(block: Block, rules: Mapping[str, Rule]) -> None:
    """Say what becomes of every key of the table that is written in the block; a wrong type is refused."""
    for key, rule in rules.items():
        if not block.has(key):
            continue
        text = _text(block, key, rule.kind)
        if rule.off is None:
            block.ignored(key, rule.why)
        elif text in rule.off:
            block.ignored(key, "it asks for nothing that is not so anyway")
        else:
            block.refused(key, rule.why)


def _text(block: Block, key: str, kind: Kind) -> str:
    """The value in one spelling; to read it as its type is to check it."""
    if kind == "flag":
        return str(block.flag(key)).lower()
    if kind == "whole":
        return str(block.whole(key))
    if kind == "number":
        return f"{block.number(key):g}"
    if kind == "text":
        return block.text(key).lower()
    if kind == "texts":
        return ",".join(block.texts(key)).lower()
    value = block.values[key]
    if kind == "mapping" and not isinstance(value, dict):
        block.refused(key, "it is no mapping of keys to values")
    return str(value).lower()
