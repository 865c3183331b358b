"""Whole tensors in two files that all ranks write into at once: `model.safetensors` and `optimizer.safetensors`.

Where everything lies follows from the shapes alone, so each rank knows the place of its parts, and nothing is gathered.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..base.errors import CheckpointError
from . import tensor_files as files_of
from .disk import check_bytes, write_pieces
from .dtypes import DTYPES
from .index import Check, File, Piece, Saved, Stored
from .share import Portion, Share
from .tensor_files import Entry, Layout, state_key

NAMES = ("model.safetensors", "optimizer.safetensors")


def lay_out(tensors: Mapping[str, Saved]) -> list[Layout]:
    """The second one only if the optimizer keeps tensors."""
    model = [_entry(name, saved.stored) for name, saved in tensors.items()]
    state = [
        _entry(state_key(key, name), item)
        for name, saved in tensors.items()
        for key, item in saved.state.items()
        if isinstance(item, Stored)
    ]
    return [files_of.lay_out(entries, {"format": "pt"}) for entries in (model, state) if entries or entries is model]


def _entry(key: str, stored: Stored) -> Entry:
    return Entry(key, DTYPES[stored.dtype], stored.shape, torch.Tensor)


def make_files(into: Path, layouts: Sequence[Layout]) -> None:
    for name, layout in zip(NAMES, layouts, strict=False):
        try:
            with (into / name).open("wb") as file:
                file.truncate(layout.num_bytes)
        except OSError as error:
            raise CheckpointError(f"cannot write {into / name}: {error.strerror or error}") from error


def write_share(
    into: Path, layouts: Sequence[Layout], share: Share, is_first: bool
) -> tuple[list[File], dict[str, Saved]]:
    """This rank's parts; the first rank writes the beginnings of the files, too."""
    placed = [(portion, _place(portion, layouts)) for portion in share.portions]
    written = []
    for number, layout in enumerate(layouts):
        try:
            checks = write_pieces(
                into / NAMES[number], _contents(number, layout, placed, is_first), check_bytes(layout.num_bytes)
            )
        except OSError as error:
            raise CheckpointError(f"cannot write {into / NAMES[number]}: {error.strerror or error}") from error
        written.append(File(NAMES[number], layout.num_bytes, tuple(checks)))
    return written, share.with_pieces(placed)


def _contents(
    number: int, layout: Layout, placed: Sequence[tuple[Portion, Piece]], is_first: bool
) -> Iterator[tuple[int, Tensor]]:
    if is_first:
        yield 0, torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
    for portion, piece in placed:
        if piece.file == number:
            yield piece.offset, files_of.value_of(portion.as_entry(portion.name))


def _place(portion: Portion, layouts: Sequence[Layout]) -> Piece:
    number = 0 if portion.key is None else 1
    label = portion.name if portion.key is None else state_key(portion.key, portion.name)
    offset = layouts[number].offsets[label] + portion.interval.start * DTYPES[portion.of.dtype].itemsize
    return Piece(number, offset, portion.interval.start, portion.interval.stop)


def merge_files(shares: Sequence[Sequence[File]]) -> list[File]:
    """The same files, with what every rank wrote into them."""
    merged = []
    for parts in zip(*shares, strict=True):
        checks: list[Check] = sorted((check for part in parts for check in part.checks), key=lambda c: c.offset)
        merged.append(replace(parts[0], checks=tuple(checks)))
    return merged
