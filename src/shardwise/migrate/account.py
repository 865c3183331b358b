"""An account of every key of another library's configuration.

A reader asks a `Block` (the document, or a mapping in it) for values by key and type, and says what each becomes. At
the end `Account.entries` has one entry for every key that was written: used, ignored for a reason, or refused for a
reason. A value of the wrong type and an unknown key are refused; nothing is dropped. After a refusal the reader
continues with the default, so that all errors are reported at once.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..base.documents import Tree
from ..base.errors import did_you_mean, nearest, printable

Fate = Literal["used", "ignored", "refused"]

AUTO = "auto"
# Beginnings of keys that stand for comments where a format has none; no library has such a key.
COMMENTS = ("_", "comment", "//", "#", "$schema")
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
MAX_SHOWN = 60  # characters of a value
MAX_SUGGESTED = 12  # keys that are listed for an unknown one


@dataclass(frozen=True, slots=True)
class Entry:
    """One key: what it becomes, or why it becomes nothing."""

    key: str  # with its blocks: zero_optimization.stage
    value: str  # as written
    fate: Fate
    text: str  # what it becomes, or why not


@dataclass(slots=True)
class Account:
    """The entries of one document, which is called `source` in messages."""

    source: str
    _fates: dict[str, Entry] = field(default_factory=dict)
    _blocks: dict[str, "Block"] = field(default_factory=dict)

    def block(self, path: str, values: Mapping[str, Tree]) -> "Block":
        """Register a mapping of the document."""
        self._blocks[path] = Block(self, path, values)
        return self._blocks[path]

    def settle(self, key: str, value: Tree, fate: Fate, text: str) -> None:
        """Record what becomes of a key. The last call counts, except that a refusal stays."""
        before = self._fates.get(key)
        if before is None or before.fate != "refused":
            self._fates[key] = Entry(key, shown(value), fate, text)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """One entry per key, in the order of the document. Keys that no reader asked for are refused."""
        places: dict[str, list[str]] = {}
        for block in self._blocks.values():
            for key in block.known:
                places.setdefault(key, []).append(block.path_of(key))
        for block in self._blocks.values():
            block.refuse_unknown(places)
        refused = next((entry.key for entry in self._fates.values() if entry.fate == "refused"), None)
        for block in self._blocks.values():
            block.settle_undecided(refused)
        return tuple(self._rows(self._blocks[""]))

    def _rows(self, block: "Block") -> Iterator[Entry]:
        for key, path in block.paths.items():
            if path in self._fates:
                yield self._fates[path]
            elif block.values[key] == {}:
                yield Entry(path, "{}", "ignored", "it is empty")
            if path in self._blocks:
                yield from self._rows(self._blocks[path])


class Block:
    """A mapping of the document, and the keys that a reader has asked for."""

    def __init__(self, account: Account, path: str, values: Mapping[str, Tree]) -> None:
        self.account, self.path, self.values = account, path, values
        self._known: set[str] = set()
        self._inner: set[str] = set()

    def has(self, key: str) -> bool:
        """Return True if the key has a value; null is none."""
        self._known.add(key)
        return self.values.get(key) is not None

    def auto(self, key: str, becomes: str) -> bool:
        """Return True if the value is "auto", and record what that becomes."""
        if not self.has(key) or str(self.values[key]).lower() != AUTO:
            return False
        self.used(key, becomes)
        return True

    def inner(self, key: str) -> "Block":
        """The mapping under a key; empty if there is none."""
        self._known.add(key)
        value = self.values.get(key)
        if value is None:
            value = {}
        elif isinstance(value, dict):
            self._inner.add(key)
        else:
            self.refused(key, "it is not a mapping of keys to values")
            value = {}
        return self.account.block(self.path_of(key), value)

    def opened(self, key: str, values: Mapping[str, Tree]) -> "Block":
        """Another document, which this key names: its entries stand under the key."""
        return self.account.block(self.paths[key], values)

    def text(self, key: str, default: str = "") -> str:
        if not self._is_scalar(key):
            return default
        return str(self.values[key]).strip()

    def word(self, key: str, choices: Iterable[str], default: str) -> str:
        """One of the choices, written in any capitals."""
        if not self._is_scalar(key):
            return default
        known = {choice.lower(): choice for choice in choices}
        found = known.get(str(self.values[key]).lower())
        if found is None:
            self.refused(key, f"it is unknown; {did_you_mean(str(self.values[key]), known.values())}")
        return default if found is None else found

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
        found = [_number(part) for part in value] if isinstance(value, list) else [None]
        if any(number is None for number in found):
            self.refused(key, "it is not a list of numbers")
            return default
        return [number for number in found if number is not None]

    def texts(self, key: str, default: Sequence[str] = ()) -> Sequence[str]:
        """A list of texts, or one text with commas."""
        if not self.has(key):
            return default
        value = self.values[key]
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
            self.refused(key, "it is not a list of names")
            return default
        if not all(part.isprintable() for part in value):
            self.refused(key, "it has characters that cannot be printed")
            return default
        return value

    def settle(self, key: str, fate: Fate, text: str) -> None:
        """Record what becomes of a key, if it is written."""
        self._known.add(key)
        if self.values.get(key) is not None:
            self.account.settle(self.path_of(key), self.values[key], fate, text)

    def used(self, key: str, becomes: str) -> None:
        self.settle(key, "used", becomes)

    def ignored(self, key: str, why: str) -> None:
        self.settle(key, "ignored", why)

    def refused(self, key: str, why: str) -> None:
        self.settle(key, "refused", why)

    def ignored_whole(self, why: str) -> None:
        """Ignore every key of this block that has no entry yet."""
        self._settle_rest("ignored", why)

    def refused_whole(self, why: str) -> None:
        self._settle_rest("refused", why)

    @property
    def paths(self) -> dict[str, str]:
        return {key: self.path_of(key) for key in self.values}

    @property
    def known(self) -> frozenset[str]:
        """Keys that a reader has asked for, written or not."""
        return frozenset(self._known)

    def refuse_unknown(self, places: Mapping[str, Sequence[str]]) -> None:
        """`places` are the paths of known keys, by name: an entry of a key in the wrong block names the right one."""
        for key, value in self.values.items():
            path = self.path_of(key)
            is_told = path in self.account._fates or key in self._inner
            if is_told:
                continue
            if value is None:
                self.account.settle(path, value, "ignored", "it is empty")
                continue
            if key.startswith(COMMENTS):
                self.account.settle(path, value, "ignored", "a comment")
                continue
            if key in self._known:
                continue
            right = places.get(key, ())
            meant = f"did you mean {right[0]!r}?" if len(right) == 1 else _nearest(key, self._known)
            self.account.settle(path, value, "refused", f"unknown key; {meant}")

    def settle_undecided(self, refused: str | None) -> None:
        """Settle keys that were read and have no entry: a refused key may have ended the reading of the file."""
        for key, value in self.values.items():
            if key in self._known and key not in self._inner and self.path_of(key) not in self.account._fates:
                if refused is not None:
                    self.ignored(key, f"it is undecided because {refused} is refused")
                else:
                    self.account.settle(self.path_of(key), value, "refused", "it has no effect here; leave it out")

    def _settle_rest(self, fate: Fate, text: str) -> None:
        for key in self.values:
            self._known.add(key)
            if self.path_of(key) not in self.account._fates:
                self.account.settle(self.path_of(key), self.values[key], fate, text)

    def _is_scalar(self, key: str) -> bool:
        """Return True if the key has a single value; refuse lists, mappings, and `auto`, which `auto()` accepts."""
        if not self.has(key):
            return False
        value = self.values[key]
        if isinstance(value, dict | list):
            self.refused(key, f"it is a {'mapping' if isinstance(value, dict) else 'list'}, not a single value")
            return False
        if str(value).lower() == AUTO:
            self.refused(key, "auto is not possible; write a value, or leave it out")
            return False
        if not str(value).strip().isprintable():
            self.refused(key, "it has characters that cannot be printed")
            return False
        return True

    def _within(self, key: str, value: float | None, default: float, least: float, most: float, what: str) -> float:
        if value is None:
            self.refused(key, f"it is not {what}")
        elif not least <= value <= most:
            bounds = f"at least {least:g}" if value < least else f"at most {most:g}"
            self.refused(key, f"it must be {bounds}")
        else:
            return value
        return default

    def path_of(self, key: str) -> str:
        return f"{self.path}.{name_of(key)}" if self.path else name_of(key)


def name_of(key: str) -> str:
    """A key as part of a path: printable, and quoted if it is empty or has a dot."""
    return key if key and not set(key) & set(".'") and key.isprintable() else ascii(key)


def _number(value: Tree) -> float | None:
    try:
        found = float(value) if isinstance(value, str) else math.nan
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def _nearest(key: str, known: Collection[str]) -> str:
    near = nearest(key, known)
    if near is not None:
        return f"did you mean {near!r}?"
    return did_you_mean(key, known) if len(known) <= MAX_SUGGESTED else "no known key is similar"


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
