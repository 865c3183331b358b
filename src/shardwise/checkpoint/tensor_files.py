"""Write files of tensors in the safetensors format a block at a time, and read their headers.

The format is eight bytes with the length of a JSON header, the header (dtype, shape and place of every tensor), and the
tensors' bytes. The library's own writer is not used: here a write needs only one block of memory in addition to the
tensor, every block gets a checksum, and the page cache is not filled.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.errors import CheckpointError, SaveError
from ..base.regular_file import open_regular
from .disk import Stream, check_bytes
from .folder import os_errors_as
from .index import DTYPES, MAX_NAME, NAMES, File, Piece, Stored, counts, in_words, shape_from

MAX_HEADER_BYTES = 100_000_000  # the library does not open longer ones
OnBytes = Callable[[int], None]  # called with the number of bytes that were processed since the last call


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor to be written. `rows` gives its elements in order; a row may be overwritten when the next is read."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: Callable[[], Iterable[Tensor]]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """Return the whole tensor."""
        whole = torch.empty(prod(self.shape), dtype=self.dtype)
        at = 0
        for row in self.rows():
            whole[at : at + row.numel()].copy_(row.reshape(-1))
            at += row.numel()
        return whole.view(self.shape)

    def checked_rows(self, on_bytes: OnBytes = lambda num_bytes: None) -> Iterator[Tensor]:
        """Yield the rows; raise CheckpointError where they are not what the file's header says."""
        num_bytes = 0
        for row in self.rows():
            if row.dtype != self.dtype:
                raise CheckpointError(f"{self.name!r} was announced as {self.dtype} and is {row.dtype}")
            yield row.detach()
            num_bytes += row.nbytes
            on_bytes(row.nbytes)
        if num_bytes != self.num_bytes:
            raise CheckpointError(f"{self.name!r} was announced with {self.num_bytes} bytes and has {num_bytes}")


def state_key(key: str, name: str) -> str:
    """Return the name that whole optimizer state has in a file."""
    return f"{key}/{name}"


@dataclass(frozen=True, slots=True)
class Layout:
    """The header of a file, the tensors behind it in their order, and the offset of each."""

    header: bytes
    sources: tuple[Source, ...]
    offsets: Mapping[str, int]
    num_bytes: int


def lay_out(sources: Sequence[Source], metadata: Mapping[str, str] | None = None) -> Layout:
    # Widest first, so that every tensor is aligned to its own elements.
    sources = sorted(sources, key=lambda source: -source.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    places: dict[str, int] = {}
    end = 0
    for source in sources:
        if source.dtype not in NAMES:
            raise CheckpointError(f"{source.name!r} is {source.dtype}, which a file cannot hold: {', '.join(DTYPES)}")
        if source.name in header:
            raise CheckpointError(f"two tensors would be called {source.name!r} in one file")
        places[source.name] = end
        offsets = [end, end + source.num_bytes]
        header[source.name] = {"dtype": NAMES[source.dtype], "shape": source.shape, "data_offsets": offsets}
        end += source.num_bytes
    text = json.dumps(header).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{len(sources):,} tensors in one file: its header would have {len(text):,} bytes, and readers take "
            f"{MAX_HEADER_BYTES:,} at most"
        )
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    return Layout(text, tuple(sources), {key: len(text) + at for key, at in places.items()}, len(text) + end)


def write_file(path: Path, layout: Layout, on_bytes: OnBytes = lambda num_bytes: None, is_summed: bool = True) -> File:
    """Write the tensors, and wait until the disk has them. `is_summed`: with a checksum for every block."""
    max_bytes = check_bytes(layout.num_bytes) if is_summed else None
    with os_errors_as(SaveError, f"cannot write {path}"), Stream(path, max_bytes) as stream:
        stream.write(torch.frombuffer(bytearray(layout.header), dtype=torch.uint8))
        for source in layout.sources:
            for row in source.checked_rows(on_bytes):
                stream.write(row)
        stream.finish()
    return File(path.name, stream.num_bytes, tuple(stream.checks))


def read_header(path: Path, file: int = 0) -> tuple[int, dict[str, Stored]]:
    """Return the size of a safetensors file, and its tensors as pieces in the file of this number."""
    with os_errors_as(CheckpointError, f"cannot read {path}"), os.fdopen(open_regular(path), "rb") as opened:
        num_bytes = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= min(num_bytes - 8, MAX_HEADER_BYTES):
            raise CheckpointError(f"{path} is no safetensors file: its header claims {length} of {num_bytes} bytes")
        text = opened.read(length)
    try:
        return num_bytes, {key: _stored(entry, file, 8 + length, num_bytes) for key, entry in _entries(text.decode())}
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {in_words(error)}") from error


# A hundred megabytes of JSON can be gigabytes of values, so no more than one entry is parsed at a time. The patterns do
# not backtrack, so they take no memory.
_BLANK, _STRING = r"[ \t\n\r]*+", r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_PAIR_OF_STRINGS = f"{_STRING}{_BLANK}:{_BLANK}{_STRING}{_BLANK}"
_METADATA = rf"\{{{_BLANK}(?:{_PAIR_OF_STRINGS}(?:,{_BLANK}{_PAIR_OF_STRINGS})*+)?+\}}"
_ENTRY = r"\{[^{}]{0,4096}+\}"  # a dtype, a shape and two offsets
_PAIR = re.compile(
    rf'{_BLANK}(?:"__metadata__"{_BLANK}:{_BLANK}{_METADATA}|({_STRING}){_BLANK}:{_BLANK}({_ENTRY})){_BLANK}([,}}])'
)


def _entries(header: str) -> Iterator[tuple[str, Any]]:
    """Yield the name of each tensor in a header, and its dtype, shape and offsets."""
    header = header.strip(" \t\n\r")
    if re.fullmatch(rf"\{{{_BLANK}\}}", header):
        return
    at, end = 1, ","
    if not header.startswith("{"):
        raise ValueError("its header is no JSON object")
    while end == ",":
        pair = _PAIR.match(header, at)
        if pair is None:
            raise ValueError(f"character {at} of its header does not begin a tensor's name, dtype, shape and offsets")
        at, end = pair.end(), pair[3]
        if pair[1] is not None:
            # One character of a name may be escaped as twelve.
            if pair.end(1) - pair.start(1) > 12 * MAX_NAME or len(key := json.loads(pair[1])) > MAX_NAME:
                raise ValueError(f"the name of a tensor is too long: at most {MAX_NAME:,} characters are read")
            yield key, json.loads(pair[2])
    if at < len(header):
        raise ValueError(f"more than one object, from character {at} of its header on")


def _stored(entry: Any, file: int, data: int, num_bytes: int) -> Stored:
    shape, size = shape_from(entry["shape"]), DTYPES[entry["dtype"]].itemsize
    start, stop = (data + offset for offset in counts(entry["data_offsets"]))
    if not data <= start <= stop <= num_bytes or stop - start != prod(shape) * size:
        raise ValueError(f"bytes {start} to {stop} are no {entry['dtype']} {shape}")
    return Stored(shape, entry["dtype"], (Piece(file, start, 0, prod(shape)),) if prod(shape) else ())
