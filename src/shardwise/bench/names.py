"""The contenders by name: what may be asked for, and what a mistake is told. Pure: no torch.

A name is a family and, after a colon, its one argument: `fsdp2`, `deepspeed:3`, `shardwise:zero3`. The argument of
`shardwise` may be a mapping from unit patterns to presets or rows of the table, as JSON. `@early` behind it asks for
early updates, `@capture` for a CUDA graph of the whole step, `@meta` for a model that is built on the meta device and
never exists whole: `zero3@early@capture`. The argument of `deepspeed` is a stage and what leaves the device:
`3+offload`, or `3+offload:0.6` for a part of the optimizer; or a part of ZeRO++, `3+hpz`.
"""

import json
from dataclasses import dataclass, fields
from typing import Any

from ..base.errors import ConfigurationError, did_you_mean
from ..core.layout import AUTO, MOST_SPLIT, Layout, layout_of

OURS = "shardwise"
OFFLOADED_FSDP2 = "fsdp2+offload"
HSDP = "hsdp"
DEEPSPEED = "deepspeed"
PEERS = ("fsdp2", OFFLOADED_FSDP2, HSDP, "fsdp1", "ddp", DEEPSPEED)
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
    _layout_by(name)
    return name, set(ways)


def is_auto(strategy: str | dict[str, Layout]) -> bool:
    return isinstance(strategy, str) and strategy.lower().partition("+")[0] == AUTO


def _layout_by(name: str) -> Layout:
    """For the planner's choice, what would rest where if it took the preset that splits most."""
    return layout_of(MOST_SPLIT + name[len(AUTO) :] if is_auto(name) else name)


def _row(value: Any) -> str | Layout:
    """A preset's name, or a row of the table written out."""
    if not isinstance(value, dict):
        return value
    known = [field.name for field in fields(Layout)]
    for key in value:
        if key not in known:
            raise ConfigurationError(f"--strategies: a layout has no {key!r}; {did_you_mean(key, known)}")
    return Layout(**value)


@dataclass(frozen=True, slots=True)
class DeepSpeed:
    """What `deepspeed:3+offload:0.6` asks for. `away` is a key of `AWAY`; `ratio` the part of the optimizer.

    `parts` are those of ZeRO++.
    """

    stage: int
    away: str = ""
    ratio: float = 1.0
    parts: tuple[str, ...] = ()


# What may leave the device, and the ZeRO stages that can do it.
AWAY: dict[str, tuple[int, ...]] = {
    "offload": (1, 2, 3),  # the optimizer to the host; at stage 3 parameters too
    "offload_optimizer": (3,),  # parameters stay
    "super_offload": (3,),  # the same, updated by a process of its own
    "nvme": (3,),  # optimizer and parameters to disk
}

# ZeRO++, whole or in parts. DeepSpeed has it at stage 3, and ignores it below.
ZEROPP: dict[str, tuple[str, ...]] = {
    "hpz": ("hpz",),  # a second copy of the parameters, split in the node
    "qwz": ("qwz",),  # parameters travel as int8
    "qgz": ("qgz",),  # gradients travel as int4
    "zeropp": ("hpz", "qwz", "qgz"),
}


def read_deepspeed(argument: str) -> DeepSpeed:
    stage, plus, words = argument.partition("+")
    if stage not in ("0", "1", "2", "3"):
        raise ConfigurationError(
            f"--peers: '{DEEPSPEED}:{argument}'; say which ZeRO stage, {DEEPSPEED}:0 to {DEEPSPEED}:3"
        )
    if not plus:
        return DeepSpeed(int(stage))
    word, colon, part = words.partition(":")
    known = AWAY | dict.fromkeys(ZEROPP, (3,))
    if word not in known:
        raise ConfigurationError(f"--peers: '{DEEPSPEED}:{argument}' asks for {word!r}; {did_you_mean(word, known)}")
    if int(stage) not in known[word]:
        stages = " or ".join(map(str, known[word]))
        raise ConfigurationError(f"--peers: '{DEEPSPEED}:{argument}'; DeepSpeed has {word!r} at stage {stages} only")
    if not colon:
        return DeepSpeed(3, parts=ZEROPP[word]) if word in ZEROPP else DeepSpeed(int(stage), word)
    if stage != "3" or word == "nvme" or word in ZEROPP:
        raise ConfigurationError(
            f"--peers: '{DEEPSPEED}:{argument}'; DeepSpeed moves a part of the optimizer to the host only, at stage 3"
        )
    try:
        ratio = float(part)
    except ValueError:
        ratio = -1.0
    if not 0 < ratio <= 1:
        raise ConfigurationError(f"--peers: '{DEEPSPEED}:{argument}'; {part!r} is no part of the optimizer: write 0.6")
    return DeepSpeed(int(stage), word, ratio)


def peers_in(text: str) -> list[str]:
    """The contenders that `fsdp2,deepspeed:2` asks for."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        family, _, argument = name.partition(":")
        if family not in PEERS:
            raise ConfigurationError(f"--peers: unknown peer {name!r}; {did_you_mean(family, PEERS)}")
        if family == DEEPSPEED:
            read_deepspeed(argument)
        elif argument:
            raise ConfigurationError(f"--peers: {name!r}; {family} takes no {argument!r}")
    return names


def rests_on_disk(contender: str) -> bool:
    """Whether it needs a folder. The planner's choice may use one, and does without where none is given."""
    family, _, argument = contender.partition(":")
    if family == DEEPSPEED:
        return read_deepspeed(argument).away == "nvme"
    if family != OURS:
        return False
    strategy, _ = read_strategy(argument)
    layouts = [_layout_by(strategy)] if isinstance(strategy, str) else strategy.values()
    return any(layout.uses_disk for layout in layouts)


def label(contender: str) -> str:
    """A mix without JSON's punctuation: `shardwise:blocks.[0-7]=zero2 *=zero3`."""
    family, _, argument = contender.partition(":")
    if not argument.startswith("{"):
        return contender
    end = argument.rfind("}") + 1
    rows = json.loads(argument[:end]).items()
    mix = " ".join(f"{pattern}={row if isinstance(row, str) else '(custom)'}" for pattern, row in rows)
    return f"{family}:{mix}{argument[end:]}"
