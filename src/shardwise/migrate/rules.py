"""Keys that need no thought, as tables: what type each has, and why it is ignored or refused."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from .account import Block

# Reads a value as its type, which refuses one of another.
Check = Callable[[Block, str], object]

FLAG: Check = Block.flag
TEXT: Check = Block.text
TEXTS: Check = Block.texts
NUMBER: Check = Block.number
WHOLE: Check = Block.whole
NOT_NEGATIVE: Check = partial(Block.whole, least=0)
FROM_ONE: Check = partial(Block.whole, least=1)

OFF = ("false", "none", "no", "", "0", "[]", "{}")


def MAPPING(block: Block, key: str) -> object:  # noqa: N802, one of the types above
    if not isinstance(block.values[key], dict):
        block.refused(key, "it is no mapping of keys to values")
    return block.values[key]


def ANY(block: Block, key: str) -> object:  # noqa: N802
    return block.values[key]


@dataclass(frozen=True, slots=True)
class Rule:
    check: Check
    why: str
    # Values with which it asks for nothing, and is ignored; any other is refused. None: it is ignored whatever it says.
    off: tuple[str, ...] | None = None


def ignored(check: Check, why: str) -> Rule:
    return Rule(check, why)


def refused(check: Check, why: str, off: tuple[str, ...] = OFF) -> Rule:
    return Rule(check, why, off)


def settle(block: Block, rules: Mapping[str, Rule]) -> None:
    """Say what becomes of every key of the table that is written in the block; a wrong type is refused."""
    for key, rule in rules.items():
        if not block.has(key):
            continue
        value = rule.check(block, key)
        if rule.off is None:
            block.ignored(key, rule.why)
        elif _spelled(value) in rule.off:
            block.ignored(key, "it asks for nothing that is not so anyway")
        else:
            block.refused(key, rule.why)


def _spelled(value: object) -> str:
    """In one way."""
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(map(str, value)).lower() if isinstance(value, list) else str(value).lower()
