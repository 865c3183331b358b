"""Write a checkpoint. Every rank calls it and writes its own share.

    1. rank 0 makes an empty folder next to the place of the checkpoint.
    2. every rank writes its parts: into a file of its own, or, if whole tensors are requested, at its offsets in two
       files that all ranks share. The offsets follow from the shapes alone, so nothing is gathered.
    3. rank 0 collects the list of written parts, and writes the index, then the marker; then it renames the folder.

After each phase the ranks wait for each other: a failure on one rank is raised on all, and an older checkpoint stays.
In the background (`start_save`) a thread does the same, over a group of its own, from copies on the host.
"""

import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..base.errors import CheckpointError, SaveError, StateError
from ..core.engine.guards import engine_of
from ..core.engine.rank_agreement import Facts, attempt, require_agreement
from ..core.engine.runtime import Engine
from ..core.mesh import patient_hosts
from ..core.wire.collectives import Channel, collect, exchange
from ..version import VERSION
from . import folder
from .background import Saving, finish_last, host_copy_of
from .disk import check_bytes, write_pieces
from .index import DTYPES, FORMAT, Check, File, Index, Optimizer, Piece, Saved, require_sound, to_json
from .optimizer_state import Optimizers, describe_optimizers, own_optimizers
from .share import Portion, Share, merge_shares, share_of
from .tensor_files import Layout, Source, lay_out, state_key, write_file

WHOLE_FILES = ("model.safetensors", "optimizer.safetensors")

T = TypeVar("T")


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    whole: bool = False,
) -> None:
    """Write the model's weights and buffers, the optimizer's state and `extra` (JSON, rank 0's) to a folder.

    Every rank calls it between steps, with the same path on a file system that all of them share. An existing
    checkpoint is replaced once the new one is complete. Gradients are not saved. With `whole`, every tensor is stored
    in one piece under its own name, in `model.safetensors` and `optimizer.safetensors`; `load` reads both forms.
    """
    content = _content("save", path, model, optimizer, extra, whole)
    _write(content, patient_hosts())


def start_save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    whole: bool = False,
) -> Saving:
    """Save like `save`, but in a thread: return when everything is copied to the host, so that training goes on.

    The host memory is reused by the next save. The next save, of either kind and of any model, waits for this one. If
    it fails, a later `optimizer.step()` raises, the same one on every rank; so does `finish()` of the returned value.
    State that is offloaded to disk does not fit on the host, and is refused.
    """
    engine = engine_of(model)
    on_disk = next((unit for unit in engine.schedule.units if unit.layout.uses_disk), None)
    if on_disk is not None:
        raise StateError(
            f"sw.start_save of unit {on_disk.name!r}, which is offloaded to disk ({on_disk.layout.name}): a save in "
            "the background copies everything to the host first; use sw.save, which reads it as it is written"
        )
    content = _content("start_save", path, model, optimizer, extra, whole)
    world = engine.mesh.world
    copied = together(world, lambda: host_copy_of(engine).take(content.share), SaveError)
    channel = patient_hosts()
    saving = Saving(engine, channel, lambda: _write(replace(content, share=copied), channel))
    together(world, saving.start, SaveError)
    return saving


@dataclass(frozen=True, slots=True)
class _Content:
    place: Path
    share: Share
    optimizer: Optimizer | None
    extra: dict[str, Any]
    is_whole: bool


def _content(
    verb: str,
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    extra: Mapping[str, Any] | None,
    is_whole: bool,
) -> _Content:
    engine = engine_of(model)
    own = own_optimizers(engine, optimizer)
    begin_between_steps(engine, verb, path, own, [("whether they save whole tensors", str(is_whole))])
    return together(
        engine.mesh.world,
        lambda: _Content(
            _place(path),
            share_of(engine, model, own),
            describe_optimizers(own),
            _as_json(extra),
            is_whole,
        ),
        SaveError,
    )


def begin_between_steps(
    engine: Engine, verb: str, path: str | os.PathLike[str], optimizers: Optimizers, facts: Facts = ()
) -> None:
    """Wait for transfers and for the last save, refuse half an update, and require the same request on all ranks."""
    engine.updates.refuse_after_early(verb)
    finish_last()
    engine.rest()
    engine.await_gradients()
    what = ("the model", "the model and its optimizer", "the model and its optimizers")[min(len(optimizers), 2)]
    own: Facts = [(f"sw.{verb}'s path", os.fspath(path)), (f"what they {verb}", what)]
    require_agreement(engine.mesh.world, [*own, *facts])


def _place(path: str | os.PathLike[str]) -> Path:
    place = Path(path).resolve()
    if not place.name:
        raise CheckpointError(f"{place} cannot become a checkpoint: name a folder in it")
    return place


def _as_json(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `extra` as JSON gives it back."""
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(extra or {})))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"extra= must be what JSON can hold: {error}") from error
    return found


def _write(content: _Content, world: Channel) -> None:
    is_first, place = world.index == 0, content.place
    into = folder.partial_of(place)
    try:
        together(world, lambda: folder.begin(place) if is_first else None, SaveError)
        if content.is_whole:
            tensors = merge_shares(exchange(world, content.share.tensors))
            layouts = _lay_out_whole(tensors)
            together(world, lambda: _make_whole_files(into, layouts) if is_first else None, SaveError)
            written = together(world, lambda: _write_whole(into, layouts, content.share, is_first), SaveError)
        else:
            written = together(world, lambda: _write_own_file(into, world.index, content.share), SaveError)
        shares = collect(world, written)
        together(world, lambda: _complete(content, shares, world.num_ranks) if is_first else None, SaveError)
    except CheckpointError:
        if is_first:
            folder.abandon(place)
        raise


def _write_own_file(into: Path, rank: int, share: Share) -> tuple[list[File], dict[str, Saved]]:
    labels = [_label(portion.name, portion.key, portion.interval.start) for portion in share.portions]
    layout = lay_out([portion.as_source(label) for portion, label in zip(share.portions, labels, strict=True)])
    file = write_file(into / folder.rank_file(rank), layout)
    placed = (
        (portion, Piece(rank, layout.offsets[label], portion.interval.start, portion.interval.stop))
        for portion, label in zip(share.portions, labels, strict=True)
    )
    return [file], share.with_pieces(placed)


def _label(name: str, key: str | None, start: int) -> str:
    """Return the name of a piece in its file, for people and other tools; the index finds it by its place."""
    return f"model/{name}/{start}" if key is None else f"optimizer/{key}/{name}/{start}"


def _lay_out_whole(tensors: Mapping[str, Saved]) -> list[Layout]:
    """Return the layouts of the shared files; there is a second one only if the optimizer has tensors."""
    model = {name: saved.stored for name, saved in tensors.items()}
    state = {state_key(key, name): item for name, saved in tensors.items() for key, item in saved.stored_state.items()}
    return [
        lay_out([Source(key, item.torch_dtype, item.shape, tuple) for key, item in stored.items()], {"format": "pt"})
        for stored in (model, state)
        if stored or stored is model
    ]


def _make_whole_files(into: Path, layouts: Sequence[Layout]) -> None:
    for name, layout in zip(WHOLE_FILES, layouts, strict=False):
        with folder.os_errors_as(CheckpointError, f"cannot write {into / name}"), (into / name).open("wb") as file:
            file.truncate(layout.num_bytes)


def _write_whole(
    into: Path, layouts: Sequence[Layout], share: Share, is_first: bool
) -> tuple[list[File], dict[str, Saved]]:
    """Write this rank's parts into the shared files; the first rank writes their headers as well."""
    placed = [(portion, _whole_place(portion, layouts)) for portion in share.portions]
    written = []
    for number, layout in enumerate(layouts):
        path = into / WHOLE_FILES[number]
        with folder.os_errors_as(CheckpointError, f"cannot write {path}"):
            contents = _whole_contents(number, layout, placed, is_first)
            checks = write_pieces(path, contents, check_bytes(layout.num_bytes))
        written.append(File(WHOLE_FILES[number], layout.num_bytes, tuple(checks)))
    return written, share.with_pieces(placed)


def _whole_contents(
    number: int, layout: Layout, placed: Sequence[tuple[Portion, Piece]], is_first: bool
) -> Iterator[tuple[int, Tensor]]:
    if is_first:
        yield 0, torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
    for portion, piece in placed:
        if piece.file == number:
            for row in portion.as_source(portion.name).checked_rows():
                yield piece.offset, row


def _whole_place(portion: Portion, layouts: Sequence[Layout]) -> Piece:
    number = 0 if portion.key is None else 1
    label = portion.name if portion.key is None else state_key(portion.key, portion.name)
    offset = layouts[number].offsets[label] + portion.interval.start * DTYPES[portion.of.dtype].itemsize
    return Piece(number, offset, portion.interval.start, portion.interval.stop)


def merge_checks(shares: Sequence[Sequence[File]]) -> list[File]:
    """Return the shared files with the checksums of all ranks."""
    merged = []
    for parts in zip(*shares, strict=True):
        checks: list[Check] = sorted((check for part in parts for check in part.checks), key=lambda c: c.offset)
        merged.append(replace(parts[0], checks=tuple(checks)))
    return merged


def _complete(content: _Content, shares: Sequence[tuple[list[File], dict[str, Saved]]], num_ranks: int) -> None:
    parts = [files for files, _ in shares]
    files = merge_checks(parts) if content.is_whole else [file for own in parts for file in own]
    into = folder.partial_of(content.place)
    for file in files:
        path = into / file.name
        if not path.is_file() or path.stat().st_size != file.num_bytes:
            raise CheckpointError(
                f"{path} is not there as it was written, seen from rank 0: save to a file system that all ranks share"
            )
    origin = {
        "format": FORMAT,
        "shardwise": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "ranks": str(num_ranks),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    index = Index(
        tuple(files), merge_shares(tensors for _, tensors in shares), content.optimizer, content.extra, origin
    )
    require_sound(index)
    folder.complete(content.place, to_json(index))


def together(world: Channel, do: Callable[[], T], error: type[CheckpointError] | None = None) -> T:
    """Run `do` on every rank and wait for all. If it fails on one, raise on every rank, with the first one's reason.

    The exception is an `error`; by default, it has the class of the CheckpointError on that rank.
    """
    result, failure, reports = attempt(world, do, _report)
    first = next((report for report in reports if report is not None), None)
    if first is not None:
        kind, reason = first
        alike = all(report == first for report in reports)
        raise (error or kind)(reason if alike else f"rank {reports.index(first)}: {reason}") from failure
    return result  # type: ignore[return-value]


def _report(failure: Exception) -> tuple[type[CheckpointError], str]:
    if isinstance(failure, CheckpointError):
        return type(failure), str(failure)
    return CheckpointError, f"{type(failure).__name__}: {failure}"
