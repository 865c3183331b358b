"""JSON files from users: whatever they hold, an error says in one sentence what is wrong."""

import json
from pathlib import Path
from typing import Any

from .errors import ConfigurationError
from .regular_file import read_regular

MOST_BYTES = 64 * 10**6
# An empty list is two characters, and takes thirty times as many bytes in memory. Ordinary files have few of them: a
# file may have this many lists and objects, and one more for every eight of its bytes.
MANY_BRACKETS = 1_000_000


def find(path: str | Path) -> Path | None:
    """Expand ~ and return the file or folder; None where it does not exist or cannot have this name."""
    try:
        found = Path(path).expanduser()
        return found if found.exists() else None
    except (OSError, RuntimeError):
        return None


def parse(text: str | bytes) -> Any:
    """Parse a value, in memory of about ten times the text. Raises ValueError."""
    content = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    num_brackets = content.count(b"[") + content.count(b"{")
    if num_brackets > MANY_BRACKETS + len(content) // 8:
        raise ValueError(f"it has {num_brackets:,} lists and objects in {len(content):,} bytes, too many to be read")
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_object(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON object; `what` names it in errors."""
    try:
        value = parse(read_regular(path, MOST_BYTES))
    except OSError as error:
        raise ConfigurationError(f"{what} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigurationError(f"{what} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{what} holds a {type(value).__name__}, not an object")
    return value
