"""What the objects in a pickle are read into: inert values, that hold what they were made of and can do nothing."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_MAX_KEY_LENGTH = 64


@dataclass(frozen=True, slots=True)
class Maker:
    """What a pickle's name stands for where values of it are made: `make` takes the arguments as they were written."""

    name: str
    make: Callable[..., Any]


@dataclass(slots=True, eq=False)
class Record:
    """An object that is only described: what it was made of, and the state that it was given."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = field(default=None)

    def get(self, key: str, default: Any = None) -> Any:
        """An attribute, where its state is a mapping."""
        return self.state.get(key, default) if isinstance(self.state, dict) else default


def require_key(key: Any, is_part: bool = False) -> Any:
    """Keys are hashed, which tuples of tuples could make endless."""
    if type(key) is tuple and not is_part and len(key) <= _MAX_KEY_LENGTH:
        for part in key:
            require_key(part, True)
    elif not isinstance(key, (str, int, float, bytes, Record, type(None))):
        raise ValueError(f"a {type(key).__name__} as a key")
    return key
