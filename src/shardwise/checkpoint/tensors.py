"""Files of tensors in the safetensors format, written and read a bounded number of bytes at a time.

The format is eight bytes with the length of a JSON header, the header (dtype, shape and place of every tensor), and the
tensors' bytes. It is read and written here, and not by the library, because a tensor on its way to the file must never
need more memory than `CHUNK_BYTES` beside itself, and only the elements that a rank holds are ever read.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError

CHUNK_BYTES = 16 << 20
# A longer header than this cannot be ours.
MAX_HEADER_BYTES = 1 << 30

NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


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


def write_file(path: Path, entries: Sequence[Entry]) -> int:
    """Write the tensors and wait until the disk has them; returns the size of the file."""
    # Widest first, so that every tensor is aligned to its own elements.
    entries = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    header: dict[str, Any] = {}
    end = 0
    for entry in entries:
        start, end = end, end + entry.num_bytes
        header[entry.key] = {"dtype": dtype_name(entry), "shape": entry.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    staged = bytearray(CHUNK_BYTES)
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for entry in entries:
                _write_tensor(file.write, entry, staged)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error
    return 8 + len(text) + end


def dtype_name(entry: Entry) -> str:
    if entry.dtype not in NAMES:
        raise CheckpointError(f"{entry.key!r} is {entry.dtype}, which a checkpoint cannot hold: {', '.join(DTYPES)}")
    return NAMES[entry.dtype]


def _write_tensor(write: Callable[[memoryview], Any], entry: Entry, staged: bytearray) -> None:
    value = entry.read().detach()
    if value.numel() == 0:
        return
    if (value.dtype, value.shape) != (entry.dtype, entry.shape):
        raise CheckpointError(
            f"{entry.key!r} was announced as {entry.dtype} {entry.shape} and is {value.dtype} {tuple(value.shape)}"
        )
    host = torch.frombuffer(staged, dtype=torch.uint8)
    for chunk in value.reshape(-1).view(torch.uint8).split(CHUNK_BYTES):
        host[: chunk.numel()].copy_(chunk)
        write(memoryview(staged)[: chunk.numel()])


@dataclass(frozen=True, slots=True)
class _Place:
    dtype: torch.dtype
    num_elems: int
    offset: int


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file that has been looked through: where everything lies in it is known, and inside it."""

    path: Path
    places: Mapping[str, _Place]

    def read(self, key: str, first: int, into: Tensor) -> None:
        """Fill the row `into` with elements of a tensor, from its element `first` on; dtypes are converted."""
        place = self.places.get(key)
        if place is None:
            raise CheckpointError(f"{self.path} has no tensor {key!r}, which its index names")
        if first + into.numel() > place.num_elems:
            raise CheckpointError(
                f"{self.path} holds {place.num_elems} elements of {key!r}, and its index names {first + into.numel()}"
            )
        size = place.dtype.itemsize
        staged = bytearray(min(CHUNK_BYTES, into.numel() * size))
        with self.path.open("rb") as file:
            file.seek(place.offset + first * size)
            for chunk in into.split(CHUNK_BYTES // size) if into.numel() else ():
                view = memoryview(staged)[: chunk.numel() * size]
                if file.readinto(view) != len(view):
                    raise CheckpointError(f"{self.path} ends inside {key!r}: it was truncated")
                chunk.copy_(torch.frombuffer(view, dtype=torch.uint8).view(place.dtype))


def require_size(path: Path, num_bytes: int) -> None:
    """A file must be as long as it was when it was written."""
    try:
        seen = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    if seen != num_bytes:
        raise CheckpointError(f"{path} is {seen} bytes long, and was written with {num_bytes}: it was truncated")


def open_file(path: Path, num_bytes: int) -> TensorFile:
    """Look a file through, before anything of it is read."""
    require_size(path, num_bytes)
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(num_bytes - 8, MAX_HEADER_BYTES):
                raise CheckpointError(f"{path} is no safetensors file: its header claims {length} of {num_bytes} bytes")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        header = json.loads(text)
        places = {key: _place(entry, 8 + length, num_bytes) for key, entry in header.items() if key != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {error!r}") from error
    return TensorFile(path, places)


def _place(entry: Any, data: int, num_bytes: int) -> _Place:
    dtype, num_elems = DTYPES[entry["dtype"]], prod(entry["shape"])
    start, stop = (data + offset for offset in entry["data_offsets"])
    if not data <= start <= stop <= num_bytes or stop - start != num_elems * dtype.itemsize:
        raise ValueError(f"bytes {start} to {stop} are no {entry['dtype']} {entry['shape']}")
    return _Place(dtype, num_elems, start)
