"""An account of every key of another library's configuration.

A reader asks a `Block` (the document, or a mapping in it) for values by key and type, and says what each becomes. At
the end `Block.entries` has one entry for every key that was written: used, ignored for a reason, or refused for a
reason. A value of the wrong type and an unknown key are refused; nothing is dropped. After a refusal the reader
continues with the default, so that all errors are reported at once.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..base.documents import Tree, json_tree, read_text, yaml_tree
from ..base.errors import ConfigurationError, did_you_mean, nearest, printable

Fate = Literal["used", "ignored", "refused"]

AUTO = "auto"
# Beginnings of keys that stand for comments where a format has none; no library has such a key.
COMMENTS = ("_", "comment", "//", "#", "$schema")
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
MAX_DEPTH = 12
MAX_SHOWN = 60  # characters of a value
MAX_SUGGESTED = 12  # keys that are listed for an unknown one


@dataclass(frozen=True, slots=True)
class Entry:
    """One key: what it becomes, or why it becomes nothing."""

    key: str  # with its blocks: zero_optimization.stage
    value: str  # as written
    fate: Fate
    text: str  # what it becomes, or why not


class Block:
    """A document, which is called `source` in messages, or a mapping in it, at `path`.

    The blocks of a document share their entries. A block knows which of its keys a reader has asked for.
    """

    def __init__(
        self, values: Mapping[str, Tree], source: str, path: str = "", document: "Block | None" = None
    ) -> None:
        self.values, self.source, self.path = values, source, path
        self._known: set[str] = set()
        self._entries: dict[str, Entry] = {} if document is None else document._entries
        self._blocks: dict[str, Block] = {} if document is None else document._blocks
        self._blocks[path] = self

    def path_of(self, key: str) -> str:
        return f"{self.path}.{name_of(key)}" if self.path else name_of(key)

    # Values

    def has(self, key: str) -> bool:
        """Return True if the key has a value; null is none."""
        self._known.add(key)
        return self.values.get(key) is not None

    def first_of(self, *keys: str, default: str = "") -> str:
        """The first of the keys that is written, else `default`, else the first. A second one is refused."""
        written = [key for key in keys if self.has(key)]
        for key in written[1:]:
            self.refused(key, f"{written[0]} is written, too; leave one of them")
        return written[0] if written else default or keys[0]

    def auto(self, key: str, becomes: str) -> bool:
        """Return True if the value is "auto", and record what that becomes."""
        if not self.has(key) or str(self.values[key]).lower() != AUTO:
            return False
        self.used(key, becomes)
        return True

    def inner(self, key: str) -> "Block":
        """The mapping under a key; empty if there is none."""
        value = self.values[key] if self.has(key) else {}
        if not isinstance(value, dict):
            self.refused(key, "it is not a mapping of keys to values")
            value = {}
        return self._blocks.get(self.path_of(key)) or Block(value, self.source, self.path_of(key), self)

    def inner_file(self, key: str, folder: Path) -> "Block":
        """The file that a key names; its entries stand under the key. An unreadable file is refused, and empty.

        The working directory comes first, as in Accelerate, the Trainer, LLaMA-Factory and Axolotl; then `folder`,
        which has the file that names it.
        """
        name, tree = self.text(key), {}
        if not name:
            self.refused(key, "it names no file")
        else:
            try:
                path, where = _place_of(Path(name).expanduser(), folder)
                tree = mapping_in(path)
                self.used(key, f"read from {printable(str(path))}{where}: its keys follow")
            except (ConfigurationError, OSError, ValueError, RuntimeError) as error:  # no home, a name too long
                self.refused(key, str(error))
        return Block(tree, self.source, self.path_of(key), self)

    def text(self, key: str, default: str = "") -> str:
        return str(self.values[key]).strip() if self._is_scalar(key) else default

    def word(self, key: str, choices: Iterable[str], default: str) -> str:
        """One of the choices, written in any capitals."""
        if not self._is_scalar(key):
            return default
        known = {choice.lower(): choice for choice in choices}
        chosen = known.get(str(self.values[key]).lower())
        if chosen is None:
            self.refused(key, f"it is unknown; {did_you_mean(str(self.values[key]), known.values())}")
        return default if chosen is None else chosen

    def flag(self, key: str, default: bool = False) -> bool:
        if not self._is_scalar(key):
            return default
        word = str(self.values[key]).lower()
        if word not in TRUE + FALSE:
            self.refused(key, "it is not true or false")
            return default
        return word in TRUE

    def number(self, key: str, default: float = 0.0, least: float = -math.inf, most: float = math.inf) -> float:
        if not self._is_scalar(key):
            return default
        return self._within(key, _number(self.values[key]), default, least, most, "a number")

    def whole(self, key: str, default: int = 0, least: float = -math.inf, most: float = 2**63 - 1) -> int:
        """A whole number; 5e8 and "500000000" are the same."""
        if not self._is_scalar(key):
            return default
        value = _number(self.values[key])
        exact = int(value) if value is not None and value == int(value) else None
        return int(self._within(key, exact, default, least, most, "a whole number"))

    def numbers(self, key: str, default: Sequence[float] = ()) -> Sequence[float]:
        if not self.has(key):
            return default
        value = self.values[key]
        numbers = [_number(part) for part in value] if isinstance(value, list) else [None]
        exact = [number for number in numbers if number is not None]
        if len(exact) < len(numbers):
            self.refused(key, "it is not a list of numbers")
            return default
        return exact

    def texts(self, key: str, default: Sequence[str] = ()) -> Sequence[str]:
        """A list of texts, or one text with commas."""
        if not self.has(key):
            return default
        value = self.values[key]
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
            self.refused(key, "it is not a list of names")
        elif not all(part.isprintable() for part in value):
            self.refused(key, "it has characters that cannot be printed")
        else:
            return value
        return default

    def _is_scalar(self, key: str) -> bool:
        """Return True if the key has a single value; refuse lists, mappings, and `auto`, which `auto()` accepts."""
        if not self.has(key):
            return False
        value, why = self.values[key], ""
        if isinstance(value, dict | list):
            why = f"it is a {'mapping' if isinstance(value, dict) else 'list'}, not a single value"
        elif str(value).lower() == AUTO:
            why = "auto is not possible; write a value, or leave it out"
        elif not str(value).strip().isprintable():
            why = "it has characters that cannot be printed"
        if why:
            self.refused(key, why)
        return not why

    def _within(self, key: str, value: float | None, default: float, least: float, most: float, what: str) -> float:
        if value is None:
            self.refused(key, f"it is not {what}")
        elif not least <= value <= most:
            self.refused(key, f"it must be {f'at least {least:g}' if value < least else f'at most {most:g}'}")
        else:
            return value
        return default

    # Entries

    def settle(self, key: str, fate: Fate, text: str) -> None:
        """Record what becomes of a key, if it is written. The last call counts, except that a refusal stays."""
        if self.has(key):
            self._record(key, fate, text)

    def used(self, key: str, becomes: str) -> None:
        self.settle(key, "used", becomes)

    def ignored(self, key: str, why: str) -> None:
        self.settle(key, "ignored", why)

    def refused(self, key: str, why: str) -> None:
        self.settle(key, "refused", why)

    def settle_rest(self, fate: Fate, text: str) -> None:
        """Settle every key of this block that has no entry yet."""
        for key in self.values:
            self._known.add(key)
            if self.path_of(key) not in self._entries:
                self._record(key, fate, text)

    def _record(self, key: str, fate: Fate, text: str) -> None:
        path = self.path_of(key)
        if path not in self._entries or self._entries[path].fate != "refused":
            self._entries[path] = Entry(path, shown(self.values[key]), fate, text)

    def entries(self) -> tuple[Entry, ...]:
        """One entry per key, in the order of the document. Keys that no reader asked for are refused."""
        blocks = list(self._blocks.values())
        places: dict[str, list[str]] = {}  # of known keys: an entry of a key in the wrong block names the right one
        for block in blocks:
            for key in block._known:
                places.setdefault(key, []).append(block.path_of(key))
        for block in blocks:
            for key in block._unsettled():
                if block.values[key] is None or key.startswith(COMMENTS):
                    block._record(key, "ignored", "it is empty" if block.values[key] is None else "a comment")
                elif key not in block._known:
                    right = places.get(key, ())
                    near = right[0] if len(right) == 1 else nearest(key, block._known)
                    meant = "no known key is similar" if near is None else f"did you mean {near!r}?"
                    if near is None and len(block._known) <= MAX_SUGGESTED:
                        meant = did_you_mean(key, block._known)
                    block._record(key, "refused", f"unknown key; {meant}")
        refused = next((entry.key for entry in self._entries.values() if entry.fate == "refused"), None)
        for block in blocks:
            for key in block._unsettled():  # it was read; a refused key may have ended the reading of the file
                if refused is not None:
                    block._record(key, "ignored", f"it is undecided because {refused} is refused")
                else:
                    block._record(key, "refused", "it has no effect here; leave it out")
        return tuple(self._rows())

    def _unsettled(self) -> list[str]:
        """Keys without an entry that are no blocks."""
        keys = {key: self.path_of(key) for key in self.values}
        blocks = {key for key, path in keys.items() if path in self._blocks and isinstance(self.values[key], dict)}
        return [key for key, path in keys.items() if path not in self._entries and key not in blocks]

    def _rows(self) -> Iterator[Entry]:
        for key, value in self.values.items():
            path = self.path_of(key)
            if path in self._entries:
                yield self._entries[path]
            elif value == {}:
                yield Entry(path, "{}", "ignored", "it is empty")
            if path in self._blocks:
                yield from self._blocks[path]._rows()


def name_of(key: str) -> str:
    """A key as part of a path: printable, and quoted if it is empty or has a dot."""
    return key if key and not set(key) & set(".'") and key.isprintable() else ascii(key)


def mapping_in(path: Path) -> dict[str, Tree]:
    """The content of a configuration file."""
    if not path.exists():
        raise ConfigurationError(f"{path}: no such file")
    text, where = read_text(path), f"file {path}"
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    tree = yaml_tree(text, where, MAX_DEPTH) if is_yaml else json_tree(text, where)
    if not isinstance(tree, dict):
        raise ConfigurationError(f"{path} is not a mapping of keys to values")
    return tree


def _place_of(path: Path, folder: Path) -> tuple[Path, str]:
    """The path of the file, and which of the two folders it is in."""
    if path.is_absolute():
        return path, ""
    neighbour = folder / path
    if path.exists():
        return path, ", in the working directory"
    if neighbour.exists():
        return neighbour, ", next to the file that names it"
    both = f"in the working directory {Path.cwd()}"
    if neighbour.resolve() != path.resolve():
        both = f"neither {both} nor as {neighbour}, next to the file that names it"
    raise ConfigurationError(f"{path}: no such file, {both}")


def _number(value: Tree) -> float | None:
    try:
        number = float(value) if isinstance(value, str) else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def shown(value: Tree) -> str:
    """A value in one short line."""
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{name}: {shown(part)}" for name, part in value.items()) + "}"
    elif isinstance(value, list):
        text = "[" + ", ".join(map(shown, value)) + "]"
    else:
        text = "null" if value is None else str(value)
    text = printable(" ".join(text.split()))
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
