"""The share of a checkpoint that a rank writes: parts of the model's tensors and of the optimizer's state.

If several ranks hold the same part, each of them writes a share of it: all ranks write at the same time, under every
layout, and nothing is written twice. Rank 0 writes the buffers.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

from torch import Tensor, nn

from ..base.errors import CheckpointError
from ..base.intervals import Interval, pieces
from ..core.engine.guards import own_state_dict
from ..core.engine.runtime import Engine
from ..core.schedule.flat import Flat
from ..core.schedule.model import Param
from ..core.unit.state import FlatState
from ..core.unit.user_parameter import place_of
from .index import DTYPES, NAMES, Piece, Plain, Saved, Stored, in_order
from .optimizer_state import Optimizers, describe_state, homes_in, refuse_homeless_state, stored_row
from .tensor_files import Source


@dataclass(frozen=True, slots=True)
class Portion:
    """An interval of a tensor that this rank writes: of the model, or of the optimizer's state under `key`."""

    name: str
    key: str | None
    of: Stored  # without pieces
    interval: Interval
    read: Callable[[], Tensor]

    def as_source(self, label: str) -> Source:
        return Source(label, DTYPES[self.of.dtype], (self.interval.num_elems,), lambda: [self.read().reshape(-1)])


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share. `tensors`: the tensors that this rank knows, without pieces."""

    tensors: dict[str, Saved]
    portions: list[Portion]

    def with_pieces(self, placed: Iterable[tuple[Portion, Piece]]) -> dict[str, Saved]:
        """Return the tensors with the pieces that were written."""
        found = dict(self.tensors)
        for portion, piece in placed:
            saved, written = found[portion.name], replace(portion.of, pieces=(piece,))
            if portion.key is None:
                found[portion.name] = replace(saved, stored=written)
            else:
                found[portion.name] = replace(saved, state=saved.state | {portion.key: written})
        return found


def share_of(engine: Engine, model: nn.Module, optimizers: Optimizers) -> Share:
    tensors: dict[str, Saved] = {}
    portions: list[Portion] = []
    homes = homes_in(optimizers)
    refuse_homeless_state(optimizers, homes)
    for unit in engine.units:
        for state in unit.states:
            flat = state.flat
            # Rank 0 lists every parameter, so that empty ones are included.
            if engine.mesh.rank == 0:
                tensors |= {spec.name: _described(spec, flat) for spec in flat.params}
            held = {piece.param: piece.in_param for piece in pieces(flat.intervals, flat.spans[flat.depth_of_master])}
            for part in pieces(flat.intervals, _span_to_write(flat)):
                spec, resting = flat.params[part.param], state.resting_params[part.param]
                here = part.in_param.within(held[part.param])
                kept: Mapping[str, Stored | Plain] = {}
                home = homes.get(resting)
                if home is not None:
                    kept = describe_state(home.optimizer, spec.name, resting, tuple(spec.shape))
                number = None if home is None else home.number
                saved = replace(_described(spec, flat), group=number, state=dict(kept))
                tensors[spec.name] = saved
                master = partial(_part_of, state, part.param, here)
                portions.append(Portion(spec.name, None, saved.stored, part.in_param, master))
                for key, item in kept.items():
                    if home is None or not isinstance(item, Stored):
                        continue
                    read = partial(stored_row, home.optimizer, resting, key)
                    if saved.is_split(key):
                        portions.append(Portion(spec.name, key, item, part.in_param, partial(_slice_of, read, here)))
                    elif part.in_param.start == 0 and item.num_elems:
                        portions.append(Portion(spec.name, key, item, Interval(0, item.num_elems), read))
    if engine.mesh.rank == 0:
        for name, buffer in buffers_of(model, engine).items():
            stored = Stored(tuple(buffer.shape), dtype_name(name, buffer), ())
            tensors[name] = Saved(stored, "buffer")
            if buffer.numel():
                portions.append(Portion(name, None, stored, Interval(0, buffer.numel()), buffer.detach))
    return Share(tensors, portions)


def _described(spec: Param, flat: Flat) -> Saved:
    tied = tuple(site.name for site in spec.sites if site.name != spec.name)
    return Saved(Stored(tuple(spec.shape), NAMES[flat.master.torch], ()), "parameter", spec.trainable, tied)


def dtype_name(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in NAMES:
        raise CheckpointError(f"{name!r} is {tensor.dtype}, which a checkpoint cannot hold: {', '.join(DTYPES)}")
    return NAMES[tensor.dtype]


def buffers_of(model: nn.Module, engine: Engine) -> dict[str, Tensor]:
    """Return persistent buffers, and parameters that are not sharded (integers), by their keys in the state dict."""
    found = {}
    for key, value in own_state_dict(model, engine).items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"the model's state dict holds {key!r}, a {type(value).__name__}, which a checkpoint cannot hold: "
                "save what it says in extra="
            )
        if place_of(value) is None:
            found[key] = value
    return found


def _part_of(state: FlatState, index: int, here: slice) -> Tensor:
    held = state.held[index]
    return state.master_part(slice(held.start + here.start, held.start + here.stop))


def _slice_of(read: Callable[[], Tensor], here: slice) -> Tensor:
    return read()[here]


def _span_to_write(flat: Flat) -> Interval:
    """Return the interval of this rank's part that it writes; ranks with the same part write the rest."""
    own = flat.spans[flat.depth_of_master]
    sizes, indices = flat.axis_sizes[flat.depth_of_master :], flat.axis_indices[flat.depth_of_master :]
    number = 0
    for size, index in zip(sizes, indices, strict=True):
        number = number * size + index
    first, last = (own.num_elems * end // prod(sizes) for end in (number, number + 1))
    return Interval(own.start + first, own.start + last)


def merge_shares(shares: Iterable[Mapping[str, Saved]]) -> dict[str, Saved]:
    """Combine the tensors that each rank wrote into those of an index. Plain values are those of the first rank.

    The pieces are sorted; `require_sound` checks that they are complete.
    """
    found: dict[str, list[Saved]] = {}
    for share in shares:
        for name, saved in share.items():
            found.setdefault(name, []).append(saved)
    return {name: _merged(name, parts) for name, parts in found.items()}


def _merged(name: str, parts: list[Saved]) -> Saved:
    # A rank that wrote nothing of a tensor does not know its state.
    parts = [part for part in parts if part.stored.pieces or part.state] or parts[:1]
    parts.sort(key=lambda saved: saved.stored.pieces[0].start if saved.stored.pieces else 0)
    first = parts[0]
    for other in parts[1:]:
        if _forms(other.state) != _forms(first.state):
            raise CheckpointError(
                f"the optimizer's state of parameter {name!r} is {sorted(first.state)} on one rank and "
                f"{sorted(other.state)} on another: such state cannot be merged"
            )
    state = {
        key: _joined([part.state[key] for part in parts]) if isinstance(item, Stored) else item  # type: ignore[misc]
        for key, item in first.state.items()
    }
    return Saved(_joined([part.stored for part in parts]), first.kind, first.is_trained, first.tied, first.group, state)


def _joined(parts: list[Stored]) -> Stored:
    """Join pieces that are adjacent in one file."""
    size, joined = parts[0].torch_dtype.itemsize, list[Piece]()
    for piece in in_order(piece for part in parts for piece in part.pieces):
        if joined and piece == _next_to(joined[-1], size, piece.stop):
            joined[-1] = replace(joined[-1], stop=piece.stop)
        else:
            joined.append(piece)
    return Stored(parts[0].shape, parts[0].dtype, tuple(joined))


def _next_to(last: Piece, size: int, stop: int) -> Piece:
    return Piece(last.file, last.offset + (last.stop - last.start) * size, last.stop, stop)


def _forms(state: Mapping[str, Stored | Plain]) -> dict[str, Any]:
    return {key: (item.shape, item.dtype) if isinstance(item, Stored) else None for key, item in state.items()}
