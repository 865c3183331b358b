"""What a checkpoint says about itself: `index.json` as values, pure.

Parameters go by their original names and lie in pieces, intervals of their elements in row-major order, each in the
file of the rank that wrote it. State that is shaped like its parameter lies in the same pieces; any other tensor
of state is whole, in the file of the first piece; plain numbers are in the index itself. Buffers are in the file of
rank 0. What is read here may be anybody's: everything is checked before it is used.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

import torch

from ..errors import CheckpointError
from ..shard import Interval
from ..version import VERSION
from .tensors import DTYPES

FORMAT, FORMAT_VERSION = "shardwise checkpoint", 1


@dataclass(frozen=True, slots=True)
class File:
    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """An interval of a parameter's elements, and the number of the file that it lies in."""

    file: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StateItem:
    """One entry of the optimizer's state of a parameter: `split` like it, a `whole` tensor, or a plain `value`."""

    kind: Literal["split", "whole", "value"]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    value: int | float | str | None = None


@dataclass(frozen=True, slots=True)
class Param:
    """`group` is the number of the optimizer's group that it is in, if it is in one."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]
    group: int | None
    state: dict[str, StateItem]


@dataclass(frozen=True, slots=True)
class Buffer:
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Optimizer:
    name: str
    groups: tuple[dict[str, Any], ...]
    scaler: dict[str, float] | None


@dataclass(frozen=True, slots=True)
class Index:
    files: tuple[File, ...]
    params: dict[str, Param]
    buffers: dict[str, Buffer]
    optimizer: Optimizer | None
    extra: dict[str, Any]

    def to_json(self) -> str:
        head = {"format": FORMAT, "version": FORMAT_VERSION, "shardwise": VERSION, "torch": torch.__version__}
        return json.dumps(head | asdict(self), separators=(",", ":"))


def weight_key(name: str, start: int) -> str:
    """What the piece of a parameter that begins at `start` is called in its file."""
    return f"weight/{name}/{start}"


def state_key(name: str, key: str, start: int) -> str:
    return f"state/{key}/{name}/{start}"


def buffer_key(name: str) -> str:
    return f"buffer/{name}"


def from_json(text: str | bytes) -> Index:
    """Raises CheckpointError where the text is no index, of another format, or leads out of its folder."""
    try:
        given = json.loads(text)
        if (given["format"], given["version"]) != (FORMAT, FORMAT_VERSION):
            raise CheckpointError(
                f"the index is {given['format']!r} version {given['version']!r}, and this shardwise reads {FORMAT!r} "
                f"version {FORMAT_VERSION}: load it with the shardwise that wrote it ({given.get('shardwise')})"
            )
        files = tuple(_file(entry) for entry in given["files"])
        return Index(
            files,
            {name: _param(entry, len(files)) for name, entry in given["params"].items()},
            {name: Buffer(_shape(entry["shape"]), _dtype(entry["dtype"])) for name, entry in given["buffers"].items()},
            None if given["optimizer"] is None else _optimizer(given["optimizer"]),
            dict(given["extra"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"the index cannot be understood: {error!r}") from error


def _file(entry: Any) -> File:
    name = entry["name"]
    if not isinstance(name, str) or name in ("", ".", "..") or PurePosixPath(name).name != name or "\\" in name:
        raise CheckpointError(f"the index names a file {name!r}, which is not a plain name inside the checkpoint")
    return File(name, _count(entry["num_bytes"]))


def _param(entry: Any, num_files: int) -> Param:
    pieces = tuple(Piece(*(_count(p[key]) for key in ("file", "start", "stop"))) for p in entry["pieces"])
    for piece in pieces:
        if piece.file >= num_files or piece.start > piece.stop:
            raise ValueError(f"{piece}, of {num_files} files")
    group = None if entry["group"] is None else _count(entry["group"])
    state = {key: _state_item(item) for key, item in entry["state"].items()}
    return Param(_shape(entry["shape"]), _dtype(entry["dtype"]), pieces, group, state)


def _state_item(item: Any) -> StateItem:
    if item["kind"] == "value":
        return StateItem("value", value=item["value"])
    if item["kind"] not in ("split", "whole"):
        raise ValueError(f"state of kind {item['kind']!r}")
    return StateItem(item["kind"], _dtype(item["dtype"]), _shape(item["shape"]))


def _optimizer(entry: Any) -> Optimizer:
    scaler = None if entry["scaler"] is None else {key: float(value) for key, value in entry["scaler"].items()}
    return Optimizer(str(entry["name"]), tuple(dict(group) for group in entry["groups"]), scaler)


def _shape(shape: Any) -> tuple[int, ...]:
    return tuple(_count(length) for length in shape)


def _dtype(name: Any) -> str:
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r}")
    return str(name)


def _count(number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(f"{number!r} where a number of things is expected")
    return number


@dataclass(frozen=True, slots=True)
class Part:
    """What of a piece is wanted: `num_elems` from its element `first` on, for the place `at` of the wanted interval."""

    piece: Piece
    first: int
    at: int
    num_elems: int


def parts_of(name: str, pieces: Sequence[Piece], wanted: Interval) -> list[Part]:
    """What to read for an interval of a parameter, in order; the pieces must cover it without a gap."""
    found: list[Part] = []
    end = wanted.start
    for piece in sorted(pieces, key=lambda piece: piece.start):
        common = wanted.overlap(Interval(piece.start, piece.stop))
        if common.num_elems:
            if common.start != end:
                break
            found.append(Part(piece, common.start - piece.start, common.start - wanted.start, common.num_elems))
            end = common.stop
    if end != wanted.stop:
        raise CheckpointError(f"the index has no piece, or two, for element {end} of parameter {name!r}")
    return found


Contribution = Mapping[str, tuple[Piece, int | None, dict[str, StateItem]]]


def merge(contributions: Sequence[Contribution], shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, Param]:
    """The parameters of an index, from what each rank says that it wrote, and from their shapes and dtypes."""
    found: dict[str, list[tuple[Piece, int | None, dict[str, StateItem]]]] = {name: [] for name in shapes}
    for contribution in contributions:
        for name, written in contribution.items():
            found[name].append(written)
    params = {}
    for name, (shape, dtype) in shapes.items():
        ordered = sorted(found[name], key=lambda written: written[0].start)
        pieces = tuple(piece for piece, _, _ in ordered)
        num_elems = torch.Size(shape).numel()
        parts_of(name, pieces, Interval(0, num_elems))
        group, state = (ordered[0][1], ordered[0][2]) if ordered else (None, {})
        for piece, _, other in ordered:
            if _kinds(other) != _kinds(state):
                raise CheckpointError(
                    f"the optimizer's state of parameter {name!r} is {sorted(state)} on rank {pieces[0].file} and "
                    f"{sorted(other)} on rank {piece.file}: such state cannot be brought together"
                )
        params[name] = Param(shape, dtype, pieces, group, state)
    return params


def _kinds(state: Mapping[str, StateItem]) -> dict[str, tuple[str, str]]:
    return {key: (item.kind, item.dtype) for key, item in state.items()}
