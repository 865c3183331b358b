"""The groups of the user's optimizer: checked against the model, and filled with this rank's parts."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigurationError
from ..unit.state import FlatState


def require_own_parameters(optimizer: torch.optim.Optimizer, params: Container[Tensor]) -> None:
    """Refuse an optimizer that was built on something else than the model."""
    for group_index, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            if param not in params:
                raise ConfigurationError(
                    f"parameter {index} of the optimizer's group {group_index} (shape {tuple(param.shape)}) is not a "
                    "parameter of the model: build the optimizer on model.parameters() of the model given to sw.shard, "
                    "after it was moved or changed for the last time"
                )


def optimizer_of_each(optimizers: Sequence[torch.optim.Optimizer], names: Mapping[Tensor, str]) -> dict[str, int]:
    """The number of the optimizer that has a parameter, by its name."""
    found: dict[str, int] = {}
    for number, optimizer in enumerate(optimizers):
        require_own_parameters(optimizer, names)
        for name in [names[param] for group in optimizer.param_groups for param in group["params"]]:
            if found.setdefault(name, number) != number:
                raise ConfigurationError(
                    f"parameter {name!r} is in two optimizers, {found[name]} and {number} of the list "
                    f"({type(optimizers[found[name]]).__name__} and {type(optimizer).__name__}): give it to one"
                )
    return found


def as_list(params: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [params] if isinstance(params, Tensor) else list(params)


def names_of_joining(
    optimizer: torch.optim.Optimizer, params: Tensor | Iterable[Tensor], own: list[FlatState], others: list[FlatState]
) -> tuple[list[str], str]:
    """Names of resting parameters that are to join the groups, and why they cannot."""
    places: dict[Tensor, tuple[FlatState, int]] = {
        param: (state, index) for state in others for index, param in enumerate(state.resting_params)
    }
    held = {param for known in optimizer.param_groups for param in known["params"]}
    names: list[str] = []
    for number, param in enumerate(as_list(params)):
        if param not in places:
            return names, (
                f"parameter {number} (shape {tuple(param.shape)}) is not a parameter of the sharded model: give it "
                "those of model.parameters()"
            )
        state, index = places[param]
        names.append(state.flat.params[index].name)
        if not state.flat.trainable:
            return names, f"{names[-1]!r} was frozen when the model was sharded"
        if state not in own:
            other = state.flat.optimizer
            return names, f"the gradient of {names[-1]!r} goes to optimizer {other} of the list: add it there"
        if param in held:
            return names, f"{names[-1]!r} is in a group already"
    return names, ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter of the model went."""

    state: FlatState
    index: int

    @property
    def resting(self) -> Tensor:
        return self.state.resting_params[self.index]


def put_shards_into_groups(optimizer: torch.optim.Optimizer, place_of: dict[Tensor, Place]) -> None:
    """Replace each parameter of the optimizer's groups by this rank's part of it, where it has one.

    State that is there already (made by the constructor, or loaded) is cut in the same way.
    """
    for group in optimizer.param_groups:
        # In place: some optimizers keep a reference to the list.
        originals = list(group["params"])
        group["params"].clear()
        for original in originals:
            place = place_of[original]
            state = optimizer.state.pop(original, None)
            if place.resting.requires_grad and place.resting.numel():
                group["params"].append(place.resting)
                if state is not None:
                    optimizer.state[place.resting] = {
                        key: _cut(key, value, original, place) for key, value in state.items()
                    }


def _cut(key: str, value: Any, original: Tensor, place: Place) -> Any:
    """What is shaped like the parameter is cut like it; counters and the like are each rank's own."""
    if not isinstance(value, Tensor) or value.shape != original.shape or key == "step":
        return value
    part = place.state.part_of(place.index, value).view(place.resting.shape)
    dtype = place.resting.dtype if value.is_floating_point() else value.dtype
    return part.to(place.resting.device, dtype, copy=True)
