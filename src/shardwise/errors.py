"""The errors users see. Each names the thing, both values that disagree, and the fix."""

import difflib
from collections.abc import Iterable


class ShardwiseError(Exception):
    """Anything shardwise refuses or fails at."""


class ConfigurationError(ShardwiseError, ValueError):
    """What was asked for cannot be done; raised before anything ran."""


class WireError(ShardwiseError, RuntimeError):
    """A collective failed, or the ranks do not agree."""


class StateError(ShardwiseError, RuntimeError):
    """A sharded model or optimizer was touched in a way, or at a time, that cannot be right."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint could not be written, is not whole, or is of something else."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The known words, with the nearest one first in the sentence when there is one."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}known: {', '.join(names)}"
