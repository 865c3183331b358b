"""What a checkpoint says about itself, as values: pure, and the same whoever wrote it.

A checkpoint is named tensors. Each lies in pieces: intervals of its elements in row-major order, as plain bytes at a
place in a file. So it says nothing about layouts and ranks, and what others write (see `others/`) is described with the
same words. `index.json` is an `Index` in JSON; docs/checkpoint-format.md has every key. What is read here may be
anybody's: everything is checked before it is used.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field, replace
from math import prod
from pathlib import PurePosixPath
from typing import Any, Literal

import torch

from ..errors import CheckpointError, DamageError
from ..shard import Interval
from .dtypes import DTYPES

FORMAT, FORMAT_VERSION = "shardwise checkpoint", 2
# More of either is nobody's tensor.
_MAX_DIMS, _MAX_COUNT = 64, (1 << 63) - 1

Plain = bool | int | float | str | None
Kind = Literal["parameter", "buffer", "unknown"]


@dataclass(frozen=True, slots=True)
class Check:
    """Some bytes of a file, and the CRC-32 (as in zlib and gzip) that they had when they were written."""

    offset: int
    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class File:
    """A file inside the checkpoint's folder. Its checks are in order and cover it; others' files have none."""

    name: str
    num_bytes: int
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements from `start` to `stop` of a tensor: plain little-endian bytes from `offset` on in a file."""

    file: int
    offset: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in files; `dtype` in the words of safetensors. The pieces are in order and cover it exactly."""

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
class Saved:
    """A tensor of a model, under one of its names.

    `tied`: the other names that it has in the model. `group`: the number of the optimizer's group that it is in, if it
    is in one. `state`: what the optimizer keeps for it; a tensor that is shaped like it can be cut like it.
    """

    stored: Stored
    kind: Kind = "unknown"
    is_trained: bool | None = None
    tied: tuple[str, ...] = ()
    group: int | None = None
    state: dict[str, Stored | Plain] = field(default_factory=dict)

    def is_split(self, key: str) -> bool:
        """Whether a tensor of state is shaped like the parameter. A count of steps never is, whatever its shape."""
        item = self.state[key]
        return isinstance(item, Stored) and item.shape == self.stored.shape and key != "step"


@dataclass(frozen=True, slots=True)
class Optimizer:
    """`name`: its class, empty where whoever wrote it does not say."""

    name: str
    groups: tuple[dict[str, Any], ...]
    scaler: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Index:
    """`origin`: who wrote it, in words for people. `extra`: what the program that saved it wanted back."""

    files: tuple[File, ...]
    tensors: dict[str, Saved]
    optimizer: Optimizer | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)

    def every_stored(self) -> Iterator[tuple[str, Stored]]:
        """All tensors, with names for messages: the model's, then the optimizer's."""
        for name, saved in self.tensors.items():
            yield name, saved.stored
        for name, saved in self.tensors.items():
            for key, item in saved.state.items():
                if isinstance(item, Stored):
                    yield f"{key} of {name}", item


def to_json(index: Index) -> str:
    body = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "origin": index.origin,
        "files": [
            {"name": file.name, "num_bytes": file.num_bytes, "checks": [astuple(check) for check in file.checks]}
            for file in index.files
        ],
        "tensors": {name: _saved_to_json(saved) for name, saved in index.tensors.items()},
        "optimizer": None if index.optimizer is None else asdict(index.optimizer),
        "extra": index.extra,
    }
    return json.dumps(body, separators=(",", ":"))


def _saved_to_json(saved: Saved) -> dict[str, Any]:
    return {
        **_stored_to_json(saved.stored),
        "kind": saved.kind,
        "is_trained": saved.is_trained,
        "tied": saved.tied,
        "group": saved.group,
        "state": {
            key: _stored_to_json(item) if isinstance(item, Stored) else item for key, item in saved.state.items()
        },
    }


def _stored_to_json(stored: Stored) -> dict[str, Any]:
    return {"shape": stored.shape, "dtype": stored.dtype, "pieces": [astuple(piece) for piece in stored.pieces]}


def from_json(text: str | bytes) -> Index:
    """Raises CheckpointError where the text is no index, of another format, or leads out of its folder or files."""
    try:
        given = json.loads(text)
        if (given["format"], given["version"]) != (FORMAT, FORMAT_VERSION):
            raise CheckpointError(
                f"the index is {given['format']!r} version {given['version']!r}, and this shardwise reads {FORMAT!r} "
                f"version {FORMAT_VERSION}: load it with the shardwise that wrote it"
            )
        index = Index(
            tuple(_file(entry) for entry in given["files"]),
            {_text(name): _saved(entry) for name, entry in given["tensors"].items()},
            None if given["optimizer"] is None else _optimizer(given["optimizer"]),
            dict(given["extra"]),
            {str(key): str(value) for key, value in given["origin"].items()},
        )
    except RecursionError:
        raise DamageError("the index cannot be understood: it is nested too deeply") from None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise DamageError(f"the index cannot be understood: {error!r}") from error
    try:
        require_sound(index)
    except CheckpointError as error:
        raise DamageError(str(error)) from error
    return index


def require_sound(index: Index) -> None:
    """Raises unless every file lies in the folder, and every piece in its file, and the pieces make up the tensors."""
    for file in index.files:
        path = PurePosixPath(file.name)
        if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in file.name or "\0" in file.name:
            raise CheckpointError(f"the index names a file {file.name!r}, which is not inside the checkpoint")
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
            end = piece.offset + (piece.stop - piece.start) * stored.torch_dtype.itemsize
            if end > index.files[piece.file].num_bytes:
                raise CheckpointError(
                    f"the index has {name!r} up to byte {end} of {index.files[piece.file].name!r}, which is "
                    f"{index.files[piece.file].num_bytes} bytes long"
                )


def _file(entry: Any) -> File:
    checks = tuple(Check(*(_count(number) for number in check)) for check in entry["checks"])
    return File(_text(entry["name"]), _count(entry["num_bytes"]), checks)


def _saved(entry: Any) -> Saved:
    kind = entry["kind"]
    if kind not in ("parameter", "buffer", "unknown"):
        raise ValueError(f"a tensor of kind {kind!r}")
    return Saved(
        _stored(entry),
        kind,
        None if entry["is_trained"] is None else bool(entry["is_trained"]),
        tuple(_text(name) for name in entry["tied"]),
        None if entry["group"] is None else _count(entry["group"]),
        {_text(key): _stored(item) if isinstance(item, dict) else _plain(item) for key, item in entry["state"].items()},
    )


def _stored(entry: Any) -> Stored:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"dtype {entry['dtype']!r}")
    shape = tuple(_count(length) for length in entry["shape"])
    if len(shape) > _MAX_DIMS or prod(shape) > _MAX_COUNT:
        raise ValueError(f"a tensor of {len(shape)} dimensions, of a size that no tensor has")
    return Stored(shape, entry["dtype"], tuple(Piece(*(_count(number) for number in p)) for p in entry["pieces"]))


def _optimizer(entry: Any) -> Optimizer:
    scaler = None if entry["scaler"] is None else {key: float(value) for key, value in entry["scaler"].items()}
    return Optimizer(_text(entry["name"]), tuple(dict(group) for group in entry["groups"]), scaler)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} where a name is expected")
    value.encode()  # JSON can hold halves of characters, which no file's name and no terminal can
    return value


def _plain(value: Any) -> Plain:
    if not isinstance(value, Plain):
        raise ValueError(f"{value!r} where a plain value is expected")
    return value


def _count(number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= _MAX_COUNT:
        raise ValueError(f"{number!r} where a number of things is expected")
    return number


@dataclass(frozen=True, slots=True)
class Part:
    """What of a piece is wanted: `num_elems` from its element `first` on, for the place `at` of the wanted interval."""

    piece: Piece
    first: int
    at: int
    num_elems: int


def parts_of(stored: Stored, wanted: Interval) -> Iterator[Part]:
    """What to read for an interval of a tensor whose pieces cover it, in order."""
    for piece in stored.pieces:
        common = wanted.overlap(Interval(piece.start, piece.stop))
        if common.num_elems:
            yield Part(piece, common.start - piece.start, common.start - wanted.start, common.num_elems)


def require_cover(name: str, pieces: Iterable[Piece], num_elems: int) -> None:
    """Raises unless the pieces, in their order, are all elements of a tensor, each once."""
    end = 0
    for piece in pieces:
        if piece.start != end or piece.stop < piece.start:
            raise CheckpointError(f"the index has no piece, or two, for element {end} of {name!r}")
        end = piece.stop
    if end != num_elems:
        raise CheckpointError(f"the index has pieces for {end} of the {num_elems} elements of {name!r}")


def in_order(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    return tuple(sorted(pieces, key=lambda piece: piece.start))


def merge(shares: Iterable[Mapping[str, Saved]]) -> dict[str, Saved]:
    """The tensors of an index from what each rank wrote of them. Plain values are those of the rank that comes first.

    The pieces are put in order; whether they are complete is for `require_sound` to say.
    """
    found: dict[str, list[Saved]] = {}
    for share in shares:
        for name, saved in share.items():
            found.setdefault(name, []).append(saved)
    return {name: _merged(name, parts) for name, parts in found.items()}


def _merged(name: str, parts: list[Saved]) -> Saved:
    # A rank that wrote nothing of it knows no state.
    parts = [part for part in parts if part.stored.pieces or part.state] or parts[:1]
    parts.sort(key=lambda saved: saved.stored.pieces[0].start if saved.stored.pieces else 0)
    first = parts[0]
    for other in parts[1:]:
        if _described(other.state) != _described(first.state):
            raise CheckpointError(
                f"the optimizer's state of parameter {name!r} is {sorted(first.state)} on one rank and "
                f"{sorted(other.state)} on another: such state cannot be brought together"
            )
    state = {
        key: _joined([part.state[key] for part in parts]) if isinstance(item, Stored) else item  # type: ignore[misc]
        for key, item in first.state.items()
    }
    return Saved(_joined([part.stored for part in parts]), first.kind, first.is_trained, first.tied, first.group, state)


def _joined(parts: list[Stored]) -> Stored:
    """What lies side by side in one file becomes one piece."""
    size, joined = parts[0].torch_dtype.itemsize, list[Piece]()
    for piece in in_order(piece for part in parts for piece in part.pieces):
        if joined and piece == _next_to(joined[-1], size, piece.stop):
            joined[-1] = replace(joined[-1], stop=piece.stop)
        else:
            joined.append(piece)
    return Stored(parts[0].shape, parts[0].dtype, tuple(joined))


def _next_to(last: Piece, size: int, stop: int) -> Piece:
    return Piece(last.file, last.offset + (last.stop - last.start) * size, last.stop, stop)


def _described(state: Mapping[str, Stored | Plain]) -> dict[str, Any]:
    return {key: (item.shape, item.dtype) if isinstance(item, Stored) else None for key, item in state.items()}
