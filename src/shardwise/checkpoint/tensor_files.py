"""Files of tensors in the safetensors format, written a bounded number of bytes at a time, and looked through.

The format is eight bytes with the length of a JSON header, the header (dtype, shape and place of every tensor), and the
tensors' bytes. It is written here, and not by the library, because a tensor on its way to the file must never need more
memory than a block beside itself, because every block is summed on its way, and because no page cache is filled.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]  # the stubs leave it out
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.errors import CheckpointError, SaveError
from ..base.regular_file import open_regular
from .disk import Stream, check_bytes
from .dtypes import DTYPES, NAMES
from .index import MAX_NAME, File, Piece, Stored, counts, shape_from
from .index_json import in_words

# As in the library: what is longer, it does not open.
MAX_HEADER_BYTES = 100_000_000
_MAX_ENTRY = 4096  # characters: a dtype, a shape and two offsets
_BLANKS, _END = " \t\n\r", "\0"
_BLANK = re.compile(f"[{_BLANKS}]*")


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to be written. It is asked for when its turn comes: what has to be made for it is made one by one."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def entry_of(key: str, tensor: Tensor) -> Entry:
    """A tensor that is there already."""
    return Entry(key, tensor.dtype, tuple(tensor.shape), lambda: tensor)


def state_key(key: str, name: str) -> str:
    """What state that lies whole in a file is called there."""
    return f"{key}/{name}"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything lies in a file: its beginning, then the entries in this order, each at its offset."""

    header: bytes
    entries: tuple[Entry, ...]
    offsets: Mapping[str, int]
    num_bytes: int


def lay_out(entries: Sequence[Entry], metadata: Mapping[str, str] | None = None) -> Layout:
    # Widest first, so that every tensor is aligned to its own elements.
    entries = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    places: dict[str, int] = {}
    end = 0
    for entry in entries:
        if entry.dtype not in NAMES:
            raise CheckpointError(f"{entry.key!r} is {entry.dtype}, which a file cannot hold: {', '.join(DTYPES)}")
        if entry.key in header:
            raise CheckpointError(f"two tensors would be called {entry.key!r} in one file")
        places[entry.key] = end
        header[entry.key] = {
            "dtype": NAMES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [end, end + entry.num_bytes],
        }
        end += entry.num_bytes
    text = json.dumps(header).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{len(entries):,} tensors in one file: its header would have {len(text):,} bytes, and readers take "
            f"{MAX_HEADER_BYTES:,} at most"
        )
    text = len(text + b" " * (-len(text) % 8)).to_bytes(8, "little") + text + b" " * (-len(text) % 8)
    return Layout(text, tuple(entries), {key: len(text) + at for key, at in places.items()}, len(text) + end)


def write_file(
    path: Path,
    layout: Layout,
    rows: Callable[[Entry], Iterable[Tensor]] = lambda entry: [value_of(entry)],
    is_summed: bool = True,
) -> File:
    """Write the tensors, each as the rows that it comes in, and wait until the disk has them."""
    try:
        with Stream(path, check_bytes(layout.num_bytes) if is_summed else None) as stream:
            stream.write(torch.frombuffer(bytearray(layout.header), dtype=torch.uint8))
            for entry in layout.entries:
                for row in rows(entry):
                    stream.write(row)
            stream.finish()
    except OSError as error:
        raise SaveError(f"cannot write {path}: {error.strerror or error}") from error
    return File(path.name, stream.num_bytes, tuple(stream.checks))


def value_of(entry: Entry) -> Tensor:
    value = entry.read().detach()
    if (value.dtype, value.shape) != (entry.dtype, entry.shape):
        raise CheckpointError(
            f"{entry.key!r} was announced as {entry.dtype} {entry.shape} and is {value.dtype} {tuple(value.shape)}"
        )
    return value.reshape(-1)


def read_header(path: Path, file: int = 0) -> tuple[int, dict[str, Stored]]:
    """The size of a safetensors file, and what it holds as pieces in the file of this number; nothing else is read."""
    try:
        with os.fdopen(open_regular(path), "rb") as opened:
            num_bytes = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(num_bytes - 8, MAX_HEADER_BYTES):
                raise CheckpointError(f"{path} is no safetensors file: its header claims {length} of {num_bytes} bytes")
            text = opened.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        return num_bytes, {
            key: _stored(entry, file, 8 + length, num_bytes) for key, entry in _entries(text.decode() + _END)
        }
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {in_words(error)}") from error


def _entries(header: str) -> Iterator[tuple[str, Any]]:
    """The names in a header and what is said of each tensor, one after the other.

    A hundred megabytes of JSON can be gigabytes of values, so no more than one entry is parsed at a time.
    """
    for key, at in (pairs := _Pairs(header, 0)):
        if len(key) > MAX_NAME:
            raise ValueError(f"the name of a tensor has {len(key):,} characters, and at most {MAX_NAME:,} are read")
        if key == "__metadata__":
            texts = _Pairs(header, at)
            for _, start in texts:
                texts.at = _text(header, start)[1]
            pairs.at = texts.at
        else:
            end = header.find("}", at, at + _MAX_ENTRY) + 1
            if not end:
                raise ValueError(f"character {at} of its header does not begin a tensor's dtype, shape and offsets")
            pairs.at = end
            yield key, json.loads(header[at:end])
    if header[pairs.at :].strip(_BLANKS) != _END:
        raise ValueError(f"more than one object, from character {pairs.at} of its header on")


class _Pairs:
    """The keys of an object that begins at a place in a text, each with where its value begins.

    Whoever takes a pair sets `at` to the end of its value; behind the last one it is the end of the object.
    """

    def __init__(self, text: str, at: int) -> None:
        self._text, self.at = text, at

    def __iter__(self) -> Iterator[tuple[str, int]]:
        text = self._text
        self._take("{")
        self._pass_blanks()
        if text[self.at] != "}":
            while True:
                self._pass_blanks()
                key, self.at = _text(text, self.at)
                self._take(":")
                self._pass_blanks()
                yield key, self.at
                self._pass_blanks()
                if text[self.at] == "}":
                    break
                self._take(",")
        self.at += 1

    def _pass_blanks(self) -> None:
        blank = _BLANK.match(self._text, self.at)
        assert blank is not None
        self.at = blank.end()

    def _take(self, sign: str) -> None:
        self._pass_blanks()
        if self._text[self.at] != sign:
            raise ValueError(f"no {sign!r} at character {self.at} of its header")
        self.at += 1


def _text(header: str, at: int) -> tuple[str, int]:
    """A string that begins at a place in a text, and where it ends."""
    if header[at] != '"':
        raise ValueError(f"no text at character {at} of its header")
    found: tuple[str, int] = scanstring(header, at + 1, True)
    return found


def _stored(entry: Any, file: int, data: int, num_bytes: int) -> Stored:
    shape, size = shape_from(entry["shape"]), DTYPES[entry["dtype"]].itemsize
    start, stop = (data + offset for offset in counts(entry["data_offsets"]))
    if not data <= start <= stop <= num_bytes or stop - start != prod(shape) * size:
        raise ValueError(f"bytes {start} to {stop} are no {entry['dtype']} {shape}")
    return Stored(shape, entry["dtype"], (Piece(file, start, 0, prod(shape)),) if prod(shape) else ())
