"""The share of a checkpoint that a rank writes: parts of the model's tensors and of the optimizer's state.

If several ranks hold the same part, each of them writes a share of it: all ranks write at the same time, under every
layout, and nothing is written twice. Rank 0 writes the buffers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

from torch import Tensor, nn

from ..base.errors import CheckpointError
from ..base.intervals import Interval, pieces
from ..core.engine.guards import own_state_dict
from ..core.engine.runtime import Engine
from ..core.optim.sharded_optimizer import ShardedOptimizer
from ..core.schedule.flat import Flat
from ..core.schedule.model import Param
from ..core.unit.user_parameter import place_of
from .index import DTYPES, NAMES, Optimizer, Piece, Saved, Stored, in_order
from .optimizer_state import Optimizers, describe_optimizers, describe_state, owning_groups, stored_row
from .tensor_files import Source


@dataclass(frozen=True, slots=True)
class Portion(Source):
    """A range of elements that this rank writes: of a tensor of the model, or of its optimizer state under `key`.

    Its `name` in a file of this rank is for people and other tools; the index refers to it by file and offset.
    """

    tensor: str
    key: str | None
    start: int

    def piece(self, file: int, offset: int) -> Piece:
        return Piece(file, offset, self.start, self.start + prod(self.shape))


def _portion(tensor: str, key: str | None, of: Stored, interval: Interval, read: Callable[[], Tensor]) -> Portion:
    label = f"model/{tensor}/{interval.start}" if key is None else f"optimizer/{key}/{tensor}/{interval.start}"
    shape = (interval.num_elems,)
    return Portion(label, of.torch_dtype, shape, lambda: [read().reshape(-1)], tensor, key, interval.start)


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share. `tensors`: the tensors that this rank knows, without pieces. `extra`: the user's values."""

    tensors: dict[str, Saved]
    portions: list[Portion]
    optimizer: Optimizer | None
    extra: dict[str, Any]

    def with_pieces(self, placed: Iterable[tuple[Portion, Piece]]) -> dict[str, Saved]:
        """Return the tensors with the pieces that were written."""
        pieces: dict[str, dict[str | None, tuple[Piece, ...]]] = {name: {} for name in self.tensors}
        for portion, piece in placed:
            pieces[portion.tensor][portion.key] = (piece,)
        return {name: saved.with_pieces(pieces[name]) for name, saved in self.tensors.items()}


def share_of(engine: Engine, model: nn.Module, optimizers: Optimizers, extra: dict[str, Any]) -> Share:
    tensors: dict[str, Saved] = {}
    portions: list[Portion] = []
    homes = owning_groups(optimizers)
    keys: list[tuple[ShardedOptimizer, Any]] = [(each, key) for each in optimizers for key in each.inner.state]
    for each, key in keys:
        if key not in homes:
            what = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
            where = f"the optimizer {type(each.inner).__name__} keeps state for {what}"
            raise CheckpointError(f"{where}, which is no parameter of the model: a checkpoint cannot hold it")
    for state in (state for unit in engine.units for state in unit.states):
        flat = state.flat
        # Rank 0 lists every parameter, so that empty ones are included.
        if engine.mesh.rank == 0:
            tensors |= {spec.name: _described(spec, flat) for spec in flat.stored_params}
        held = {piece.param: piece.in_param for piece in pieces(flat.intervals, flat.spans[flat.depth_of_master])}
        for part in pieces(flat.intervals, _span_to_write(flat)):
            spec, resting = flat.stored_params[part.param], state.resting_params[part.param]
            here, first = part.in_param.within(held[part.param]), state.held[part.param].start
            saved = tensors[spec.name] = _described(spec, flat)
            read = partial(state.master_part, slice(first + here.start, first + here.stop))
            portions.append(_portion(spec.name, None, saved, part.in_param, read))
            home = homes.get(resting)
            if home is None:
                continue
            items = describe_state(home.optimizer, spec.name, resting, saved.shape)
            saved = tensors[spec.name] = replace(saved, group=home.number, state=items)
            for key, item in saved.stored_state.items():
                is_split = saved.is_split(key)
                if is_split or (part.in_param.start == 0 and item.num_elems):
                    interval = part.in_param if is_split else Interval(0, item.num_elems)
                    read = partial(stored_row, home.optimizer, resting, key, here if is_split else slice(None))
                    portions.append(_portion(spec.name, key, item, interval, read))
    for name, buffer in buffers_of(model, engine).items() if engine.mesh.rank == 0 else ():
        if buffer.dtype not in NAMES:
            raise CheckpointError(f"{name!r} is {buffer.dtype}, which a checkpoint cannot hold: {', '.join(DTYPES)}")
        tensors[name] = saved = Saved(tuple(buffer.shape), NAMES[buffer.dtype], (), "buffer")
        if buffer.numel():
            portions.append(_portion(name, None, saved, Interval(0, buffer.numel()), buffer.detach))
    return Share(tensors, portions, describe_optimizers(optimizers), extra)


def _described(spec: Param, flat: Flat) -> Saved:
    tied = tuple(site.name for site in spec.sites if site.name != spec.name)
    return Saved(tuple(spec.shape), NAMES[flat.master.torch], (), "parameter", spec.trainable, tied)


def buffers_of(model: nn.Module, engine: Engine) -> dict[str, Tensor]:
    """Return persistent buffers, and parameters that are not sharded (of integers), by key in the state dict."""
    buffers = {}
    for key, value in own_state_dict(model, engine).items():
        if not isinstance(value, Tensor):
            what = f"{key!r} of the model's state dict is a {type(value).__name__}"
            raise CheckpointError(f"{what}, which a checkpoint cannot hold: save what it says in extra=")
        if place_of(value) is None:
            buffers[key] = value
    return buffers


def _span_to_write(flat: Flat) -> Interval:
    """Return the interval that this rank writes: a part of what it holds. Ranks that hold the same write the rest."""
    own = flat.spans[flat.depth_of_master]
    sizes, indices = flat.axis_sizes[flat.depth_of_master :], flat.axis_indices[flat.depth_of_master :]
    number = 0
    for size, index in zip(sizes, indices, strict=True):
        number = number * size + index
    first, last = (own.num_elems * end // prod(sizes) for end in (number, number + 1))
    return Interval(own.start + first, own.start + last)


def merge_shares(shares: Iterable[Mapping[str, Saved]]) -> dict[str, Saved]:
    """Combine the tensors that each rank wrote, their pieces in order. Plain values come from the first part."""
    merged: dict[str, list[Saved]] = {}
    for share in shares:
        for name, saved in share.items():
            merged.setdefault(name, []).append(saved)
    return {name: _merged(name, parts) for name, parts in merged.items()}


def _merged(name: str, parts: list[Saved]) -> Saved:
    # A rank that wrote nothing of a tensor does not know its state.
    parts = [part for part in parts if part.pieces or part.state] or parts[:1]
    parts.sort(key=lambda saved: saved.pieces[0].start if saved.pieces else 0)
    first = parts[0]
    forms = [
        {key: isinstance(item, Stored) and (item.shape, item.dtype) for key, item in part.state.items()}
        for part in parts
    ]
    if any(form != forms[0] for form in forms):
        other = next(form for form in forms if form != forms[0])
        both = f"{forms[0]} on one rank and {other} on another"
        raise CheckpointError(f"the optimizer's state of parameter {name!r} is {both}: such state cannot be merged")
    keys = (None, *first.stored_state)
    return first.with_pieces({key: _joined([part.stored(key) for part in parts]) for key in keys})


def _joined(parts: Sequence[Stored]) -> tuple[Piece, ...]:
    """Join pieces that are adjacent in one file."""
    size, joined = parts[0].torch_dtype.itemsize, list[Piece]()
    for piece in in_order(piece for part in parts for piece in part.pieces):
        last = joined[-1] if joined else None
        if last and piece[:3] == (last.file, last.offset + (last.stop - last.start) * size, last.stop):
            joined[-1] = last._replace(stop=piece.stop)
        else:
            joined.append(piece)
    return tuple(joined)
