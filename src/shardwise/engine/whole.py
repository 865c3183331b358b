"""Whole weights: reading them, changing them, loading them. Every rank must call these together.

Weights are gathered from the masters, in the masters' precision, one unit at a time where the caller's purpose allows.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError, StateError, did_you_mean
from ..unit import FlatState, Unit
from ..wire.collectives import broadcast_from_first, exchange
from .guards import engine_of, unguarded
from .runtime import Engine, channels_of


@contextmanager
def whole(module: nn.Module, *, write: bool = False) -> Iterator[None]:
    """Inside, the parameters of `module` (a sharded model or a part of it) are whole, in their masters' precision.

    With `write`, what rank 0 leaves in them becomes the weights of all ranks.
    """
    engine = engine_of(module)
    engine.rest()
    registered = {id(part._parameters) for part in module.modules()}
    units = [unit for unit in engine.units if unit.is_registered_in(registered)]
    buffers = {id(state): _gather_master(engine, state) for unit in units for state in unit.states}
    shown: list[tuple[FlatState, nn.Parameter]] = []

    def param_of(state: FlatState, index: int) -> nn.Parameter:
        interval, spec = state.flat.intervals[index], state.flat.params[index]
        view = buffers[id(state)].data[interval.start : interval.stop].view(spec.shape)
        param = nn.Parameter(view, requires_grad=spec.trainable)
        shown.append((state, param))
        return param

    for unit in units:
        unit.show(param_of)
    with unguarded(engine):
        try:
            yield
        finally:
            for unit in units:
                unit.show_resting()
    if write:
        for unit in units:
            for state in unit.states:
                _write_master(engine, state, buffers[id(state)])
        engine.was_rewritten()
    elif any(param._version for _, param in shown):
        raise StateError(
            "parameters were changed inside sw.whole(...), which was for reading: use sw.whole(..., write=True)"
        )


def full_state_dict(model: nn.Module, *, rank0_only: bool = False) -> dict[str, Tensor]:
    """The model's own `state_dict()`, whole, on the host, with its keys, shapes and dtypes as they were given.

    With `rank0_only` the other ranks take part and get an empty dict.
    """
    engine = engine_of(model)
    engine.rest()
    with unguarded(engine):
        entries = model.state_dict(keep_vars=True)
    wanted = engine.mesh.rank == 0 or not rank0_only
    found: dict[Tensor, Tensor] = {}
    for unit in engine.units:
        for state in unit.states:
            buffer = _gather_master(engine, state)
            if wanted:
                for index, spec in enumerate(state.flat.params):
                    interval = state.flat.intervals[index]
                    value = buffer[interval.start : interval.stop].view(spec.shape)
                    # A copy even on the host: the buffer is one piece, and a caller may keep only one tensor of it.
                    found[state.resting_params[index]] = value.to("cpu", spec.dtype, copy=True)
    if not wanted:
        return {}
    return {
        key: found[value]
        if value in found
        else value.detach().to("cpu", copy=True)
        if isinstance(value, Tensor)
        else value
        for key, value in entries.items()
    }


def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor] | None, *, strict: bool = True) -> None:
    """Set the model's weights and buffers from whole tensors by original name.

    Every rank gives the mapping, or rank 0 alone does and the others give None. Tensors are asked for one unit at a
    time, so a mapping that reads lazily from files never has more than that in memory.
    """
    engine = engine_of(model)
    engine.rest()
    with unguarded(engine):
        entries = model.state_dict(keep_vars=True)
    givers = exchange(engine.mesh.world, state_dict is not None)
    if not givers[0]:
        raise ConfigurationError("sw.load_full_state_dict: rank 0 gave no state dict")
    _check_keys(engine, state_dict, set(entries), strict)
    from_first = not all(givers)
    names = {spec.name: spec for unit in engine.units for state in unit.states for spec in state.flat.params}
    for unit in engine.units:
        _load_unit(engine, unit, state_dict, from_first)
    buffers = {key: value for key, value in entries.items() if key not in names and isinstance(value, Tensor)}
    resting = {id(param) for unit in engine.units for state in unit.states for param in state.resting_params}
    for key, value in buffers.items():
        if id(value) in resting:
            continue
        if state_dict is not None and key in state_dict:
            value.copy_(state_dict[key])
        if from_first:
            broadcast_from_first(engine.mesh.world, value)
    engine.was_rewritten()


def _check_keys(engine: Engine, state_dict: Mapping[str, Tensor] | None, expected: set[str], strict: bool) -> None:
    message = ""
    if state_dict is not None and strict:
        missing, unknown = sorted(expected - set(state_dict)), sorted(set(state_dict) - expected)
        if missing:
            message = f"the state dict lacks {len(missing)} of the model's tensors, first {missing[0]!r}"
        elif unknown:
            message = (
                f"the state dict has {len(unknown)} tensors the model has not, first {unknown[0]!r}; "
                + (did_you_mean(unknown[0], expected)[:200])
            )
    if state_dict is not None and not message:
        for unit in engine.units:
            for state in unit.states:
                for spec in state.flat.params:
                    given = state_dict[spec.name].shape if spec.name in state_dict else spec.shape
                    if given != spec.shape and not message:
                        message = (
                            f"{spec.name!r} is {tuple(given)} in the state dict and {tuple(spec.shape)} in the model"
                        )
    message = next((other for other in exchange(engine.mesh.world, message) if other), "")
    if message:
        raise ConfigurationError(f"sw.load_full_state_dict: {message}")


def _load_unit(engine: Engine, unit: Unit, state_dict: Mapping[str, Tensor] | None, from_first: bool) -> None:
    for state in unit.states:
        flat = state.flat
        if not from_first:
            assert state_dict is not None
            for index, spec in enumerate(flat.params):
                if spec.name in state_dict:
                    state.write(index, state_dict[spec.name])
            continue
        buffer = _gather_master(engine, state)
        if state_dict is not None:
            for spec, interval in zip(flat.params, flat.intervals, strict=True):
                if spec.name in state_dict:
                    buffer[interval.start : interval.stop].copy_(state_dict[spec.name].reshape(-1))
        _write_master(engine, state, buffer)


def _gather_master(engine: Engine, state: FlatState) -> Tensor:
    """All of a flat in the master's precision, in memory of its own."""
    flat = state.flat
    own = flat.spans[flat.depth_of_master]
    buffer = torch.zeros(flat.num_elems, dtype=flat.master, device=state.master.device)
    buffer[own.start : own.stop].copy_(state.master)
    with engine.mesh.ledger.uncounted():
        state.run_hops(buffer, 0, flat.master_hops, channels_of(engine.mesh, "gather"))
    return buffer


def _write_master(engine: Engine, state: FlatState, buffer: Tensor) -> None:
    own = state.flat.spans[state.flat.depth_of_master]
    broadcast_from_first(engine.mesh.world, buffer)
    state.master.copy_(buffer[own.start : own.stop])
