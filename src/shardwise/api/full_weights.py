"""Whole weights and gradients: read, change and load them; `save_pretrained`. All ranks must call these together.

Weights are gathered from the masters, in the masters' precision, one unit at a time where possible.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..base.dtypes import DType
from ..base.errors import ConfigurationError, StateError
from ..core.engine.guards import engine_of, own_state_dict
from ..core.engine.rank_agreement import all_or_none
from ..core.engine.runtime import Engine
from ..core.mesh import patient_hosts
from ..core.optim.clip import norms_by_param, require_norm_type
from ..core.unit.state import FlatState, NotShown
from ..core.unit.user_parameter import place_of
from ..core.wire.collectives import broadcast_from_first, exchange
from .preparation import checksum

Views = Mapping[nn.Parameter, nn.Parameter]  # from the user's parameters to those that `sw.whole` shows


@contextmanager
def whole(module: nn.Module, *, write: bool = False, grads: bool = False) -> Iterator[None]:
    """Make the parameters of `module`, a sharded model or a part of it, whole inside `with`, in the masters' precision.

    With `grads`, their `.grad` is the whole gradient as the optimizer would read it, the mean over all ranks, or None
    where no rank has one. With `write`, the values that rank 0 leaves in them (and in `.grad`) are set on all ranks.
    """
    engine = engine_of(module)
    if grads and write:
        engine.reductions.refuse_after_early("change of gradients")
    engine.rest()
    registered = {id(part._parameters) for part in module.modules()}
    shown = [
        (state, state.decoded(_gather(engine, state, state.read_master(), state.flat.master)))
        for unit in engine.units
        if unit.is_registered_in(registered)
        for state in unit.states
    ]
    places = {user: place for state, buffer in shown for user, place in _places(state, buffer)}
    sums = {state: checksum(buffer) for state, buffer in shown if state.flat.stored_codec is not None}
    views = {user: nn.Parameter(place.data, user.requires_grad) for user, place in places.items()}
    gradients = _Gradients(engine, [state for state, _ in shown if state.flat.trainable], grads)
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
    complaints = []
    for user, current in found:
        place = places[user]
        if current is None or current.shape != place.shape:
            shape = None if current is None else tuple(current.shape)
            complaints.append(f"a parameter of shape {tuple(place.shape)} became {shape} inside sw.whole(...)")
        elif current.data_ptr() != place.data_ptr():  # a parameter, or its data, was replaced
            place.copy_(current.detach())
    complaints.append(gradients.complaint(views, write))
    if any(checksum(buffer) != sums[state] for state, buffer in shown if state in sums):
        complaints.append("frozen weights that are stored encoded were changed inside sw.whole(...): load other ones")
    exact = [(state, buffer) for state, buffer in shown if state not in sums]
    if not write and not all(_is_same(state, buffer, state.read_master()) for state, buffer in exact):
        complaints.append("parameters were changed inside sw.whole(...), which was for reading: use write=True")
    if complaint := _first_of_all_ranks(engine, complaints):
        raise StateError(complaint)
    if write:
        for state, buffer in exact:
            _write_master(engine, state, buffer)
        engine.was_rewritten()
        gradients.write(views, found)


def _first_of_all_ranks(engine: Engine, complaints: Iterable[str]) -> str:
    """Return the first complaint of any rank, on all ranks: if only one raised, the others would wait for it."""
    reports = exchange(engine.mesh.world, next(filter(None, complaints), ""))
    return next(filter(None, reports), "")


def _places(state: FlatState, buffer: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each of the user's parameters and its view of `buffer`."""
    for user, interval, spec in zip(state.user_params, state.flat.whole_intervals, state.flat.params, strict=True):
        yield user, buffer[interval.start : interval.stop].view(spec.shape)


def _show_to_users(views: Mapping[nn.Parameter, nn.Parameter | None]) -> None:
    """Make the user's references to parameters see the same tensors as the modules."""
    for user, view in views.items():
        place = place_of(user)
        assert place is not None
        place.shown = view


def full_state_dict(model: nn.Module, *, rank0_only: bool = False) -> dict[str, Tensor]:
    """Return the model's `state_dict()` with whole tensors on the host. Keys, shapes and dtypes are the original ones.

    With `rank0_only` the other ranks take part and get an empty dict.
    """
    found = {name: value for part in whole_parts(model, rank0_only=rank0_only) for name, value in part.items()}
    return {name: found[name] for name in own_state_dict(model, engine_of(model)) if name in found}


def whole_parts(
    model: nn.Module, *, rank0_only: bool = False, wants: Callable[[str], bool] = lambda name: True
) -> Iterator[dict[str, Tensor]]:
    """Yield the entries of `full_state_dict`, one unit after the other, then buffers and other entries.

    All ranks must iterate to the end; with `rank0_only` the others get empty dicts. A tied weight has an entry for each
    name, as one tensor. Names for which `wants` is False are left out. Flats without wanted names are not gathered.
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
            buffer = _gather(engine, state, state.read_master(), state.flat.master)
            if not is_taker:
                continue
            buffer = state.decoded(buffer)
            for (user, value), spec in zip(_places(state, buffer), state.flat.params, strict=True):
                if user in names:
                    # A copy even on the host: a view would keep the whole buffer alive.
                    part |= dict.fromkeys(names[user], value.to("cpu", spec.dtype.torch, copy=True))
        yield part
    yield {
        name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        for name, value in entries.items()
        if is_taker and place_of(value) is None
    }


def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor] | None, *, strict: bool = True) -> None:
    """Set the model's weights and buffers from whole tensors by original name.

    Every rank gives the mapping, or rank 0 alone does and the others give None. Tensors are read one unit at a time, so
    a mapping that reads lazily from files never needs memory for more than one unit.
    """
    engine = engine_of(model)
    engine.rest()
    entries = own_state_dict(model, engine)
    givers = exchange(engine.mesh.world, state_dict is not None)
    if not givers[0]:
        raise ConfigurationError("sw.load_full_state_dict: rank 0 gave no state dict")
    tensors: Mapping[str, Tensor] = {} if state_dict is None else state_dict
    buffers = {key: value for key, value in entries.items() if isinstance(value, Tensor) and place_of(value) is None}
    params = [spec for state in engine.all_states for spec in state.flat.params]
    # A tied parameter may come under any of its names.
    names = {spec: next((site.name for site in spec.sites if site.name in tensors), spec.name) for spec in params}
    shapes = {names[spec]: spec.shape for spec in params} | {key: buffer.shape for key, buffer in buffers.items()}
    missing = [name for name in shapes if name not in tensors]
    unknown = sorted(set(tensors) - set(entries))
    encoded = {
        names[spec]: as_bytes.shape
        for state in engine.all_states
        for spec, as_bytes in zip(state.flat.params, state.flat.stored_params, strict=True)
    }
    complaints = [
        f"{name!r} is {tuple(tensors[name].shape)} in the state dict, {tuple(shape)} in the model"
        for name, shape in shapes.items()
        if name in tensors and tensors[name].shape not in (shape, encoded.get(name))
    ]
    if strict and unknown:
        complaints.insert(0, f"the state dict has {len(unknown)} tensors the model has not, first {unknown[0]!r}")
    if strict and missing and state_dict is not None:
        complaints.insert(0, f"the state dict lacks {len(missing)} of the model's tensors, first {missing[0]!r}")
    if complaint := _first_of_all_ranks(engine, complaints):
        raise ConfigurationError(f"sw.load_full_state_dict: {complaint}")
    for state in engine.all_states:
        given = [(index, names[spec]) for index, spec in enumerate(state.flat.params) if names[spec] in tensors]
        if all(givers):
            state.write({index: tensors[name] for index, name in given})
            continue
        buffer = _gather(engine, state, state.read_master(), state.flat.master)
        for index, name in given:
            interval = state.flat.intervals[index]
            buffer[interval.start : interval.stop].copy_(state.stored(tensors[name]).reshape(-1))
        _write_master(engine, state, buffer)
    for key, value in buffers.items():
        if key in tensors:
            value.copy_(tensors[key])
        if not all(givers):
            broadcast_from_first(engine.mesh.world, value)
    engine.was_rewritten()


def _gather(engine: Engine, state: FlatState, part: Tensor, dtype: DType) -> Tensor:
    """Gather a whole flat into new memory. `part`: this rank's part of its master or of its gradient."""
    flat = state.flat
    buffer = torch.zeros(flat.num_elems, dtype=dtype.torch, device=state.device)
    buffer[state.own_in_whole].copy_(part)
    with engine.mesh.ledger.uncounted():
        state.carrier.run(buffer, 0, flat.master_hops, engine.mesh.channels["gather"])
    return buffer


def _is_same(state: FlatState, buffer: Tensor, part: Tensor) -> bool:
    """Return True if this rank's part of a whole buffer still has the bits of `part`."""
    expected = part.to(buffer.device, buffer.dtype)
    return torch.equal(buffer[state.own_in_whole].view(torch.uint8), expected.view(torch.uint8))


def _write_master(engine: Engine, state: FlatState, buffer: Tensor) -> None:
    broadcast_from_first(engine.mesh.world, buffer)
    state.fill_master(slice(0, state.flat.num_master), lambda master: master.copy_(buffer[state.own_in_whole]))
    state.publish()


# Gradients.


def grad_norms(model: nn.Module, norm_type: float = 2.0) -> dict[str, float]:
    """Return the norm of each whole gradient by its parameter's name. The result is the same on every rank.

    Parameters that have no gradient on any rank are left out.
    """
    order, engine = require_norm_type(norm_type), engine_of(model)
    _complete(engine, engine.trainable_states)
    return norms_by_param(engine.trainable_states, engine.mesh.channels["reduce"], engine.mesh.device, order)


def _complete(engine: Engine, states: Iterable[FlatState]) -> None:
    """Finish the reduction of all gradients. Apply clipping that is pending for gradients of `states` on the host."""
    engine.finish_gradients()
    engine.await_gradients()
    for state in states:
        if state.flat.host_updates and state.gradient.stage == "final":
            engine.await_host_of(state)
            state.gradient.apply_clip()


class _Gradients:
    """Gradients that `sw.whole` shows. With `grads` they are whole, in the masters' precision. Otherwise each gradient
    that exists is shown as a stand-in; using it raises an error."""

    def __init__(self, engine: Engine, states: list[FlatState], grads: bool) -> None:
        self._engine = engine
        self._states = states
        self._is_shown = grads
        self._buffers: dict[FlatState, Tensor] = {}
        self.shown: dict[nn.Parameter, Tensor] = {}
        if grads:
            _complete(engine, states)
        for state in states:
            gradient, master = state.gradient, state.flat.master.torch
            if grads and gradient.stage == "final":
                buffer = _gather(engine, state, gradient.final_for_optimizer, state.flat.reduce).to(master)
                self._buffers[state] = buffer
                views = zip(_places(state, buffer), gradient.used, strict=True)
                self.shown |= {user: view for (user, view), used in views if used}
            elif not grads and gradient.stage != "empty":
                for user, spec, used in zip(state.user_params, state.flat.params, gradient.used, strict=True):
                    if used or gradient.stage == "local":
                        self.shown[user] = NotShown.like(spec.shape, master, state.device)

    def complaint(self, views: Views, write: bool) -> str:
        is_same = all(view.grad is self.shown.get(user) for user, view in views.items())
        if not self._is_shown:
            return "" if is_same else "gradients were set inside sw.whole(...): use grads=True and write=True"
        trained = {user for state in self._states for user in state.user_params}
        if any(view.grad is not None for user, view in views.items() if user not in trained):
            return "a frozen parameter was given a gradient inside sw.whole(...), which nobody would read"
        if any(view.grad is not None and view.grad.layout != torch.strided for view in views.values()):
            return "a parameter was given a sparse gradient inside sw.whole(...): make it dense (.to_dense())"
        buffers = self._buffers.items()
        if not write and not (
            is_same and all(_is_same(each, row, each.gradient.final_for_optimizer) for each, row in buffers)
        ):
            return "gradients were changed inside sw.whole(...), which was for reading: use write=True"
        return ""

    def write(self, views: Views, found: Iterable[tuple[nn.Parameter, nn.Parameter | None]]) -> None:
        """Set the gradients of all ranks to those that rank 0 has left in `param.grad`, or to None.

        If a parameter was replaced by another, the gradient of the new one counts, if it has one.
        """
        if not self._is_shown:
            return
        mesh = self._engine.mesh
        left = {user: view.grad for user, view in views.items()}
        left |= {user: new.grad for user, new in found if new is not None and new.grad is not None}
        is_set = [left.get(user) is not None for state in self._states for user in state.user_params]
        flags = torch.tensor(is_set, dtype=torch.int32, device=mesh.device)
        broadcast_from_first(mesh.world, flags)
        answers = iter(flags.tolist())
        for state in self._states:
            used = [bool(next(answers)) for _ in state.user_params]
            if any(used) or state in self._buffers:
                buffer = torch.zeros(state.flat.num_elems, dtype=state.flat.reduce.torch, device=state.device)
                for user, place in _places(state, buffer):
                    if (grad := left.get(user)) is not None:
                        place.copy_(grad.detach())
                broadcast_from_first(mesh.world, buffer)
                state.gradient.set_final(buffer[state.own_in_whole], used)


# `save_pretrained` of Hugging Face models and of PEFT's adapters: scripts call it on every rank after the training.


def serve_save_pretrained(model: nn.Module) -> None:
    for module in model.modules():
        if getattr(type(module), "save_pretrained", None) is not None:
            module.__dict__["save_pretrained"] = partial(_save_pretrained, module)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that `save_pretrained` writes, whole, on the host of rank 0. All ranks must call it."""
    parts = whole_parts(model, rank0_only=True, wants=_wanted(model))
    return {name: value for part in parts for name, value in part.items()}


def _save_pretrained(model: Any, *args: Any, **kwargs: Any) -> None:
    engine = engine_of(model)
    words = inspect.signature(type(model).save_pretrained).bind(model, *args, **kwargs).arguments
    words |= words.pop("kwargs", {})
    if engine.whole_modules or words.get("state_dict") is not None:
        _write(**words)
        return
    words["state_dict"] = whole_weights(model)

    def write_on_first() -> None:
        if engine.mesh.rank != 0:
            return
        if not words.get("is_main_process", True):
            raise ConfigurationError(
                "save_pretrained(is_main_process=False) on rank 0, which writes: give it is_main_process=(rank == 0), "
                "or leave it out, and call it on every rank"
            )
        _write(**words)

    # If every rank has all weights, do not wait for other ranks: a script may call this on rank 0 alone.
    if any(state.flat.depth_of_master for state in engine.all_states):
        all_or_none(patient_hosts(), write_on_first)
    else:
        write_on_first()


def _write(self: Any, save_directory: Any, **words: Any) -> None:
    """Call the model's own `save_pretrained`. It may empty the dict of weights, so their dtype is read before."""
    weights = words.get("state_dict") or {}
    dtype = next((value.dtype for value in weights.values() if value.is_floating_point()), None)
    type(self).save_pretrained(self, save_directory, **words)
    # The method writes the compute dtype into the configuration, but the weights have their original dtype: correct it.
    is_written = words.get("is_main_process", True) and _is_pretrained(self) and not self._hf_peft_config_loaded
    if is_written and dtype is not None:
        self.config.dtype = dtype
        self.config.save_pretrained(save_directory)


def _is_pretrained(model: nn.Module) -> bool:
    """True for a `PreTrainedModel`. PEFT's wrappers pass on the attributes of the model, but not of its class."""
    return getattr(type(model), "base_model_prefix", None) is not None


def _wanted(model: Any) -> Callable[[str], bool]:
    """Return a filter by name of the weights to write. For PEFT: trained weights, adapters, and all embeddings."""
    adapters = None if _is_pretrained(model) else getattr(model, "peft_config", None)
    if adapters is None:
        return lambda name: True
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    embeddings = {param for table in tables if table is not None for param in table.parameters()}
    params = model.named_parameters(remove_duplicate=False)
    left_out = {name for name, param in params if not param.requires_grad and param not in embeddings}
    return lambda name: name not in left_out or any(f".{adapter}." in f"{name}." for adapter in adapters)
