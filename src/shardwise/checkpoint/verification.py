"""Verify a checkpoint: it is complete, no byte has changed, and every number is finite. All problems are reported.

Each file is read once, from its beginning to its end, a block at a time: its checksums are compared, and its numbers
are checked. Files of other libraries have no checksums; their lengths and numbers are checked all the same.
"""

import cmath
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..base.errors import CheckpointError, DamageError
from ..base.intervals import Interval
from . import folder
from .folder import CHECKPOINTS, INSIDE, all_steps, step_folder
from .index import Index, Stored, from_json, one_piece
from .opened import Opened, Reader, open_checkpoint
from .tensor_files import OnBytes


@dataclass(slots=True)
class Report:
    """The results of a verification. `is_complete` is False if the save failed, or has not finished yet.

    `damage` prevents loading; `not_finite` lists tensors with infinite or NaN values. `is_refused`: it is not damaged
    but cannot be read, for example because its format is newer. A resumed run stops there, and takes no older one.
    """

    path: Path
    origin: dict[str, str] = field(default_factory=dict)
    is_complete: bool = True
    is_refused: bool = False
    num_tensors: int = 0
    num_files: int = 0
    num_bytes: int = 0
    num_checksums: int = 0
    damage: list[str] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)

    @property
    def is_usable(self) -> bool:
        return self.is_complete and not self.damage

    @property
    def problems(self) -> list[str]:
        return [*self.damage, *self.not_finite]


def look_at(path: Path) -> tuple[Report, Opened | None]:
    """Check everything but the tensors' bytes. Return the opened checkpoint as well, or None if it cannot be opened."""
    report = Report(path, is_complete=folder.find(path) is not None or not _is_begun(path))
    try:
        if _is_own(path):
            place, text = folder.read_index(path, report.damage.append)
            opened = Opened(place, from_json(text))
        else:
            opened = open_checkpoint(path)
    except CheckpointError as error:
        report.is_refused = report.is_complete and not report.damage and not isinstance(error, DamageError)
        report.damage.append(str(error))
        return report, None
    index = opened.index
    report.origin = index.origin
    report.num_tensors = sum(1 for _ in index.every_stored())
    report.num_files, report.num_bytes = len(index.files), sum(file.num_bytes for file in index.files)
    report.num_checksums = sum(len(file.checks) for file in index.files)
    return report, opened


def _is_own(path: Path) -> bool:
    return any((place / folder.INDEX).is_file() for place in (path, folder.partial_of(path)))


def _is_begun(path: Path) -> bool:
    """Return whether a path is one of our checkpoints, complete or unfinished."""
    siblings = (step_folder(path.parent, step) for step in all_steps(path.parent))
    return _is_own(path) or folder.partial_of(path).is_dir() or path in siblings


def checkpoints_in(path: Path) -> list[Path]:
    """Return the checkpoints of a run folder or of its `checkpoints/`, oldest first, unfinished ones too."""
    if _is_begun(path):
        return []
    roots = (path / CHECKPOINTS, path)
    return next(([step_folder(root, step) for step in steps] for root in roots if (steps := all_steps(root))), [])


def parts_of_others(path: Path) -> list[Path]:
    """Return our checkpoints in a folder of Hugging Face's Trainer or Accelerate, then its weight files. Else []."""
    names = {place.name.removesuffix(".partial") for place in path.glob(f"{INSIDE}*") if place.is_dir()}
    parts = [path / name for name in sorted(names) if re.fullmatch(rf"{INSIDE}(_\d+)?", name)]
    return [*parts, *sorted(path.glob("*.safetensors"))] if parts else []


def verify(report: Report, opened: Opened, on_bytes: OnBytes) -> None:
    """Read everything, and add the problems to the report."""
    index = opened.index
    for name, saved in index.tensors.items():
        for key, item in saved.state.items():
            if isinstance(item, float) and not math.isfinite(item):
                report.not_finite.append(f"{key} of {name!r} is {item}")
    wrong: dict[str, list[tuple[int, int, str]]] = {}
    with opened.reader() as reader:
        for number, parts in enumerate(_parts(index)):
            try:
                reader.require_length(number)
            except CheckpointError as error:
                report.damage.append(str(error))
                on_bytes(index.files[number].num_bytes)
                continue
            reader.plan((stored, Interval(0, stored.num_elems)) for _, _, stored in parts)
            for name, start, stored in parts:
                for at, values in _values(reader, stored, report.damage, on_bytes):
                    if name and (found := _not_finite(values)):
                        num, first, value = found
                        wrong.setdefault(name, []).append((start + at + first, num, value))
    tensors = dict(index.every_stored()) if wrong else {}
    for name, places in wrong.items():
        at, _, value = min(places)
        shape, num = tensors[name].shape, sum(num for _, num, _ in places)
        where = [int(number) for number in torch.unravel_index(torch.tensor(at), shape)]
        how_many = f"{num:,} of {tensors[name].num_elems:,} numbers are not finite"
        report.not_finite.append(f"{name!r}: {how_many}; the first is element {at}, at {where}: {value}")


def _parts(index: Index) -> list[list[tuple[str, int, Stored]]]:
    """Return the parts of each file to read, in order: name of the tensor, number of the part's first element, place.

    Bytes outside of floating-point tensors have an empty name, and are read only to compare checksums, if any.
    """
    files: list[list[tuple[str, int, Stored]]] = [[] for _ in index.files]
    for name, stored in index.every_stored():
        if stored.torch_dtype.is_floating_point or stored.torch_dtype.is_complex:
            for file, offset, start, stop in (piece for piece in stored.pieces if piece.stop > piece.start):
                part = Stored((stop - start,), stored.dtype, one_piece(file, offset, stop - start))
                files[file].append((name, start, part))
    for number, (about, parts) in enumerate(zip(index.files, files, strict=True)):
        spans = sorted((part.pieces[0].offset, part.num_bytes) for _, _, part in parts)
        end = 0
        for offset, num_bytes in (*spans, (about.num_bytes, 0)) if about.checks else ():
            if offset > end:
                parts.append(("", 0, Stored((offset - end,), "U8", one_piece(number, end, offset - end))))
            end = max(end, offset + num_bytes)
        parts.sort(key=lambda part: part[2].pieces[0].offset)
    return files


def _values(reader: Reader, stored: Stored, damage: list[str], on_bytes: OnBytes) -> Iterator[tuple[int, Tensor]]:
    """Yield the values of one piece, each row with the number of its first element. Add damaged blocks to `damage`."""
    (piece,), size = stored.pieces, stored.torch_dtype.itemsize
    at = 0
    while at < stored.num_elems:
        try:
            for values in reader.rows(stored, Interval(at, stored.num_elems)):
                yield at, values
                on_bytes(values.nbytes)
                at += values.numel()
        except CheckpointError as error:
            if str(error) not in damage:  # other tensors may share the block
                damage.append(str(error))
            block = reader.block_at(piece.file, piece.offset + at * size, piece.offset + stored.num_bytes)
            behind = -(-(block.offset + block.num_bytes - piece.offset) // size)
            on_bytes((min(behind, stored.num_elems) - at) * size)
            at = behind


def _not_finite(values: Tensor) -> tuple[int, int, str] | None:
    """Return the number of values that are not finite, the index of the first and its value. None if all are finite."""
    if values.dtype.itemsize == 1:
        values = values.float()
    # The sum is fast. It is not finite if any term is not; it may also overflow, so the terms are then checked.
    wide = torch.float32 if values.dtype.itemsize < 4 else values.dtype
    if cmath.isfinite(values.sum(dtype=wide).item()):
        return None
    wrong = (~values.isfinite()).nonzero()
    return (len(wrong), int(wrong[0]), str(values[wrong[0]].item())) if len(wrong) else None
