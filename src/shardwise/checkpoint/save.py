"""Writing a checkpoint. Every rank calls it, and writes one file with the pieces that are its to write.

    1. rank 0 makes an empty folder beside the place the checkpoint is for.
    2. every rank writes its file. Copies of a part are the same on every rank that holds one, so each of these writes
       a share of it: all ranks write at once, under every layout, and nothing is written twice.
    3. the ranks tell each other what they wrote; rank 0 writes the index, then the marker, then renames.

After each phase the ranks meet: what failed on one has failed on all, and an older checkpoint is as it was.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.agree import require_agreement
from ..engine.guards import engine_of, own_state_dict
from ..engine.runtime import Engine
from ..errors import CheckpointError, SaveError
from ..optim.sharded import ShardedOptimizer
from ..plan.flat import Flat
from ..shard import Interval, pieces
from ..wire.collectives import exchange
from . import folder
from .index import Buffer, Contribution, File, Index, Piece, StateItem, buffer_key, merge, state_key, weight_key
from .state import describe_optimizer, describe_state, group_of, own_optimizer, refuse_homeless_state, stored_row
from .tensors import DTYPES, NAMES, Entry, entry_of, write_file
from .together import together


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write the model's weights and buffers, the optimizer's state and `extra` (JSON, rank 0's) to a folder.

    Every rank calls it between steps, with the same path on a file system that all of them see. A checkpoint that is
    there already is replaced once the new one is complete. Gradients are not saved.
    """
    engine = engine_of(model)
    own = own_optimizer(engine, optimizer)
    begin_between_steps(engine, "save", path, own)
    world, is_first, place = engine.mesh.world, engine.mesh.rank == 0, Path(path).resolve()
    try:
        kept = together(world, lambda: _begin(place, extra) if is_first else {}, SaveError)
        share = together(world, lambda: _write_share(engine, model, own, folder.partial_of(place)), SaveError)
        shares = exchange(world, share)
        together(world, lambda: _complete(engine, model, own, place, shares, kept) if is_first else None, SaveError)
    except CheckpointError:
        if is_first:
            folder.abandon(place)
        raise


def begin_between_steps(
    engine: Engine, verb: str, path: str | os.PathLike[str], optimizer: ShardedOptimizer | None
) -> None:
    """Nothing under way on any rank, no update half done, and all of them mean the same."""
    engine.refuse_after_early_update(verb)
    engine.rest()
    engine.await_gradients()
    what = "the model" if optimizer is None else "the model and its optimizer"
    require_agreement(engine.mesh.world, [(f"sw.{verb}'s path", os.fspath(path)), (f"what they {verb}", what)])


def buffers_of(model: nn.Module, engine: Engine) -> dict[str, Tensor]:
    """The persistent buffers, by their keys in the state dict."""
    resting = {param for unit in engine.units for state in unit.states for param in state.resting_params}
    found = {}
    for key, value in own_state_dict(model, engine).items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"the model's state dict holds {key!r}, a {type(value).__name__}, which a checkpoint cannot hold: "
                "save what it says in extra="
            )
        if value not in resting:
            found[key] = value
    return found


@dataclass(frozen=True, slots=True)
class _Share:
    """What a rank wrote."""

    num_bytes: int
    params: Contribution


def _begin(place: Path, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns `extra` as JSON will give it back."""
    try:
        kept = json.loads(json.dumps(dict(extra or {})))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"extra= must be what JSON can hold: {error}") from error
    folder.begin(place)
    return kept


def _write_share(engine: Engine, model: nn.Module, optimizer: ShardedOptimizer | None, into: Path) -> _Share:
    entries: list[Entry] = []
    written: dict[str, tuple[Piece, int | None, dict[str, StateItem]]] = {}
    group = group_of(optimizer)
    if optimizer is not None:
        refuse_homeless_state(optimizer, set(group))
    for unit in engine.units:
        for state in unit.states:
            flat = state.flat
            held = {piece.param: piece.in_param for piece in pieces(flat.intervals, flat.spans[flat.depth_of_master])}
            for part in pieces(flat.intervals, _span_to_write(flat)):
                name, resting = flat.params[part.param].name, state.resting_params[part.param]
                piece = Piece(engine.mesh.rank, part.in_param.start, part.in_param.stop)
                here = part.in_param.within(held[part.param])
                items: dict[str, StateItem] = {}
                if optimizer is not None and resting in group:
                    is_part = resting.numel() < flat.params[part.param].shape.numel()
                    items = describe_state(optimizer, name, resting, is_part)
                written[name] = (piece, group.get(resting), items)
                row = partial(_part_of, resting, here)
                entries.append(Entry(weight_key(name, piece.start), flat.master, (part.in_param.num_elems,), row))
                if optimizer is not None:
                    entries += _state_entries(optimizer, name, resting, piece, here, items)
    if engine.mesh.rank == 0:
        for name, buffer in buffers_of(model, engine).items():
            entries.append(entry_of(buffer_key(name), buffer))
    return _Share(write_file(into / folder.rank_file(engine.mesh.rank), entries), written)


def _state_entries(
    optimizer: ShardedOptimizer,
    name: str,
    resting: Tensor,
    piece: Piece,
    here: slice,
    items: Mapping[str, StateItem],
) -> list[Entry]:
    found = []
    for key, item in items.items():
        if item.kind == "split":
            shape: tuple[int, ...] = (piece.stop - piece.start,)
            read = partial(_state_part, optimizer, resting, key, here, shape)
        elif item.kind == "whole" and piece.start == 0:
            shape = item.shape
            read = partial(_state_part, optimizer, resting, key, slice(None), shape)
        else:
            continue
        found.append(Entry(state_key(name, key, piece.start), DTYPES[item.dtype], shape, read))
    return found


def _part_of(resting: Tensor, here: slice) -> Tensor:
    return resting.detach().reshape(-1)[here]


def _state_part(optimizer: ShardedOptimizer, resting: Tensor, key: str, here: slice, shape: tuple[int, ...]) -> Tensor:
    return stored_row(optimizer, resting, key)[here].reshape(shape)


def _span_to_write(flat: Flat) -> Interval:
    """Of this rank's part, the share that it writes; the rest is written by those who hold the same part."""
    own = flat.spans[flat.depth_of_master]
    sizes, indices = flat.axis_sizes[flat.depth_of_master :], flat.axis_indices[flat.depth_of_master :]
    number = 0
    for size, index in zip(sizes, indices, strict=True):
        number = number * size + index
    first, last = (own.num_elems * end // prod(sizes) for end in (number, number + 1))
    return Interval(own.start + first, own.start + last)


def _complete(
    engine: Engine,
    model: nn.Module,
    optimizer: ShardedOptimizer | None,
    place: Path,
    shares: Sequence[_Share],
    extra: dict[str, Any],
) -> None:
    files = tuple(File(folder.rank_file(rank), share.num_bytes) for rank, share in enumerate(shares))
    for file in files:
        path = folder.partial_of(place) / file.name
        if not path.is_file() or path.stat().st_size != file.num_bytes:
            raise CheckpointError(
                f"{path} is not there as it was written, seen from rank 0: save to a file system that all ranks share"
            )
    shapes = {
        spec.name: (tuple(spec.shape), NAMES[state.flat.master])
        for unit in engine.units
        for state in unit.states
        for spec in state.flat.params
    }
    index = Index(
        files,
        merge([share.params for share in shares], shapes),
        {name: Buffer(tuple(value.shape), NAMES[value.dtype]) for name, value in buffers_of(model, engine).items()},
        None if optimizer is None else describe_optimizer(optimizer),
        extra,
    )
    folder.complete(place, index.to_json())
