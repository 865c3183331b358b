"""An account of every key of another library's configuration.

A reader (a function for the files of one library, such as `read_hugging_face`) asks a `Block` for values by key and
type, and records what each key becomes. At the end `Block.entries` returns one entry for every key of the file: used,
or ignored or refused with a reason. Wrong types and unknown keys are refused; no key is dropped silently. After a
refusal the reader continues with the default, so that all errors are reported at once.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..base.documents import Repeated, Tree, json_tree, read_text, yaml_tree
from ..base.errors import ConfigurationError, did_you_mean, nearest, printable

Fate = Literal["used", "ignored", "refused"]
T = TypeVar("T")
D = TypeVar("D")

AUTO = "auto"
# Prefixes of keys that people use for comments, which JSON does not have. No library has such a key.
COMMENTS = ("_", "comment", "//", "#", "$schema")
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
MAX_DEPTH = 12
MAX_WHOLE = 2**63 - 1
MAX_SHOWN = 60  # characters of a value
MAX_SUGGESTED = 12  # keys that are listed for an unknown one


@dataclass(frozen=True, slots=True)
class Entry:
    """The result for one key: the setting that it becomes, or the reason why it becomes none."""

    key: str  # the path from the top: zero_optimization.stage
    value: str  # as written
    fate: Fate
    text: str  # what it becomes, or why not


class Block:
    """A document (a configuration file; messages call it `source`), or a mapping in it, at `path`.

    All blocks of a document share their entries, `settings` (of our trainer, that the keys become) and `files`. A
    block remembers which keys a reader has asked for: only those are known.
    """

    def __init__(
        self, values: Mapping[str, Tree], source: str, path: str = "", document: "Block | None" = None
    ) -> None:
        self.values, self.source, self.path = values, source, path
        self._known: set[str] = set()
        self._entries: dict[str, Entry] = {} if document is None else document._entries
        self._blocks: dict[str, Block] = {} if document is None else document._blocks
        self.settings: dict[str, Any] = {} if document is None else document.settings
        self.files: dict[str, str] = {} if document is None else document.files  # to be written, by name
        self._blocks[path] = self

    def path_of(self, key: str) -> str:
        return f"{self.path}.{name_of(key)}" if self.path else name_of(key)

    # Values

    def has(self, key: str) -> bool:
        """Return True if the key has a value other than null. From now on the key is known."""
        self._known.add(key)
        return self.values.get(key) is not None

    def first_of(self, *keys: str, default: str = "") -> str:
        """Return the first key that is written; without one, `default` or the first key. Further ones are refused."""
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
        """Return the mapping under a key, as a block; empty if there is none."""
        value = self.values[key] if self.has(key) else {}
        if not isinstance(value, dict):
            self.refused(key, "it is not a mapping of keys to values")
            value = {}
        return self._blocks.get(self.path_of(key)) or Block(value, self.source, self.path_of(key), self)

    def inner_mapping(self, key: str, values: Mapping[str, Tree]) -> "Block":
        """Return a mapping that is not in the document as a block under a key."""
        return Block(values, self.source, self.path_of(key), self)

    def inner_list(self, key: str) -> "list[Block]":
        """Return the mappings in the list under a key, as blocks with a number; a text is a mapping with a path."""
        value = self.values[key] if self.has(key) and str(self.values[key]).lower() not in (*FALSE, "", "none") else []
        entries = value if isinstance(value, list) else [value] * isinstance(value, str)
        if isinstance(value, dict):
            self.refused(key, "it is a mapping and not a list of them")
        elif not entries:
            self.ignored(key, "it is empty")
        mappings = [entry if isinstance(entry, dict) else {"path": str(entry)} for entry in entries]
        holder = self.inner_mapping(key, {str(place): entry for place, entry in enumerate(mappings)})
        return [holder.inner(place) for place in holder.values]

    def inner_file(self, key: str, folder: Path) -> "Block":
        """Return the file that a key names, as a block under the key. If it cannot be read, the key is refused.

        It is looked for in the working directory, as in Accelerate, the Trainer, LLaMA-Factory and Axolotl, and then in
        `folder`, the folder of the file that names it.
        """
        name, tree = self.text(key), {}
        if not name:
            self.refused(key, "it names no file")
        try:
            path = Path(name).expanduser()
            near = folder / path
            if not path.exists() and not near.exists():
                where = f"neither in the working directory {Path.cwd()} nor as {near}, next to the file that names it"
                raise ConfigurationError(f"{path}: no such file, {where}")
            path = path if path.exists() else near
            tree = mapping_in(path) if name else {}
            self.used(key, f"read from {printable(str(path.absolute()))}: its keys follow")
        except (ConfigurationError, OSError, ValueError, RuntimeError) as error:  # no home, a name too long
            self.refused(key, str(error))
        return self.inner_mapping(key, tree)

    def read(self, key: str, convert: Callable[[Tree], T], default: D) -> T | D:
        """Return the converted value, or the default without one. A ValueError of `convert` refuses the key."""
        if not self.has(key):
            return default
        try:
            return convert(self.values[key])
        except ValueError as error:
            self.refused(key, str(error))
            return default

    def text(self, key: str, default: str = "") -> str:
        return self.read(key, as_text, default)

    def word(self, key: str, choices: Iterable[str], default: str) -> str:
        return self.read(key, partial(as_word, choices=choices), default)

    def flag(self, key: str, default: bool = False) -> bool:
        return self.read(key, as_flag, default)

    def number(self, key: str, default: float = 0.0, least: float = -math.inf, most: float = math.inf) -> float:
        return self.read(key, partial(as_number, least=least, most=most), default)

    def whole(self, key: str, default: int = 0, least: float = -math.inf, most: float = math.inf) -> int:
        return int(self.read(key, partial(as_number, least=least, most=most, is_whole=True), default))

    def texts(self, key: str, default: Sequence[str] = ()) -> Sequence[str]:
        return self.read(key, as_texts, default)

    # Entries

    def settle(self, keys: str | Iterable[str], fate: Fate, text: str) -> None:
        """Record the result for those of the keys that are written. The last call counts, but a refusal stays."""
        for key in [keys] if isinstance(keys, str) else keys:
            if self.has(key):
                self._record(key, fate, text)

    def used(self, keys: str | Iterable[str], becomes: str) -> None:
        self.settle(keys, "used", becomes)

    def ignored(self, keys: str | Iterable[str], why: str) -> None:
        self.settle(keys, "ignored", why)

    def refused(self, keys: str | Iterable[str], why: str) -> None:
        self.settle(keys, "refused", why)

    def used_if(self, is_used: bool, keys: str | Iterable[str], becomes: str, why_not: str) -> None:
        self.settle(keys, "used" if is_used else "ignored", becomes if is_used else why_not)

    def sets(self, keys: str | Iterable[str], note: str = "", /, **settings: Any) -> None:
        """Set settings of our trainer, also if no key is written. Record that written keys become these settings."""
        self.settings.update(settings)
        texts = {name: f"{value:g}" if isinstance(value, float) else value for name, value in settings.items()}
        self.used(keys, " and ".join(f"{name} {text}" for name, text in texts.items()) + note)

    def settle_rest(self, fate: Fate, text: str) -> None:
        """Record a result for every key of this block that has no entry yet."""
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
        places: dict[str, list[str]] = {}  # the paths of known keys, to name the right block if a key is in a wrong one
        for block in blocks:
            for key in block._known:
                places.setdefault(key, []).append(block.path_of(key))
        undecided: list[tuple[Block, str]] = []
        for block in blocks:
            for key, value in block.values.items():
                path = block.path_of(key)
                inner = self._blocks.get(path)
                if path in self._entries or (inner and (inner.values or isinstance(value, dict))):
                    continue
                if value is None or key.startswith(COMMENTS):
                    block._record(key, "ignored", "it is empty" if value is None else "a comment")
                elif key in block._known:
                    undecided.append((block, key))
                else:
                    block._record(key, "refused", f"unknown key; {_suggestion(key, block._known, places.get(key, []))}")
        refused = next((entry.key for entry in self._entries.values() if entry.fate == "refused"), None)
        for block, key in undecided:  # read, but without an entry: a refused key may have ended the reading
            if refused is None:
                block._record(key, "refused", "it has no effect here; leave it out")
            else:
                block._record(key, "ignored", f"it is undecided because {refused} is refused")
        return tuple(self._rows())

    def _rows(self) -> Iterator[Entry]:
        for key, value in self.values.items():
            path = self.path_of(key)
            if path in self._entries:
                yield self._entries[path]
            elif value == {}:
                yield Entry(path, "{}", "ignored", "it is empty")
            if path in self._blocks:
                yield from self._blocks[path]._rows()


def _suggestion(key: str, known: set[str], places: list[str]) -> str:
    near = places[0] if len(places) == 1 else nearest(key, known)
    if near is not None:
        return f"did you mean {near!r}?"
    return did_you_mean(key, known) if len(known) <= MAX_SUGGESTED else "no known key is similar"


# Converters of values. The message of a ValueError is the reason why the key is refused.


def _scalar(value: Tree) -> str:
    if isinstance(value, dict | list):
        raise ValueError(f"it is a {'mapping' if isinstance(value, dict) else 'list'}, not a single value")
    text = str(value)
    if text.lower() == AUTO:
        raise ValueError("auto is not possible; write a value, or leave it out")
    if not text.strip().isprintable():
        raise ValueError("it has characters that cannot be printed")
    return text


def as_text(value: Tree) -> str:
    return _scalar(value).strip()


def as_word(value: Tree, choices: Iterable[str]) -> str:
    """Return one of the choices. Upper and lower case are the same."""
    text, known = _scalar(value), {choice.lower(): choice for choice in choices}
    if text.lower() not in known:
        raise ValueError(f"it is unknown; {did_you_mean(text, known.values())}")
    return known[text.lower()]


def as_flag(value: Tree) -> bool:
    word = _scalar(value).lower()
    if word not in TRUE + FALSE:
        raise ValueError("it is not true or false")
    return word in TRUE


def as_number(value: Tree, least: float = -math.inf, most: float = math.inf, is_whole: bool = False) -> float:
    """Return a finite number. A whole number may be written as 5e8, too."""
    text = _scalar(value)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or (is_whole and number != int(number)):
        raise ValueError(f"it is not a {'whole ' if is_whole else ''}number")
    most = min(most, MAX_WHOLE) if is_whole else most
    if not least <= number <= most:
        raise ValueError(f"it must be {f'at least {least:g}' if number < least else f'at most {most:g}'}")
    return number


def as_texts(value: Tree) -> Sequence[str]:
    """A list of texts, or one text with commas."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        raise ValueError("it is not a list of names")
    if not all(part.isprintable() for part in value):
        raise ValueError("it has characters that cannot be printed")
    return value


def name_of(key: str) -> str:
    """Return a key as part of a path: printable, and quoted if it is empty or has a dot or a quote."""
    return key if key and not set(key) & set(".'") and key.isprintable() else ascii(key)


def mapping_in(path: Path, repeated: Repeated | None = None) -> dict[str, Tree]:
    """Return the keys and values of a configuration file, YAML or JSON. `repeated`: as for `yaml_tree`."""
    if not path.exists():
        raise ConfigurationError(f"{path}: no such file")
    text, where = read_text(path), f"file {path}"
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    tree = yaml_tree(text, where, MAX_DEPTH, repeated) if is_yaml else json_tree(text, where)
    if not isinstance(tree, dict):
        raise ConfigurationError(f"{path} is not a mapping of keys to values")
    return tree


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
