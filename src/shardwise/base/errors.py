"""The errors users see. Each names the thing, both values that disagree, and the fix.

`exit_code` is the exit code of a command that ends with the error. 1 is a crash, after which a launcher may restart the
command. After any other code a restart would fail in the same way.
"""

import dataclasses
import difflib
import logging
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, get_args


def printable(text: str) -> str:
    """Escape characters that cannot be printed or would move the cursor, and also line breaks."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def printable_lines(text: str) -> str:
    """Do the same as `printable`, but keep line breaks."""
    return "\n".join(map(printable, text.split("\n")))


class ShardwiseError(Exception):
    """Base of all errors of shardwise. Its text may contain names from files, so it is made printable."""

    exit_code = 1
    has_lines = False  # False: the text is one line, and line breaks in it are escaped

    def __str__(self) -> str:
        return printable_lines(super().__str__()) if self.has_lines else printable(super().__str__())


class ConfigurationError(ShardwiseError, ValueError):
    """A request that cannot be carried out; raised before anything ran."""

    exit_code = 2


class MemoryExceededError(ConfigurationError):
    """The request needs more memory than there is."""

    exit_code = 3
    has_lines = True


class DivergenceError(ShardwiseError, RuntimeError):
    """Training has diverged."""

    exit_code = 4


class WireError(ShardwiseError, RuntimeError):
    """A collective failed, or the ranks do not agree."""

    has_lines = True


class StoreError(ShardwiseError, RuntimeError):
    """Memory or a disk with training state or data failed, or returned bytes that differ from those written."""


class PlaceError(StoreError, ConfigurationError):
    """The requested place for state cannot be used; raised before anything ran."""


class NoRoomError(PlaceError, MemoryExceededError):
    """The requested place for state has too little room; raised before anything ran."""


class StateError(ShardwiseError, RuntimeError):
    """A sharded model or optimizer was used in a way, or at a time, that cannot be right."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint is incomplete, or belongs to another model."""

    exit_code = 5


class DamageError(CheckpointError):
    """A checkpoint is incomplete or was changed after it was written; an older one may be good."""


class SaveError(CheckpointError):
    """A checkpoint could not be written; older ones are unchanged. Another try may succeed."""

    exit_code = 1


def import_library(name: str, what: str) -> Any:
    """Import a library of Hugging Face, which `what` needs. Such libraries may import torchao; its warnings about
    features that are not used here are turned off."""
    for noisy in ("torchao", "torch.utils._pytree"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigurationError(f"{what} needs {name}: install shardwise[hf]") from error


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that starts with this one or is most similar to it; None if there is none. A short word may
    have one wrong letter. Longer words must be more similar: `temperature` is no misspelling of `template`."""
    names = sorted(known)
    begun = [name for name in names if len(word) >= 3 and name.startswith(word)]
    alike = 0.6 if 3 <= len(word) <= 5 else 0.8
    return next(iter(begun or difflib.get_close_matches(word, names, n=1, cutoff=alike)), None)


def nearest_names(word: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name of which there are many, such as a model: the three nearest, those that contain
    it, or all names if none is near. Only letters and digits count, the first ones most."""

    def likeness(name: str) -> float:
        own, other = ("".join(filter(str.isalnum, text.lower())) for text in (word, name))
        match = difflib.SequenceMatcher(None, own, other)
        begin = next((same.size for same in match.get_matching_blocks() if same.a == same.b == 0), 0)
        return max(begin / (len(own) + len(other) or 1) + match.ratio() / 2, match.ratio() * 0.7)

    names = sorted(known)
    near = [name for name in sorted(names, key=likeness, reverse=True)[:3] if likeness(name) > 0.4]
    near = near or [name for name in names if word and word.lower() in name.lower()][:5]  # `8b`
    *first, last = map(repr, near or [""])
    return f"did you mean {', '.join(first)}{' or ' * bool(first)}{last}?" if near else f"known: {', '.join(names)}."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown word: the nearest known word, if there is one, and the list of all known words."""
    names = sorted(known)
    near = nearest(word, names)
    hint = "" if near is None else f"did you mean {near!r}? "
    return f"{hint}known: {', '.join(names)}"


# Limits for `require_limits`.
ABOVE_0, FINITE = 1e-9, sys.float_info.max  # rates below would make times infinite


def require_limits(what: str, record: Any, limits: Mapping[str, tuple[float, float]]) -> None:
    """Refuse a dataclass with a number outside of its limits. The limits themselves are allowed. A field of type int
    takes whole numbers only. An optional field may also be None."""
    types = {entry.name: entry.type for entry in dataclasses.fields(record)}
    for name, (least, most) in limits.items():
        value, kinds = getattr(record, name), get_args(types[name]) or (types[name],)
        if value is None and type(None) in kinds:
            continue
        is_number = type(value) is int or (type(value) is float and float in kinds)
        if not is_number or not least <= value <= most:
            number = "a number" if float in kinds else "a whole number"
            between = f"of at least {least:,}" if most > 1e30 else f"from {least:,} to {most:,}"
            between = "above 0" if least == ABOVE_0 else between
            raise ConfigurationError(f"{what}: {name} is {value!r}, but must be {number} {between}")
