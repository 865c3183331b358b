"""The contenders by name: what may be asked for, and what a mistake is told. Pure: no torch.

A name is a family and, after a colon, its one argument: `fsdp2`, `deepspeed:3`, `shardwise:zero3`. The argument of
`shardwise` may be a mapping from unit patterns to presets or rows of the table, as JSON. `@early` behind it asks for
early updates, `@capture` for a CUDA graph of the whole step, `@meta` for a model that is built on the meta device and
never exists whole: `zero3@early@capture`.
"""

import json
from dataclasses import fields
from typing import Any

from ..errors import ConfigurationError, did_you_mean
from ..layout import AUTO, Layout, layout_of

OURS = "shardwise"
PEERS = ("fsdp2", "fsdp1", "ddp", "deepspeed")
FLOORS = ("compute", "compute+update")
EXAMPLE = '{"blocks.[0-7]": "zero2", "*": "zero3"}'
WAYS = ("early", "capture", "meta")
SOLO = ("plain", *FLOORS)  # these need no other ranks


def strategies_in(text: str) -> list[str]:
    """The contenders that `zero3,zero2` or `zero3,{"blocks.[0-7]":"zero2","*":"zero3"}` asks for."""
    found, rest = [], text.strip()
    while rest:
        if rest.startswith("{"):
            try:
                mapping, end = json.JSONDecoder().raw_decode(rest)
            except json.JSONDecodeError as error:
                raise ConfigurationError(f"--strategies: {rest!r} is no JSON: {error}; write {EXAMPLE}") from error
            ways, _, rest = rest[end:].partition(",")
            name = json.dumps(mapping, separators=(",", ":")) + ways.strip()
        else:
            name, _, rest = rest.partition(",")
        name, rest = name.strip(), rest.strip()
        if name:
            read_strategy(name)
            found.append(f"{OURS}:{name}")
    return found


def read_strategy(text: str) -> tuple[str | dict[str, Layout], set[str]]:
    """What `sw.shard` takes as its strategy, and the ways it is asked to run."""
    end = text.rfind("}") + 1
    name, *ways = text[end:].split("@")
    for way in ways:
        if way not in WAYS:
            raise ConfigurationError(f"--strategies: {text!r} asks for {way!r}; {did_you_mean(way, WAYS)}")
    if end:
        rows = json.loads(text[:end]).items()
        return {pattern: layout_of(_row(value)) for pattern, value in rows}, set(ways)
    if name.lower() != AUTO:
        layout_of(name)
    return name, set(ways)


def _row(value: Any) -> str | Layout:
    """A preset's name, or a row of the table written out."""
    if not isinstance(value, dict):
        return value
    known = [field.name for field in fields(Layout)]
    for key in value:
        if key not in known:
            raise ConfigurationError(f"--strategies: a layout has no {key!r}; {did_you_mean(key, known)}")
    return Layout(**value)


def peers_in(text: str) -> list[str]:
    """The contenders that `fsdp2,deepspeed:2` asks for."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        family, _, stage = name.partition(":")
        if family not in PEERS:
            raise ConfigurationError(f"--peers: unknown peer {name!r}; {did_you_mean(family, PEERS)}")
        if family == "deepspeed" and stage not in ("0", "1", "2", "3"):
            raise ConfigurationError(f"--peers: {name!r}; say which ZeRO stage, deepspeed:0 to deepspeed:3")
        if family != "deepspeed" and stage:
            raise ConfigurationError(f"--peers: {name!r}; {family} takes no {stage!r}")
    return names


def label(contender: str) -> str:
    """A mix without JSON's punctuation: `shardwise:blocks.[0-7]=zero2 *=zero3`."""
    family, _, argument = contender.partition(":")
    if not argument.startswith("{"):
        return contender
    end = argument.rfind("}") + 1
    rows = json.loads(argument[:end]).items()
    mix = " ".join(f"{pattern}={row if isinstance(row, str) else '(custom)'}" for pattern, row in rows)
    return f"{family}:{mix}{argument[end:]}"
