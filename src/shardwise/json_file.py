"""Small JSON files that people hand over: one sentence says what is wrong with one, whatever it holds."""

import json
from pathlib import Path
from typing import Any

from .errors import ConfigurationError

MOST_BYTES = 64 * 10**6


def find(path: str | Path) -> Path | None:
    """The file or folder, a user's home put in for ~; None where there is none, or none can have this name."""
    try:
        found = Path(path).expanduser()
        return found if found.exists() else None
    except (OSError, RuntimeError):
        return None


def read_object(path: Path, what: str) -> dict[str, Any]:
    """`what` begins the sentence."""
    try:
        num_bytes = path.stat().st_size
        value = json.loads(path.read_text(encoding="utf-8")) if num_bytes <= MOST_BYTES else None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{what} cannot be read as JSON: {error}") from None
    except RecursionError:
        raise ConfigurationError(f"{what} cannot be read as JSON: it is nested too deeply") from None
    if num_bytes > MOST_BYTES:
        raise ConfigurationError(
            f"{what} has {num_bytes / 1e6:,.0f} MB, and is not read: such a file has {MOST_BYTES / 1e6:.0f} at most"
        )
    if not isinstance(value, dict):
        raise ConfigurationError(f"{what} holds a {type(value).__name__}, not an object")
    return value
