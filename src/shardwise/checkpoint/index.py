"""The index of a checkpoint, as values and as `index.json`, the same whichever library wrote it.

A checkpoint is a set of named tensors. Each lies in pieces: intervals of its elements in row-major order, as plain
bytes at a place in a file. So the index does not depend on layouts and ranks, and checkpoints of other libraries (see
`interop/`) are described in the same way. An index is not trusted: `require_sound` checks it before it is used.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf, prod
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple

import torch

from ..base.documents import parse
from ..base.errors import CheckpointError, DamageError
from ..base.intervals import Interval

# The dtypes that files can hold: their names in safetensors and in torch.
_DTYPE_NAMES = (
    "F64:float64 F32:float32 F16:float16 BF16:bfloat16 F8_E4M3:float8_e4m3fn F8_E5M2:float8_e5m2 I64:int64 I32:int32 "
    "I16:int16 I8:int8 U8:uint8 U64:uint64 U32:uint32 U16:uint16 BOOL:bool C64:complex64"
)
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, dtype) for name, dtype in (pair.split(":") for pair in _DTYPE_NAMES.split())
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Plain = bool | int | float | str | None
Kind = Literal["parameter", "buffer", "unknown"]

# Limits of torch: the dimensions, and the elements, of a tensor.
MAX_DIMS, MAX_COUNT = 64, (1 << 63) - 1
MAX_NAME = 4096
# Tied weights are the same bytes under several names, and a reused layer has dozens of names. A mask may be one number,
# expanded. So tensors may have this many times the bytes of the files, plus 1 GiB. A small file cannot claim terabytes.
MAX_USES, FREE_BYTES = 64, 1 << 30


class Check(NamedTuple):
    """A range of bytes in a file, and its CRC-32 (as in zlib and gzip) when it was written."""

    offset: int
    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class File:
    """A file inside the checkpoint's folder. Its checks cover it, in order. Files of other libraries have none."""

    name: str
    num_bytes: int
    checks: tuple[Check, ...] = ()


class Piece(NamedTuple):
    """The elements from `start` to `stop` of a tensor: plain little-endian bytes that begin at `offset` in a file."""

    file: int
    offset: int
    start: int
    stop: int


def one_piece(file: int, offset: int, num_elems: int) -> tuple[Piece, ...]:
    """Return the pieces of a contiguous tensor: one, or none if the tensor is empty."""
    return (Piece(file, offset, 0, num_elems),) if num_elems else ()


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in files. `dtype` is its name in safetensors. The pieces are in order and cover the tensor exactly."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def num_elems(self) -> int:
        return prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return self.num_elems * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Saved(Stored):
    """A tensor of a model, under one of its names.

    `tied`: its other names in the model. `group`: the number of its parameter group in the optimizer, if it has one.
    `state`: its optimizer state. A state tensor with the shape of the parameter is split over the ranks like it.
    """

    kind: Kind = "unknown"
    is_trained: bool | None = None
    tied: tuple[str, ...] = ()
    group: int | None = None
    state: dict[str, Stored | Plain] = field(default_factory=dict)

    @property
    def stored_state(self) -> dict[str, Stored]:
        """Return the optimizer's state without plain values: tensors only."""
        return {key: item for key, item in self.state.items() if isinstance(item, Stored)}

    def stored(self, key: str | None) -> Stored:
        """Return the tensor itself (key None), or the state tensor with this key."""
        return self if key is None else self.stored_state[key]

    def with_pieces(self, pieces: Mapping[str | None, tuple[Piece, ...]]) -> "Saved":
        """Return a copy with other pieces: those of the tensor itself under None, those of the state by key."""
        state = {key: replace(item, pieces=pieces.get(key, ())) for key, item in self.stored_state.items()}
        return replace(self, pieces=pieces.get(None, ()), state={**self.state, **state})

    def is_split(self, key: str) -> bool:
        """True for a state tensor with the shape of the parameter: it is split like it. Never for the step count."""
        item = self.state[key]
        return isinstance(item, Stored) and item.shape == self.shape and key != "step"


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The optimizer: its class (`name`; empty if unknown), its parameter groups, and the state of the loss scaler."""

    name: str
    groups: tuple[dict[str, Any], ...]
    scaler: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Index:
    """Everything in a checkpoint but the tensors' bytes. `origin`: its writer. `extra`: values that the user saved."""

    files: tuple[File, ...]
    tensors: dict[str, Saved]
    optimizer: Optimizer | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(stored.num_bytes for _, stored in self.every_stored())

    def every_stored(self) -> Iterator[tuple[str, Stored]]:
        """Yield all tensors with names for error messages: the model's, then the optimizer's."""
        yield from self.tensors.items()
        for name, saved in self.tensors.items():
            for key, item in saved.stored_state.items():
                yield f"{key} of {name}", item


def count(value: Any) -> int:
    """Check a count (an int of 0 or more) from an untrusted file. Raise ValueError."""
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError("a number of things is expected, and something else is there")
    return value


def counts(values: Any, at_most: int = MAX_DIMS) -> tuple[int, ...]:
    """Check a shape or other counts from an untrusted file. Raise ValueError."""
    if type(values) not in (tuple, list) or len(values) > at_most:
        raise ValueError(f"no list of at most {at_most} numbers")
    return tuple(map(count, values))


def text(value: Any, max_length: float = MAX_NAME) -> str:
    """Check a name from an untrusted file. It must be short: a pickle can repeat it many times. Raise ValueError."""
    if type(value) is not str or len(value) > max_length:
        raise ValueError("no short text where a name is expected")
    value.encode()  # raises for lone surrogates, which JSON and pickles can hold, but not UTF-8
    return value


def shape_from(values: Any) -> tuple[int, ...]:
    """Check a shape from an untrusted file. Dimensions of 0 do not hide others that are too large. Raise ValueError."""
    shape = counts(values)
    if prod(filter(None, shape)) > MAX_COUNT:
        raise ValueError(f"no tensor has the shape {shape}")
    return shape


def require_inside(name: str) -> None:
    """Raise unless a file with this relative name is inside the checkpoint's folder."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise CheckpointError(f"it names a file {name!r}, which is not inside the checkpoint")


def require_sound(index: Index) -> None:
    """Raise unless every file is in the folder, every piece in its file, and the pieces make up the tensors.

    The bytes of all tensors together must not be many times those of the files.
    """
    for file in index.files:
        require_inside(file.name)
        end = 0
        for check in file.checks:
            if check.offset != end:
                raise CheckpointError(f"the index has no checksum, or two, for byte {end} of {file.name!r}")
            end += check.num_bytes
        if file.checks and end != file.num_bytes:
            raise CheckpointError(f"the index has checksums for {end} of the {file.num_bytes} bytes of {file.name!r}")
    for name, stored in index.every_stored():
        require_cover(name, stored.pieces, stored.num_elems)
        for piece in stored.pieces:
            if piece.file >= len(index.files):
                raise CheckpointError(f"the index has {name!r} in file {piece.file}, of {len(index.files)}")
            file, end = index.files[piece.file], piece.offset + (piece.stop - piece.start) * stored.torch_dtype.itemsize
            if end > file.num_bytes:
                where = f"byte {end} of {file.name!r}, which is {file.num_bytes} bytes long"
                raise CheckpointError(f"the index has {name!r} up to {where}")
    described, present = index.num_bytes, sum(file.num_bytes for file in index.files)
    if described > MAX_USES * present + FREE_BYTES:
        raise CheckpointError(f"its tensors have {described:,} bytes, its files only {present:,}: save each contiguous")


def cut(stored: Stored, wanted: Interval) -> Iterator[Piece]:
    """Yield the pieces of an interval of a tensor, in order: the pieces that overlap it, cut at its ends."""
    size = stored.torch_dtype.itemsize
    for piece in stored.pieces:
        start, stop = max(piece.start, wanted.start), min(piece.stop, wanted.stop)
        if start < stop:
            yield Piece(piece.file, piece.offset + (start - piece.start) * size, start, stop)


def require_cover(name: str, pieces: Iterable[Piece], num_elems: int) -> None:
    """Raise unless the pieces, in their order, contain every element of a tensor exactly once."""
    end = 0
    for piece in pieces:
        if piece.start != end or piece.stop < piece.start:
            raise CheckpointError(f"the index has no piece, or two, for element {end} of {name!r}")
        end = piece.stop
    if end != num_elems:
        raise CheckpointError(f"the index has pieces for {end} of the {num_elems} elements of {name!r}")


def in_order(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    return tuple(sorted(pieces, key=lambda piece: piece.start))


# The index as JSON. docs/checkpoint-format.md describes every key. The file is not trusted: every value is checked.
FORMAT, FORMAT_VERSION = "shardwise checkpoint", 2


def to_json(index: Index) -> str:
    body = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "origin": index.origin,
        "files": index.files,
        "optimizer": index.optimizer,
        "extra": index.extra,
    }
    # Tensors are encoded one by one: a million of them as lists and dicts would take a gigabyte.
    tensors = ",".join(f"{_dumps(name)}:{_dumps(saved)}" for name, saved in index.tensors.items())
    return f'{_dumps(body)[:-1]},"tensors":{{{tensors}}}}}'


_dumps = json.JSONEncoder(
    separators=(",", ":"), default=lambda value: {each.name: getattr(value, each.name) for each in fields(value)}
).encode


def from_json(content: str | bytes) -> Index:
    """Parse an index. Raise CheckpointError if it has another format, or points outside of its folder or files."""
    try:
        given = parse(content)
        if (given["format"], given["version"]) != (FORMAT, FORMAT_VERSION):
            raise CheckpointError(
                f"the index is {given['format']!r} version {given['version']!r}, and this shardwise reads {FORMAT!r} "
                f"version {FORMAT_VERSION}: load it with the shardwise that wrote it"
            )
        optimizer = None
        if (about := given["optimizer"]) is not None:
            scaler = about["scaler"]
            if scaler is not None:
                scaler = {key: float(value) for key, value in scaler.items()}
            optimizer = Optimizer(text(about["name"], inf), tuple(dict(group) for group in about["groups"]), scaler)
        index = Index(
            tuple(_file(entry) for entry in given["files"]),
            {text(name, inf): _saved(entry) for name, entry in given["tensors"].items()},
            optimizer,
            dict(given["extra"]),
            {str(key): str(value) for key, value in given["origin"].items()},
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise DamageError(f"the index cannot be understood: {in_words(error)}") from error
    try:
        require_sound(index)
    except CheckpointError as error:
        raise DamageError(str(error)) from error
    return index


def in_words(error: Exception) -> str:
    """Return a readable reason why a file could not be decoded."""
    match error:
        case json.JSONDecodeError():
            return f"it is no JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        case UnicodeDecodeError():
            return f"it is no text: byte {error.start} is none of UTF-8"
        case KeyError():
            return f"it has no {error.args[0]!r}"
        case TypeError() | AttributeError():
            return f"a value in it is of another kind than it should be ({error})"
    return str(error)


def _file(entry: Any) -> File:
    checks = tuple(Check(*map(count, check)) for check in entry["checks"])
    return File(text(entry["name"], inf), count(entry["num_bytes"]), checks)


def _saved(entry: Any) -> Saved:
    if entry["kind"] not in ("parameter", "buffer", "unknown"):
        raise ValueError(f"a tensor of kind {entry['kind']!r}")
    state = {text(key, inf): item for key, item in entry["state"].items()}
    if wrong := [item for item in state.values() if not isinstance(item, (dict, Plain))]:
        raise ValueError(f"{wrong[0]!r} where a plain value is expected")
    return Saved(
        *_stored(entry),
        entry["kind"],
        None if entry["is_trained"] is None else bool(entry["is_trained"]),
        tuple(text(name, inf) for name in entry["tied"]),
        None if entry["group"] is None else count(entry["group"]),
        {key: Stored(*_stored(item)) if isinstance(item, dict) else item for key, item in state.items()},
    )


def _stored(entry: Any) -> tuple[tuple[int, ...], str, tuple[Piece, ...]]:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"dtype {entry['dtype']!r}")
    pieces = tuple(Piece(*map(count, piece)) for piece in entry["pieces"])
    return shape_from(entry["shape"]), entry["dtype"], pieces
