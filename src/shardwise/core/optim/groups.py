"""The groups of the user's optimizer: checks against the model, and this rank's parts of their parameters and state."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ...base.errors import ConfigurationError, StateError
from ..schedule.step_schedule import PART_ELEMS
from ..unit.state import FlatState
from ..unit.user_parameter import Place, place_of


def shard_of(param: Tensor) -> Tensor | None:
    """Return this rank's part of a user's parameter; None if the part is empty or not trained."""
    place = place_of(param)
    if place is None or place.is_empty or not place.resting.requires_grad:
        return None
    return place.resting


def optimizer_of_each(optimizers: Sequence[torch.optim.Optimizer], names: Mapping[Tensor, str]) -> dict[str, int]:
    """Map the name of each parameter to the number of its optimizer. Refuse parameters that are not the model's."""
    found: dict[str, int] = {}
    for number, optimizer in enumerate(optimizers):
        groups = [group["params"] for group in optimizer.param_groups]
        for at, index, param in [(at, *each) for at, params in enumerate(groups) for each in enumerate(params)]:
            if param not in names:
                what = f"parameter {index} of the optimizer's group {at} (shape {tuple(param.shape)})"
                fix = "build the optimizer on model.parameters() after the model was moved or changed for the last time"
                raise ConfigurationError(f"{what} is not a parameter of the model: {fix}")
            name = names[param]
            if found.setdefault(name, number) != number:
                raise ConfigurationError(
                    f"parameter {name!r} is in two optimizers, {found[name]} and {number} of the list "
                    f"({type(optimizers[found[name]]).__name__} and {type(optimizer).__name__}): give it to one"
                )
    return found


def check_new_params(
    optimizer: torch.optim.Optimizer, params: list[Tensor], own: list[FlatState], others: list[FlatState]
) -> tuple[list[str], str]:
    """Return names of parameters that the user adds to the groups, and why they cannot be added (empty: they can)."""
    held = {param for known in optimizer.param_groups for param in known["params"]}
    names: list[str] = []
    for number, param in enumerate(params):
        place = place_of(param)
        if place is None or place.state not in others:
            shape = tuple(param.shape)
            return names, f"parameter {number} (shape {shape}) is not a parameter of the sharded model: give it those"
        names.append(place.name)
        if not place.state.flat.trainable:
            return names, f"{place.name!r} was frozen when the model was sharded: freeze it after sw.shard instead"
        if place.state not in own:
            other = place.state.flat.optimizer
            return names, f"the gradient of {place.name!r} goes to optimizer {other} of the list: add it there"
        if param in held:
            return names, f"{place.name!r} is in a group already"
    return names, ""


def shard_groups(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """This rank's parts of the parameters of each group."""
    return [
        [shard for param in group["params"] if (shard := shard_of(param)) is not None]
        for group in optimizer.param_groups
    ]


class NoPartError(StateError, KeyError):
    """This rank has no part of the parameter. Also a KeyError, which mappings raise for a missing key."""

    __str__ = Exception.__str__


def _own_key(key: Any) -> Any:
    """The optimizer's own key for a key of the user's; None if this rank has no part of that parameter."""
    return shard_of(key) if isinstance(key, Tensor) and place_of(key) is not None else key


class UserState(MutableMapping[Any, Any]):
    """The optimizer's state with the user's parameters as keys: the value is the state of this rank's part. Other keys
    are the optimizer's own.

    `was_changed` is called with a part whose state was set or deleted.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, was_changed: Callable[[Tensor], None]) -> None:
        self._optimizer = optimizer
        self._was_changed = was_changed

    def __iter__(self) -> Iterator[Any]:
        users = [param for group in self._optimizer.param_groups for param in group["params"]]
        user_of = {shard: user for user in users if (shard := shard_of(user)) is not None}
        return iter([user_of.get(key, key) for key in list(self._optimizer.state)])

    def __len__(self) -> int:
        return len(self._optimizer.state)

    def __getitem__(self, key: Any) -> Any:
        """Return a parameter's state; it is empty if there is none yet, as in torch."""
        own = _own_key(key)
        if own is None:
            raise NoPartError(f"{key!r}: this rank has no part of it, so no state; sw.save writes it")
        return self._optimizer.state[own]

    def __setitem__(self, key: Any, value: Any) -> None:
        own = _own_key(key)
        if own is not None:
            self._optimizer.state[own] = value
            if own is not key:
                self._was_changed(own)

    def __delitem__(self, key: Any) -> None:
        own = _own_key(key)
        if own is not None:
            del self._optimizer.state[own]
            if own is not key:
                self._was_changed(own)

    def clear(self) -> None:
        for key in list(self):  # the inherited one would search for a first key again and again
            del self[key]


def cut_state(optimizer: torch.optim.Optimizer, places: Iterable[tuple[nn.Parameter, Place]]) -> None:
    """Cut the state that existed before `sw.shard` (made by the constructor, or loaded) like its parameters."""
    for original, place in places:
        state, resting = optimizer.state.pop(original, None), place.resting
        if state is None or not resting.requires_grad or not resting.numel():
            continue
        for key, value in state.items():
            # Other values, such as counters, are not cut: every rank keeps them.
            if isinstance(value, Tensor) and value.shape == place.shape and key != "step":
                part = place.state.part_of(place.index, value).view(resting.shape)
                dtype = resting.dtype if value.is_floating_point() else value.dtype
                state[key] = part.to(resting.device, dtype, copy=True)
        optimizer.state[resting] = state


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return any((*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))


def plain(group: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a group that are plain numbers. A tensor is left out: the update reads it."""
    return {key: value for key, value in group.items() if isinstance(value, (bool, int, float, tuple))}


def plain_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [plain(group) for group in optimizer.param_groups]


def settings_number(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """A hash of all plain settings: above zero, and so small that a sum over ranks fits into 32 bits."""
    return 1 + zlib.crc32(repr([plain_settings(optimizer) for optimizer in optimizers]).encode()) % (1 << 15)


class Part(NamedTuple):
    """Flats that are updated together, and this rank's parts of their parameters, group by group."""

    states: list[FlatState]
    groups: list[list[Tensor]]


def cut_into_parts(optimizer: torch.optim.Optimizer, units: Iterable[list[FlatState]], at_once: bool) -> list[Part]:
    """Join neighbouring units into parts of at least `PART_ELEMS`, without the flats that the host updates.

    `at_once` makes one part of everything: for optimizers that may keep more than the state of each parameter, such as
    a counter of their steps, and for step hooks, which expect to run once a step.
    """
    parts: list[list[FlatState]] = [[]]
    for states in units:
        if not at_once and sum(state.master.numel() for state in parts[-1]) >= PART_ELEMS:
            parts.append([])
        parts[-1] += [state for state in states if at_once or not state.flat.host_updates]
    groups, found = shard_groups(optimizer), []
    for states in filter(None, parts):
        held = {param for state in states for param in state.resting_params}
        found.append(Part(states, [[shard for shard in shards if shard in held] for shards in groups]))
    return found
