"""Files of tensors in the safetensors format, written a bounded number of bytes at a time, and looked through.

The format is eight bytes with the length of a JSON header, the header (dtype, shape and place of every tensor), and the
tensors' bytes. It is written here, and not by the library, because a tensor on its way to the file must never need more
memory than a block beside itself, because every block is summed on its way, and because no page cache is filled.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, SaveError
from .disk import Stream, check_bytes
from .dtypes import DTYPES, NAMES
from .index import File, Piece, Stored
from .index_json import in_words

# As in the library: what is longer, it does not open.
MAX_HEADER_BYTES = 100_000_000


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
        num_bytes = path.stat().st_size
        with path.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(num_bytes - 8, MAX_HEADER_BYTES):
                raise CheckpointError(f"{path} is no safetensors file: its header claims {length} of {num_bytes} bytes")
            text = opened.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        header = json.loads(text)
        return num_bytes, {
            key: _stored(entry, file, 8 + length, num_bytes) for key, entry in header.items() if key != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {in_words(error)}") from error


def _stored(entry: Any, file: int, data: int, num_bytes: int) -> Stored:
    shape, size = tuple(entry["shape"]), DTYPES[entry["dtype"]].itemsize
    if not all(type(number) is int and number >= 0 for number in (*shape, *entry["data_offsets"])):
        raise ValueError(f"shape {shape}, offsets {entry['data_offsets']}")
    start, stop = (data + offset for offset in entry["data_offsets"])
    if not data <= start <= stop <= num_bytes or stop - start != prod(shape) * size:
        raise ValueError(f"bytes {start} to {stop} are no {entry['dtype']} {shape}")
    return Stored(shape, entry["dtype"], (Piece(file, start, 0, prod(shape)),) if prod(shape) else ())
