"""Write files of tensors in the safetensors format a block at a time, with checksums, and read their headers.

The format is eight bytes with the length of a JSON header, the header (dtype, shape and place of every tensor), and the
tensors' bytes. The safetensors library's own writer is not used: here a write needs only a few blocks of memory in
addition to the tensor, every block gets a checksum, and the page cache is bypassed where the file system allows it.
While one block is filled, threads compute the checksums of other blocks and write them.
"""

import json
import mmap
import os
import re
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.errors import CheckpointError, SaveError
from ..base.files import ALIGNMENT, enable_direct_io, open_regular, write_at
from ..base.intervals import round_up
from .folder import os_errors_as
from .index import DTYPES, MAX_NAME, NAMES, Check, File, Stored, counts, in_words, one_piece, shape_from

BLOCK_BYTES = 8 << 20
_NUM_BLOCKS = 4
_MIN_CHECK_BYTES, _MOST_CHECKS = 1 << 20, 1024
MAX_HEADER_BYTES = 100_000_000  # the safetensors library does not open longer ones
OnBytes = Callable[[int], None]  # called with the number of bytes that were processed since the last call


def check_bytes(num_bytes: int) -> int:
    """Return how many bytes of a file of this size share a checksum.

    To read one element, all of them are read, so they should be few. But the index of a large file must stay short.
    """
    size = _MIN_CHECK_BYTES
    while size < BLOCK_BYTES and num_bytes > _MOST_CHECKS * size:
        size *= 2
    return min(size, BLOCK_BYTES)


def write_stream(path: Path, contents: Iterable[Tensor], check_bytes: int) -> File:
    """Write a new file from its beginning to its end, and wait until it is on disk.

    The tensors may be on any device. `check_bytes`: 0 writes no checksums.
    """
    file, num_bytes, checks = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), 0, list[Check]()
    blocks = deque(_Block() for _ in range(_NUM_BLOCKS))  # the first is being filled, the second is the oldest
    try:
        enable_direct_io(file)
        for rest in map(_bytes_of, contents):
            while rest.numel():
                if blocks[0].num_bytes == BLOCK_BYTES:
                    num_bytes += blocks[0].start(file, num_bytes, check_bytes)
                    blocks.rotate(-1)
                    checks += blocks[0].finish()
                rest = blocks[0].take(rest)
        num_bytes += blocks[0].start(file, num_bytes, check_bytes)
        for block in (*list(blocks)[1:], blocks[0]):
            checks += block.finish()
        os.ftruncate(file, num_bytes)
        os.fsync(file)
    finally:
        for block in blocks:
            block.wait()
        os.close(file)
    return File(path.name, num_bytes, tuple(checks))


def _bytes_of(content: Tensor) -> Tensor:
    row = content.detach().reshape(-1)
    return row.view(torch.uint8) if row.numel() else row


class _Block:
    """A buffer, and the thread that computes the checksums of its bytes and writes them to a file.

    It is not a thread of an executor: those end with the main thread, and a background save may run longer.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, BLOCK_BYTES)  # whole pages, as O_DIRECT requires
        self._row = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.num_bytes = 0  # filled, and not yet written
        self._thread: threading.Thread | None = None
        self._checks: list[Check] = []
        self._failure: Exception | None = None

    def take(self, row: Tensor) -> Tensor:
        """Copy as much of a row as there is room for; return the rest."""
        taken = row[: BLOCK_BYTES - self.num_bytes]
        self._row[self.num_bytes : self.num_bytes + taken.numel()].copy_(taken)
        self.num_bytes += taken.numel()
        return row[taken.numel() :]

    def start(self, file: int, offset: int, check_bytes: int) -> int:
        """Start to write the content to a place in a file; return its length."""
        num_bytes, self.num_bytes = self.num_bytes, 0
        thread = threading.Thread(None, self._write, "shardwise-disk", (file, num_bytes, offset, check_bytes))
        thread.start()
        self._thread = thread  # set after the start: a thread that could not start cannot be joined
        return num_bytes

    def finish(self) -> list[Check]:
        """Wait for the write, and return the checksums since the last call."""
        self.wait()
        checks, self._checks = self._checks, []
        if self._failure is not None:
            raise self._failure
        return checks

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _write(self, file: int, num_bytes: int, offset: int, check_bytes: int) -> None:
        # The end of the last block is padded; the file is truncated afterwards.
        end = min(round_up(num_bytes, ALIGNMENT), len(self._memory))
        with memoryview(self._memory) as view:
            try:
                for at in range(0, num_bytes, check_bytes) if check_bytes else ():
                    part = view[at : min(num_bytes, at + check_bytes)]
                    self._checks.append(Check(offset + at, len(part), zlib.crc32(part)))
                write_at(file, view[:end], offset)
            except Exception as error:  # noqa: BLE001  `finish` raises it in the thread that writes the file
                self._failure = error


def write_pieces(path: Path, pieces: Iterable[tuple[int, Tensor]], check_bytes: int) -> list[Check]:
    """Write rows at their offsets in a file, while other ranks write elsewhere in it. Return the checksums."""
    checks = []
    staged = torch.empty(check_bytes, dtype=torch.uint8)
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        for offset, content in pieces:
            for row in _bytes_of(content).split(check_bytes) if content.numel() else ():
                host = staged[: row.numel()].copy_(row).numpy().data
                checks.append(Check(offset, row.numel(), zlib.crc32(host)))
                write_at(file, host, offset)
                offset += row.numel()
        os.fsync(file)
    finally:
        os.close(file)
    return checks


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
        """Yield the rows; raise CheckpointError if they differ from the file's header."""
        num_bytes = 0
        for row in self.rows():
            if row.dtype != self.dtype:
                raise CheckpointError(f"{self.name!r} was announced as {self.dtype} and is {row.dtype}")
            yield row
            num_bytes += row.nbytes
            on_bytes(row.nbytes)
        if num_bytes != self.num_bytes:
            raise CheckpointError(f"{self.name!r} was announced with {self.num_bytes} bytes and has {num_bytes}")


def whole_name(key: str | None, name: str) -> str:
    """Return the name of a whole tensor in a file: a tensor of the model, or its optimizer state under `key`."""
    return name if key is None else f"{key}/{name}"


@dataclass(frozen=True, slots=True)
class Layout:
    """The header of a file as bytes, the tensors behind it in their order, and the offset of each."""

    header: Tensor
    sources: tuple[Source, ...]
    offsets: Mapping[str, int]
    num_bytes: int


def lay_out(sources: Sequence[Source], metadata: Mapping[str, str] | None = None) -> Layout:
    # Widest dtype first, so that the offset of every tensor is a multiple of its element size.
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
        raise CheckpointError(f"{len(sources):,} tensors in one file: its header exceeds {MAX_HEADER_BYTES:,} bytes")
    text += b" " * (-len(text) % 8)
    first = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    data = first.numel()
    return Layout(first, tuple(sources), {key: data + at for key, at in places.items()}, data + end)


def write_file(path: Path, layout: Layout, on_bytes: OnBytes = lambda num_bytes: None, is_summed: bool = True) -> File:
    """Write the tensors, and wait until they are on disk. `is_summed`: with a checksum for every block."""
    rows = (row for source in layout.sources for row in source.checked_rows(on_bytes))
    with os_errors_as(SaveError, f"cannot write {path}"):
        return write_stream(path, chain([layout.header], rows), check_bytes(layout.num_bytes) if is_summed else 0)


def read_header(path: Path, file: int = 0) -> dict[str, Stored]:
    """Return the tensors of a safetensors file, as pieces in the file of this number."""
    with os_errors_as(CheckpointError, f"cannot read {path}"), os.fdopen(open_regular(path), "rb") as opened:
        num_bytes = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= min(num_bytes - 8, MAX_HEADER_BYTES):
            raise CheckpointError(f"{path} is no safetensors file: its header claims {length} of {num_bytes} bytes")
        text = opened.read(length)
    try:
        return {key: _stored(entry, file, 8 + length, num_bytes) for key, entry in _entries(text.decode())}
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {in_words(error)}") from error


# A hundred megabytes of JSON can become gigabytes of Python values, so one entry is parsed at a time. The patterns
# never backtrack, so matching takes no memory.
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
            # JSON may escape one character of a name as twelve: two times \uXXXX.
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
    return Stored(shape, entry["dtype"], one_piece(file, start, prod(shape)))
