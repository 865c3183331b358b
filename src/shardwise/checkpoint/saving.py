"""Writing a checkpoint. Every rank calls it, and writes what is its to write.

    1. rank 0 makes an empty folder beside the place the checkpoint is for.
    2. every rank writes its parts: into a file of its own, or, where whole tensors are asked for, into its places of
       two files that all ranks share.
    3. rank 0 hears what was written, and writes the index, then the marker; then it renames.

After each phase the ranks meet: what failed on one has failed on all, and an older checkpoint is as it was. In the
background (`start_save`) the same is done by a thread, over a group of its own, from copies on the host.
"""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base.errors import CheckpointError, SaveError, StateError
from ..core.engine.guards import engine_of
from ..core.engine.rank_agreement import Facts, require_agreement
from ..core.engine.runtime import Engine
from ..core.mesh import patient_hosts
from ..core.wire.collectives import Channel, collect, exchange
from ..version import VERSION
from . import folder, whole_tensors
from .background import Saving, finish_last, host_copy_of
from .index import File, Index, Optimizer, Piece, Saved, require_sound
from .index_json import FORMAT, to_json
from .merge import merge
from .optimizer_state import Optimizers, describe_optimizers, own_optimizers
from .share import Share, share_of
from .tensor_files import lay_out, write_file
from .together import together


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    whole: bool = False,
) -> None:
    """Write the model's weights and buffers, the optimizer's state and `extra` (JSON, rank 0's) to a folder.

    Every rank calls it between steps, with the same path on a file system that all of them see. A checkpoint that is
    there already is replaced once the new one is complete. Gradients are not saved. With `whole`, every tensor lies in
    one piece and under its own name, in `model.safetensors` and `optimizer.safetensors`; anything loads either.
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
    """As `save`, but training goes on while a thread writes: it returns when everything is copied to the host.

    The copies stay for the next time. The next save, of either kind and of any model, waits for this one. If it fails,
    the next `optimizer.step()` raises, on every rank the same one; so does `finish()` of what is returned. State that
    rests on disk has no room on the host, and is refused.
    """
    engine = engine_of(model)
    on_disk = next((unit for unit in engine.schedule.units if unit.layout.uses_disk), None)
    if on_disk is not None:
        raise StateError(
            f"sw.start_save of unit {on_disk.name!r}, which rests on disk ({on_disk.layout.name}): a save in the "
            "background copies everything to the host first; use sw.save, which reads it as it is written"
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
    """Nothing under way on any rank, no update half done, no save unfinished, and all of them mean the same."""
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
    """As JSON will give it back."""
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
            tensors = merge(exchange(world, content.share.tensors))
            layouts = whole_tensors.lay_out(tensors)
            together(world, lambda: whole_tensors.make_files(into, layouts) if is_first else None, SaveError)
            written = together(
                world, lambda: whole_tensors.write_share(into, layouts, content.share, is_first), SaveError
            )
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
    layout = lay_out([portion.as_entry(label) for portion, label in zip(share.portions, labels, strict=True)])
    file = write_file(into / folder.rank_file(rank), layout)
    placed = (
        (portion, Piece(rank, layout.offsets[label], portion.interval.start, portion.interval.stop))
        for portion, label in zip(share.portions, labels, strict=True)
    )
    return [file], share.with_pieces(placed)


def _label(name: str, key: str | None, start: int) -> str:
    """What a piece is called in its file. The index finds it by its place; this is for people and other tools."""
    return f"model/{name}/{start}" if key is None else f"optimizer/{key}/{name}/{start}"


def _complete(content: _Content, shares: Sequence[tuple[list[File], dict[str, Saved]]], num_ranks: int) -> None:
    parts = [files for files, _ in shares]
    files = whole_tensors.merge_files(parts) if content.is_whole else [file for own in parts for file in own]
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
    index = Index(tuple(files), merge(tensors for _, tensors in shares), content.optimizer, content.extra, origin)
    require_sound(index)
    folder.complete(content.place, to_json(index))
