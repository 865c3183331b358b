"""Small JSON files that people hand over: one sentence says what is wrong with one, whatever it holds."""

import json
from pathlib import Path
from typing import Any

from .errors import ConfigurationError

MOST_BYTES = 64 * 10**6


def read_object(path: Path, what: str) -> dict[str, Any]:
    """`what` begins the sentence. A file that is not there is an OSError's business, like all that cannot be read."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MOST_BYTES:
            raise ConfigurationError(
                f"{what} has {num_bytes / 1e6:,.0f} MB, and is not read: such a file has {MOST_BYTES / 1e6:.0f} at most"
            )
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{what} cannot be read as JSON: {error}") from None
    except RecursionError:
        raise ConfigurationError(f"{what} cannot be read as JSON: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{what} holds a {type(value).__name__}, not an object")
    return value
