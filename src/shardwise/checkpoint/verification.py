"""Verify a checkpoint: it is complete, no byte has changed, and every number is finite. All problems are reported.

Each file is read once, from its beginning to its end, a block at a time: its checksums are compared, and its numbers
are checked. Files of other libraries have no checksums; their lengths and numbers are checked all the same.
"""

import cmath
import math
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..base.errors import CheckpointError, DamageError
from ..base.intervals import Interval
from . import folder
from .disk import BLOCK_BYTES
from .index import Check, Index, Piece, Stored, from_json, require_sound
from .opened import Opened, open_checkpoint
from .reader import Reader
from .steps import CHECKPOINTS, INSIDE, all_steps, step_folder
from .tensor_files import OnBytes


@dataclass(slots=True)
class Report:
    """The results of a verification. A checkpoint that is not complete was not finished, or not yet.

    `damage` prevents loading; `not_finite` lists tensors with infinite or NaN values. A checkpoint that `is_refused` is
    undamaged but cannot be read, for example because its format is newer: a run does not skip it.
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
    """Check everything but the tensors; the second value is None where the tensors cannot be checked."""
    report = Report(path, is_complete=folder.find(path) is not None or not _is_begun(path))
    try:
        opened = _open_own(path, report) if _is_own(path) else open_checkpoint(path)
        require_sound(opened.index)
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
    """Return whether it is one of our checkpoints, or an unfinished one."""
    siblings = (step_folder(path.parent, step) for step in all_steps(path.parent))
    return _is_own(path) or folder.partial_of(path).is_dir() or path in siblings


def _open_own(path: Path, report: Report) -> Opened:
    """Open like `open_checkpoint`, but also without a marker or with another index than the marker's."""
    place = folder.find(path)
    if place is None:
        place = next(p for p in (path, folder.partial_of(path)) if (p / folder.INDEX).is_file())
        report.damage.append(f"{place} is incomplete: its save did not finish (no file {folder.MARKER!r})")
    text = folder.read_index_in(place)
    if report.is_complete and not folder.is_sealed(place, text):
        report.damage.append(f"{place / folder.INDEX} is not what was written: its digest is not the marker's")
    return Opened(place, from_json(text))


def checkpoints_in(path: Path) -> list[Path]:
    """Return the checkpoints of a run folder or of its `checkpoints/`, oldest first, unfinished ones too."""
    if _is_begun(path):
        return []
    roots = (path / CHECKPOINTS, path)
    return next(([step_folder(root, step) for step in steps] for root in roots if (steps := all_steps(root))), [])


def parts_of_others(path: Path) -> list[Path]:
    """Return our checkpoints in a folder of the Trainer or of Accelerate, one of each model, then its weight files.

    Empty where the folder holds none of ours.
    """
    names = {place.name.removesuffix(".partial") for place in path.glob(f"{INSIDE}*") if place.is_dir()}
    parts = [path / name for name in sorted(names) if re.fullmatch(rf"{INSIDE}(_\d+)?", name)]
    return [*parts, *sorted(path.glob("*.safetensors"))] if parts else []


def verify(report: Report, opened: Opened, on_bytes: OnBytes) -> None:
    """Read everything, and add the problems to the report."""
    index, numbers = opened.index, _Numbers()
    for name, saved in index.tensors.items():
        for key, item in saved.state.items():
            if isinstance(item, float) and not math.isfinite(item):
                report.not_finite.append(f"{key} of {name!r} is {item}")
    places = _places(index)
    with opened.reader() as reader:
        for number, file in enumerate(index.files):
            try:
                reader.require_length(number)
            except CheckpointError as error:
                report.damage.append(str(error))
                on_bytes(file.num_bytes)
                continue
            # Without checksums only the numbers can be checked.
            everything = [_Range(number, 0, file.num_bytes, places[number])]
            for wanted in everything if file.checks else _together(number, places[number]):
                _look_through(reader, wanted, file.checks, numbers, report.damage, on_bytes)
    report.not_finite += numbers.summary()


@dataclass(frozen=True, slots=True)
class _Place:
    """Elements of a tensor in a file, from the element `start` on."""

    offset: int
    stop: int
    start: int
    name: str
    stored: Stored


@dataclass(slots=True)
class _Range:
    """Bytes of a file, and the tensors in them, in order."""

    file: int
    start: int
    stop: int
    places: list[_Place]


def _places(index: Index) -> list[list[_Place]]:
    """Return the places of floating-point tensors by file, in order."""
    places: list[list[_Place]] = [[] for _ in index.files]
    for name, stored in index.every_stored():
        if stored.torch_dtype.is_floating_point or stored.torch_dtype.is_complex:
            for piece in stored.pieces:
                stop = piece.offset + (piece.stop - piece.start) * stored.torch_dtype.itemsize
                places[piece.file].append(_Place(piece.offset, stop, piece.start, name, stored))
    for found in places:
        found.sort(key=lambda place: place.offset)
    return places


def _together(file: int, places: Sequence[_Place]) -> list[_Range]:
    """Join places that touch or overlap into ranges that are read once, if blocks end between their elements."""
    found: list[_Range] = []
    for place in places:
        last = found[-1] if found else None
        size = place.stored.torch_dtype.itemsize
        if last is not None and place.offset <= last.stop and (place.offset - last.start) % size == 0:
            last.stop = max(last.stop, place.stop)
            last.places.append(place)
        else:
            found.append(_Range(file, place.offset, place.stop, [place]))
    return found


def _look_through(
    reader: Reader, wanted: _Range, checks: Sequence[Check], numbers: "_Numbers", damage: list[str], on_bytes: OnBytes
) -> None:
    """Read block after block. A damaged block is reported and skipped."""
    ahead, start = deque(wanted.places), wanted.start
    begun: list[_Place] = []
    while start < wanted.stop:
        num_bytes = wanted.stop - start
        rest = Stored((num_bytes,), "U8", (Piece(wanted.file, start, 0, num_bytes),))
        try:
            for content in reader.rows(rest, Interval(0, num_bytes)):
                stop = start + content.numel()
                while ahead and ahead[0].offset < stop:
                    begun.append(ahead.popleft())
                for place in begun:
                    numbers.look(place, start, content)
                begun = [place for place in begun if place.stop > stop]
                on_bytes(content.numel())
                start = stop
        except CheckpointError as error:
            damage.append(str(error))
            block = checks[bisect_right(checks, start, key=lambda check: check.offset) - 1] if checks else None
            stop = block.offset + block.num_bytes if block else min(wanted.stop, start + BLOCK_BYTES)
            on_bytes(stop - start)
            start = stop


class _Numbers:
    """The tensors with numbers that are not finite: how many there are, and the first."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Stored, int, int, str]] = {}

    def look(self, place: _Place, offset: int, content: Tensor) -> None:
        """Check the part of a place that lies in these bytes of its file."""
        first, last = max(place.offset, offset), min(place.stop, offset + content.numel())
        if last <= first:
            return
        part, dtype = content[first - offset : last - offset], place.stored.torch_dtype
        if (first - place.offset) % dtype.itemsize or part.numel() % dtype.itemsize:
            raise CheckpointError(f"a checksum ends inside an element of {place.name!r}, at byte {first} or {last}")
        values = (part if part.storage_offset() % dtype.itemsize == 0 else part.clone()).view(dtype)
        if dtype.itemsize == 1:
            values = values.float()
        # The sum is fast, and not finite where any of its terms is not; it may also overflow by itself.
        wide = torch.float32 if dtype.itemsize < 4 else dtype
        if not cmath.isfinite(values.sum(dtype=wide).item()):
            wrong = (~values.isfinite()).nonzero()
            if len(wrong):
                at = place.start + (first - place.offset) // dtype.itemsize + int(wrong[0])
                self._add(place, len(wrong), at, str(values[wrong[0]].item()))

    def _add(self, place: _Place, num: int, at: int, value: str) -> None:
        _, before, first, first_value = self._found.get(place.name, (None, 0, at, value))
        at, value = min((at, value), (first, first_value), key=lambda pair: pair[0])
        self._found[place.name] = (place.stored, before + num, at, value)

    def summary(self) -> Iterator[str]:
        for name, (stored, num, at, value) in self._found.items():
            index = [int(number) for number in torch.unravel_index(torch.tensor(at), stored.shape)]
            how_many = f"{num:,} of {stored.num_elems:,} numbers are not finite"
            yield f"{name!r}: {how_many}; the first is element {at}, at {index}: {value}"
