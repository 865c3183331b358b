"""Whole weights: reading them, changing them, loading them. Every rank must call these together.

Weights are gathered from the masters, in the masters' precision, one unit at a time where the caller's purpose allows.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...base.errors import ConfigurationError, StateError
from ..schedule.model import Param
from ..unit.state import FlatState
from ..unit.user_parameter import place_of
from ..wire.collectives import broadcast_from_first, exchange
from .full_gradients import HiddenGradients, WholeGradients
from .guards import engine_of, own_state_dict
from .runtime import Engine, channels_of


@contextmanager
def whole(module: nn.Module, *, write: bool = False, grads: bool = False) -> Iterator[None]:
    """Inside, the parameters of `module` (a sharded model or a part of it) are whole, in their masters' precision.

    With `grads`, their `.grad` is the whole gradient as the optimizer would read it, the mean over all ranks, or None
    where no rank has one. With `write`, the values that rank 0 leaves in them (and in `.grad`) are set on all ranks.
    """
    engine = engine_of(module)
    if grads and write:
        engine.updates.refuse_after_early("change of gradients")
    engine.rest()
    registered = {id(part._parameters) for part in module.modules()}
    shown = [
        (state, _gather_master(engine, state))
        for unit in engine.units
        if unit.is_registered_in(registered)
        for state in unit.states
    ]
    places = {user: place for state, buffer in shown for user, place in _places(state, buffer)}
    views = {user: nn.Parameter(place.data, user.requires_grad) for user, place in places.items()}
    states = [state for state, _ in shown]
    gradients = WholeGradients(engine, states) if grads else HiddenGradients(states)
    for user, grad in gradients.shown.items():
        views[user].grad = grad
    for unit in engine.units:
        unit.show(views)
    _show_to_users(views)
    engine.whole_modules = {id(part) for part in module.modules()}
    try:
        yield
    finally:
        engine.whole_modules = set()
        _show_to_users(dict.fromkeys(views))
        found = [entry for unit in engine.units for entry in unit.take_back() if entry[0] in places]
    complaints = [_follow_replacement(places[user], current) for user, current in found]
    complaints.append(gradients.complaint(views, write))
    if not write and not all(_is_unchanged(state, buffer) for state, buffer in shown):
        complaints.append("parameters were changed inside sw.whole(...), which was for reading: use write=True")
    # Every rank must know: the others would wait for this one in the next collective.
    reports = exchange(engine.mesh.world, next((complaint for complaint in complaints if complaint), ""))
    complaint = next((report for report in reports if report), "")
    if complaint:
        raise StateError(complaint)
    if write:
        for state, buffer in shown:
            _write_master(engine, state, buffer)
        engine.was_rewritten()
        gradients.write(views, found)


def _places(state: FlatState, buffer: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The view of each of the user's parameters in `buffer`."""
    for user, interval, spec in zip(state.user_params, state.flat.intervals, state.flat.params, strict=True):
        yield user, buffer[interval.start : interval.stop].view(spec.shape)


def _show_to_users(views: Mapping[nn.Parameter, nn.Parameter | None]) -> None:
    """Make the user's references to parameters see the same tensors as the modules."""
    for user, view in views.items():
        place = place_of(user)
        assert place is not None
        place.shown = view


def _follow_replacement(place: Tensor, current: nn.Parameter | None) -> str:
    """Copy the values of a parameter, or data, that replaced the one shown; return a complaint if it does not fit."""
    if current is None or current.shape != place.shape:
        shape = None if current is None else tuple(current.shape)
        return f"a parameter of shape {tuple(place.shape)} became {shape} inside sw.whole(...)"
    if current.data_ptr() != place.data_ptr():
        place.copy_(current.detach())
    return ""


def _is_unchanged(state: FlatState, buffer: Tensor) -> bool:
    own = state.flat.spans[state.flat.depth_of_master]
    master = state.read_master().to(buffer.device)
    return torch.equal(buffer[own.start : own.stop].view(torch.uint8), master.view(torch.uint8))


def full_state_dict(model: nn.Module, *, rank0_only: bool = False) -> dict[str, Tensor]:
    """The model's own `state_dict()`, whole, on the host, with its keys, shapes and dtypes as they were given.

    With `rank0_only` the other ranks take part and get an empty dict.
    """
    found = {name: value for part in whole_parts(model, rank0_only=rank0_only) for name, value in part.items()}
    engine = engine_of(model)
    return {name: found[name] for name in own_state_dict(model, engine) if name in found}


def whole_parts(
    model: nn.Module, *, rank0_only: bool = False, wants: Callable[[str], bool] = lambda name: True
) -> Iterator[dict[str, Tensor]]:
    """Yield the entries of `full_state_dict`, one unit after the other, then those that are no parameters.

    Every rank must run it to its end; with `rank0_only` the others get empty dicts. A tied weight comes once for each
    of its names, as one tensor. Names for which `wants` is False are left out; a flat with only such is not gathered.
    """
    engine = engine_of(model)
    engine.rest()
    entries = {name: value for name, value in own_state_dict(model, engine).items() if wants(name)}
    is_taker = engine.mesh.rank == 0 or not rank0_only
    names: dict[Tensor, list[str]] = {}
    for name, value in entries.items():
        if place_of(value) is not None:
            names.setdefault(value, []).append(name)
    for unit in engine.units:
        part: dict[str, Tensor] = {}
        for state in unit.states:
            if not any(user in names for user in state.user_params):
                continue
            buffer = _gather_master(engine, state)
            if not is_taker:
                continue
            for (user, value), spec in zip(_places(state, buffer), state.flat.params, strict=True):
                if user in names:
                    # A copy even on the host: the buffer is one piece, and a caller may keep only one tensor of it.
                    part |= dict.fromkeys(names[user], value.to("cpu", spec.dtype.torch, copy=True))
        yield part
    others = {name: value for name, value in entries.items() if place_of(value) is None}
    yield {
        name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        for name, value in others.items()
        if is_taker
    }


def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor] | None, *, strict: bool = True) -> None:
    """Set the model's weights and buffers from whole tensors by original name.

    Every rank gives the mapping, or rank 0 alone does and the others give None. Tensors are read one unit at a time, so
    a mapping that reads lazily from files never has more than that in memory.
    """
    engine = engine_of(model)
    engine.rest()
    entries = own_state_dict(model, engine)
    givers = exchange(engine.mesh.world, state_dict is not None)
    if not givers[0]:
        raise ConfigurationError("sw.load_full_state_dict: rank 0 gave no state dict")
    from_first = not all(givers)
    buffers = {key: value for key, value in entries.items() if isinstance(value, Tensor) and place_of(value) is None}
    complaint = _complaint(engine, state_dict, buffers, set(entries), strict) if state_dict is not None else ""
    complaint = next((other for other in exchange(engine.mesh.world, complaint) if other), "")
    if complaint:
        raise ConfigurationError(f"sw.load_full_state_dict: {complaint}")
    for unit in engine.units:
        for state in unit.states:
            _load_flat(engine, state, state_dict, from_first)
    for key, value in buffers.items():
        if state_dict is not None and key in state_dict:
            value.copy_(state_dict[key])
        if from_first:
            broadcast_from_first(engine.mesh.world, value)
    engine.was_rewritten()


def _given_name(spec: Param, state_dict: Mapping[str, Tensor]) -> str | None:
    """The name under which a parameter is given; a tied one may come under any of its names."""
    return next((site.name for site in spec.sites if site.name in state_dict), None)


def _complaint(
    engine: Engine,
    state_dict: Mapping[str, Tensor],
    buffers: dict[str, Tensor],
    known: set[str],
    strict: bool,
) -> str:
    """Say what is wrong with a state dict; empty if it fits."""
    params = [spec for unit in engine.units for state in unit.states for spec in state.flat.params]
    missing = [spec.name for spec in params if _given_name(spec, state_dict) is None]
    missing += [key for key in buffers if key not in state_dict]
    unknown = sorted(set(state_dict) - known)
    if strict and missing:
        return f"the state dict lacks {len(missing)} of the model's tensors, first {missing[0]!r}"
    if strict and unknown:
        return f"the state dict has {len(unknown)} tensors the model has not, first {unknown[0]!r}"
    expected = {name: spec.shape for spec in params if (name := _given_name(spec, state_dict)) is not None}
    expected |= {key: buffer.shape for key, buffer in buffers.items() if key in state_dict}
    for name, shape in expected.items():
        if state_dict[name].shape != shape:
            return f"{name!r} is {tuple(state_dict[name].shape)} in the state dict, {tuple(shape)} in the model"
    return ""


def _load_flat(engine: Engine, state: FlatState, state_dict: Mapping[str, Tensor] | None, from_first: bool) -> None:
    given: dict[int, str] = {}
    if state_dict is not None:
        names = {index: _given_name(spec, state_dict) for index, spec in enumerate(state.flat.params)}
        given = {index: name for index, name in names.items() if name is not None}
    if not from_first:
        assert state_dict is not None
        with state.writing():
            for index, name in given.items():
                state.write(index, state_dict[name])
        return
    buffer = _gather_master(engine, state)
    for index, name in given.items():
        assert state_dict is not None
        interval = state.flat.intervals[index]
        buffer[interval.start : interval.stop].copy_(state_dict[name].reshape(-1))
    _write_master(engine, state, buffer)


def _gather_master(engine: Engine, state: FlatState) -> Tensor:
    """All of a flat in the master's precision, in memory of its own."""
    flat = state.flat
    own = flat.spans[flat.depth_of_master]
    buffer = torch.zeros(flat.num_elems, dtype=flat.master.torch, device=state.device)
    buffer[own.start : own.stop].copy_(state.read_master())
    with engine.mesh.ledger.uncounted():
        state.carrier.run(buffer, 0, flat.master_hops, channels_of(engine.mesh, "gather"))
    return buffer


def _write_master(engine: Engine, state: FlatState, buffer: Tensor) -> None:
    own = state.flat.spans[state.flat.depth_of_master]
    broadcast_from_first(engine.mesh.world, buffer)
    with state.writing() as master:
        master.copy_(buffer[own.start : own.stop])
