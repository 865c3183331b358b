"""Load a checkpoint, whichever layout, world and program wrote it. Every rank calls it, and reads its own part.

First the index is compared with the model and the optimizer, and the files with the index; an error lists all
differences. Nothing is changed yet. When no rank has found an error, every rank fills its intervals of master weights
and optimizer state from the pieces that overlap them.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import CheckpointError
from ..base.intervals import Interval, pieces
from ..base.text import plural
from ..core.engine.guards import engine_of
from ..core.engine.runtime import Engine
from ..core.mesh import patient_hosts
from ..core.schedule.model import Param
from ..core.unit.state import FlatState
from ..core.wire.codec import codec_in
from . import optimizer_state
from .index import NAMES, Index, Saved, Stored, cut
from .opened import Opened, open_checkpoint
from .optimizer_state import Home, Optimizers
from .saving import begin_between_steps, together
from .share import buffers_of

_MAX_LISTED = 20  # differences in a message


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    allow_rounding: bool = False,
    keep_groups: bool = False,
) -> dict[str, Any]:
    """Set weights and buffers of a sharded model, and its optimizer's state, from a checkpoint; return its `extra`.

    Every rank calls it. The layout, the world, the mesh and the precision may differ from those of the save.
    Checkpoints of torch's DCP, Accelerate, DeepSpeed and Hugging Face are read as well. The model, and the optimizer's
    class and groups, must be the same. Weights that would lose digits in the dtype of this model's masters are refused,
    unless `allow_rounding`. With `keep_groups`, the optimizer keeps its current groups and settings, which may differ
    from the saved ones; the state of each parameter is still loaded. Without an optimizer, only the weights are
    loaded.
    """
    engine = engine_of(model)
    own = optimizer_state.own_optimizers(engine, optimizer)
    begin_between_steps(engine, "load", path, own)
    world, place = patient_hosts(), Path(path).resolve()
    opened, wanted, buffers = together(world, lambda: _prepare(place, engine, model, own, allow_rounding, keep_groups))
    try:
        together(world, lambda: _read(opened, wanted, buffers, own, keep_groups))
    except CheckpointError as error:
        error.add_note("The model is a mixture of what it was and of what was read until then: load another.")
        raise
    finally:
        engine.was_rewritten()
    return opened.index.extra


@dataclass(frozen=True, slots=True)
class _Wanted:
    """This rank's part of a parameter: parameter `number` of the flat `state`, and the interval of its elements."""

    state: FlatState
    number: int
    interval: Interval
    name: str
    saved: Saved
    home: Home | None

    @property
    def resting(self) -> Tensor:
        return self.state.resting_params[self.number]

    def part(self, key: str | None) -> tuple[Stored, Interval]:
        """Return a tensor and the interval of it to read: the parameter, or its optimizer state under `key`."""
        stored = self.saved.stored(key)
        is_split = key is None or self.saved.is_split(key)
        return stored, self.interval if is_split else Interval(0, stored.num_elems)


def _prepare(
    place: Path, engine: Engine, model: nn.Module, optimizers: Optimizers, allow_rounding: bool, keep_groups: bool
) -> tuple[Opened, list[_Wanted], dict[str, Tensor]]:
    opened = open_checkpoint(place, optimizer_state.names_in_groups(optimizers))
    index = opened.index
    try:
        buffers = buffers_of(model, engine)
        require_same_model(engine, buffers, index, allow_rounding)
        homes = optimizer_state.owning_groups(optimizers)
        wanted = []
        for state in (state for unit in engine.units for state in unit.states):
            for piece in pieces(state.flat.intervals, state.flat.spans[state.flat.depth_of_master]):
                name = _saved_name(state.flat.stored_params[piece.param], index)
                home = homes.get(state.resting_params[piece.param])
                wanted.append(_Wanted(state, piece.param, piece.in_param, name, index.tensors[name], home))
        if optimizers:
            optimizer_state.require_same_optimizers(optimizers, index.optimizer, keep_groups)
            held = [(want.name, want.saved, want.resting, want.home.number if want.home else None) for want in wanted]
            require_same_groups(held, keep_groups)
        # Every rank checks the files that it reads, and one rank checks all of them.
        numbers = {piece.file for want in wanted for piece in cut(want.saved, want.interval)}
        with opened.reader() as reader:
            for number in range(len(index.files)) if engine.mesh.rank == 0 else sorted(numbers):
                reader.require_length(number)
    except CheckpointError as error:
        raise type(error)(f"cannot load {place}: {error}") from error
    return opened, wanted, buffers


def _read(
    opened: Opened, wanted: list[_Wanted], buffers: dict[str, Tensor], optimizers: Optimizers, keep_groups: bool
) -> None:
    index = opened.index
    # Parameters that are not split are read by every rank.
    is_shared = any(want.state.flat.depth_of_master == 0 for want in wanted)
    with opened.reader(is_shared) as reader:

        def read(want: _Wanted, key: str | None, row: Tensor) -> None:
            stored, interval = want.part(key)
            reader.read(stored, interval.start, row)

        # The plan lists the reads in the order in which they are made below.
        params = ((want, key) for want in wanted for key in (None, *(want.saved.stored_state if optimizers else ())))
        others = ((index.tensors[name], Interval(0, value.numel())) for name, value in buffers.items())
        reader.plan(chain((want.part(key) for want, key in params), others))
        for want in wanted:
            want.state.fill_master(want.state.held[want.number], partial(read, want, None))
            if want.home is not None:
                optimizer_state.restore_state(want.home, want.resting, want.saved, partial(read, want))
        for state in dict.fromkeys(want.state for want in wanted):
            state.publish()
        for name, buffer in buffers.items():
            row = torch.empty(buffer.numel(), dtype=buffer.dtype, device=buffer.device)
            reader.read(index.tensors[name], 0, row)
            buffer.copy_(row.view(buffer.shape))
    if optimizers and index.optimizer is not None:
        optimizer_state.restore_optimizers(optimizers, index.optimizer, keep_groups)


def require_same_model(engine: Engine, buffers: Mapping[str, Tensor], index: Index, allow_rounding: bool) -> None:
    """Raise unless names and shapes are as saved, and no weight loses digits, except with `allow_rounding`."""
    params = _params(engine)
    expected = {_saved_name(spec, index): (tuple(spec.shape), dtype) for spec, dtype in params}
    expected |= {name: (tuple(value.shape), value.dtype) for name, value in buffers.items()}
    known = set(expected) | {site.name for spec, _ in params for site in spec.sites}
    here, there = ({codec for name in names if (codec := codec_in(name))} for names in (expected, index.tensors))
    if here != there:
        mine, saved = (", ".join(sorted(codecs)) or "they are" for codecs in (here, there))
        fix = "shard the model as it was (frozen_as=, --quantize), or load whole weights with sw.load_full_state_dict"
        raise CheckpointError(f"its frozen weights are stored as {saved}, and the model's as {mine}: {fix}")
    differences = []
    for name, (shape, dtype) in expected.items():
        stored = index.tensors.get(name)
        if stored is None:
            other = next((other for other, saved in index.tensors.items() if name in saved.tied), None)
            differences.append(
                f"{name!r} is in the model, not in it" + (f" but as {other!r}: tie them" if other else "")
            )
        elif stored.shape != shape:
            differences.append(f"{name!r} is {stored.shape} in it, {shape} in the model")
        elif stored.torch_dtype.is_floating_point != dtype.is_floating_point:
            differences.append(f"{name!r} is {stored.dtype} in it, {NAMES[dtype]} in the model")
    differences += [f"{name!r} is in it, not in the model" for name in index.tensors if name not in known]
    if differences:
        raise CheckpointError(f"it is of another model ({_list(differences)})")
    lossy = _rounded(((name, dtype) for name, (_, dtype) in expected.items()), index)
    if lossy and not allow_rounding:
        fix = "choose a precision= whose master weights hold them, or load with allow_rounding=True"
        raise CheckpointError(f"weights would lose digits ({_list(lossy)}): {fix}")


def rounded(engine: Engine, index: Index) -> list[str]:
    """Describe the model's parameters that lose digits when they are loaded."""
    return _rounded(((_saved_name(spec, index), dtype) for spec, dtype in _params(engine)), index)


def _rounded(expected: Iterable[tuple[str, torch.dtype]], index: Index) -> list[str]:
    return [
        f"{name!r} is {index.tensors[name].dtype} in it, {NAMES[dtype]} in the model"
        for name, dtype in expected
        if name in index.tensors and not holds(dtype, index.tensors[name].torch_dtype)
    ]


def holds(dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Return whether `dtype` can represent all values of `stored`. torch cannot promote 8-bit floats."""
    if stored.is_floating_point and 1 in (stored.itemsize, dtype.itemsize):
        return stored == dtype or stored.itemsize < dtype.itemsize
    return torch.promote_types(stored, dtype) == dtype


def _params(engine: Engine) -> list[tuple[Param, torch.dtype]]:
    """Return every parameter with the dtype of its master weights."""
    states = (state for unit in engine.units for state in unit.states)
    return [(spec, state.master.dtype) for state in states for spec in state.flat.stored_params]


def _saved_name(spec: Param, index: Index) -> str:
    """Return a parameter's name in the checkpoint. A tied one may have several: prefer one in an optimizer group."""
    found = [site.name for site in spec.sites if site.name in index.tensors]
    return max(found, key=lambda name: index.tensors[name].group is not None, default=spec.name)


def _list(differences: list[str]) -> str:
    more = [f"and {len(differences) - _MAX_LISTED} more"] if len(differences) > _MAX_LISTED else []
    return f"{plural(len(differences), 'difference')}: " + "; ".join([*differences[:_MAX_LISTED], *more])


def require_same_groups(held: Iterable[tuple[str, Saved, Tensor, int | None]], keep_groups: bool) -> None:
    """Raise unless the optimizer's groups are the saved ones.

    `held`: for every parameter that this rank holds, its name, saved value, this rank's part, and its group. With
    `keep_groups` the groups may differ, but no saved state may be lost.
    """
    wrong = []
    for name, saved, resting, group in held:
        # Other libraries also list frozen parameters in an optimizer's groups.
        is_frozen = group is None and not saved.state and not resting.requires_grad
        if saved.group != group and not keep_groups and not is_frozen:
            wrong.append(f"{name!r} is in group {saved.group} of its optimizer and in group {group} of this one")
        elif saved.state and group is None:
            wrong.append(f"{name!r} was trained by its optimizer, and is in no group of this one")
        elif resting.numel() < saved.num_elems:
            for key, item in saved.stored_state.items():
                if not saved.is_split(key) and item.num_elems > 1:
                    what = f"the optimizer's {key!r} of parameter {name!r}, {item.shape}, was made for the whole one"
                    raise CheckpointError(f"{what}: use a layout whose optimizer is 'whole'")
    if wrong:
        raise CheckpointError(f"build the same groups, or load with keep_groups=True ({_list(wrong)})")
