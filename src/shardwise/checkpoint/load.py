"""Reading a checkpoint, whatever layout and world wrote it. Every rank calls it, and reads what it holds itself.

First everything is compared, and nothing is changed: the index with the model and the optimizer, the files with the
index. The ranks meet; only then are masters and state written, each rank's own intervals out of the pieces that
overlap them.
"""

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.guards import engine_of
from ..engine.runtime import Engine
from ..errors import CheckpointError
from ..optim.sharded import ShardedOptimizer
from ..plan.model import Param as Spec
from ..shard import Interval, pieces
from ..unit import FlatState
from . import folder
from .index import Index, Param, StateItem, buffer_key, from_json, parts_of, state_key, weight_key
from .save import begin_between_steps, buffers_of
from .state import group_of, own_optimizer, require_same_optimizer, restore_optimizer, restore_state
from .tensors import NAMES, TensorFile, open_file, require_size
from .together import together


def load(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Set weights and buffers of a sharded model, and its optimizer's state, from a checkpoint; returns its `extra`.

    Every rank calls it. The layout, the world and the precision of the computation may be others than those that saved;
    the model, the optimizer's class and groups, and the dtype of the masters must be the same. Without an
    optimizer, the weights alone are loaded.
    """
    engine = engine_of(model)
    own = own_optimizer(engine, optimizer)
    begin_between_steps(engine, "load", path, own)
    world, place = engine.mesh.world, Path(path).resolve()
    job = together(world, lambda: _prepare(place, engine, model, own))
    try:
        together(world, lambda: _read(job, own))
    finally:
        engine.was_rewritten()
    return job.index.extra


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What this rank holds of a parameter: the place to fill, and the interval of its elements."""

    state: FlatState
    number: int
    interval: Interval
    name: str
    saved: Param

    @property
    def resting(self) -> Tensor:
        return self.state.resting_params[self.number]


@dataclass(frozen=True, slots=True)
class _Job:
    folder: Path
    index: Index
    wanted: list[_Wanted]
    buffers: dict[str, Tensor]
    files: dict[int, TensorFile] = field(default_factory=dict)

    def file(self, number: int) -> TensorFile:
        if number not in self.files:
            file = self.index.files[number]
            self.files[number] = open_file(self.folder / file.name, file.num_bytes)
        return self.files[number]


def _prepare(place: Path, engine: Engine, model: nn.Module, optimizer: ShardedOptimizer | None) -> _Job:
    found, text = folder.read_index(place)
    try:
        index = from_json(text)
        buffers = buffers_of(model, engine)
        names = _require_same_model(engine, buffers, index)
        wanted = [
            _Wanted(state, piece.param, piece.in_param, names[spec.name], index.params[names[spec.name]])
            for unit in engine.units
            for state in unit.states
            for piece in pieces(state.flat.intervals, state.flat.spans[state.flat.depth_of_master])
            for spec in (state.flat.params[piece.param],)
        ]
        if optimizer is not None:
            require_same_optimizer(optimizer, index.optimizer)
            _require_same_groups(optimizer, wanted)
        job = _Job(found, index, wanted, buffers)
        # Every rank looks those files through that it reads, and one sees that no other is missing.
        numbers = {part.piece.file for want in wanted for part in parts_of(want.name, want.saved.pieces, want.interval)}
        for number in sorted({0, *numbers}):
            job.file(number)
        for file in index.files if engine.mesh.rank == 0 else ():
            require_size(found / file.name, file.num_bytes)
    except CheckpointError as error:
        raise CheckpointError(f"cannot load {place}: {error}") from error
    return job


def _saved_name(spec: Spec, index: Index) -> str:
    """A tied parameter may have been saved under any of its names."""
    return next((site.name for site in spec.sites if site.name in index.params), spec.name)


def _require_same_model(engine: Engine, buffers: dict[str, Tensor], index: Index) -> dict[str, str]:
    """Raises unless the model is the one that was saved; returns the saved name of each of its parameters."""
    specs = [(spec, state.flat.master) for unit in engine.units for state in unit.states for spec in state.flat.params]
    names = {spec.name: _saved_name(spec, index) for spec, _ in specs}
    for what, ours, theirs in (
        ("parameters", set(names.values()), set(index.params)),
        ("buffers", set(buffers), set(index.buffers)),
    ):
        if missing := sorted(ours - theirs):
            raise CheckpointError(f"it is of another model: it lacks {len(missing)} {what}, first {missing[0]!r}")
        if unknown := sorted(theirs - ours):
            raise CheckpointError(
                f"it is of another model: it has {len(unknown)} {what} that this one has not, first {unknown[0]!r}"
            )
    shapes = {names[spec.name]: (tuple(spec.shape), index.params[names[spec.name]].shape) for spec, _ in specs}
    shapes |= {name: (tuple(value.shape), index.buffers[name].shape) for name, value in buffers.items()}
    for name, (ours_, theirs_) in shapes.items():
        if ours_ != theirs_:
            raise CheckpointError(f"it is of another model: {name!r} is {theirs_} in it and {ours_} in the model")
    for spec, master in specs:
        saved = index.params[names[spec.name]].dtype
        if saved != NAMES[master]:
            raise CheckpointError(
                f"its master weights of {spec.name!r} are {saved}, the model's are {NAMES[master]}: call sw.shard with "
                "a precision= (and for frozen weights, with a model) of that dtype"
            )
    return names


def _require_same_groups(optimizer: ShardedOptimizer, wanted: list[_Wanted]) -> None:
    group = group_of(optimizer)
    for want in wanted:
        ours, theirs = group.get(want.resting), want.saved.group
        if ours != theirs:
            raise CheckpointError(
                f"parameter {want.name!r} is in group {theirs} of its optimizer and in group {ours} of this one: build "
                "the same groups"
            )
        is_part = want.resting.numel() < torch.Size(want.saved.shape).numel()
        for key, item in want.saved.state.items():
            if is_part and item.kind == "whole" and torch.Size(item.shape).numel() > 1:
                raise CheckpointError(
                    f"the optimizer's {key!r} of parameter {want.name!r} is {item.shape} and was made for the whole "
                    "parameter: use a layout whose optimizer is 'whole'"
                )


def _read(job: _Job, optimizer: ShardedOptimizer | None) -> None:
    group = group_of(optimizer)
    try:
        for want in job.wanted:
            _read_split(job, want, None, want.state.master[want.state.held[want.number]])
            if optimizer is not None and want.resting in group:
                settings = optimizer.inner.param_groups[group[want.resting]]
                restore_state(optimizer, want.resting, settings, want.saved.state, partial(_read_state, job, want))
        for name, buffer in job.buffers.items():
            row = torch.empty(buffer.numel(), dtype=buffer.dtype, device=buffer.device)
            job.file(0).read(buffer_key(name), 0, row)
            buffer.copy_(row.view(buffer.shape))
        if optimizer is not None and job.index.optimizer is not None:
            restore_optimizer(optimizer, job.index.optimizer)
    except (CheckpointError, OSError) as error:
        raise CheckpointError(
            f"{error}; the model is a mixture of what it was and of what was read until then: load again"
        ) from error


def _read_state(job: _Job, want: _Wanted, key: str, item: StateItem, row: Tensor) -> None:
    if item.kind == "split":
        _read_split(job, want, key, row)
    else:
        first = min(want.saved.pieces, key=lambda piece: piece.start)
        job.file(first.file).read(state_key(want.name, key, first.start), 0, row)


def _read_split(job: _Job, want: _Wanted, key: str | None, row: Tensor) -> None:
    """The weights of a parameter, or state that is cut like them."""
    for part in parts_of(want.name, want.saved.pieces, want.interval):
        start = part.piece.start
        stored = weight_key(want.name, start) if key is None else state_key(want.name, key, start)
        job.file(part.piece.file).read(stored, part.first, row[part.at : part.at + part.num_elems])
