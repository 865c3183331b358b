"""A unit as its module sees it: which parameters are registered when."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from .state import FlatState


class Unit:
    """The flats of one module and the places where its parameters are registered."""

    def __init__(
        self, index: int, name: str, module: nn.Module, states: list[FlatState], modules: dict[str, nn.Module]
    ):
        self.index = index
        self.name = name
        self.module = module
        self.states = states
        self.trainable_states = [state for state in states if state.flat.trainable]
        # Whether some of its modules put their gradients into open places themselves.
        self.writes_directly = False
        self._compute_params = tuple(param for state in states for param in state.compute_params)
        self._show_compute: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        self._show_resting: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        for state in states:
            for spec, compute, resting in zip(
                state.flat.params, state.compute_params, state.resting_params, strict=True
            ):
                for site in spec.sites:
                    registered = modules[site.module]._parameters
                    self._show_compute.append((registered, site.attribute, compute))
                    self._show_resting.append((registered, site.attribute, resting))

    def show_compute(self) -> None:
        for registered, attribute, param in self._show_compute:
            registered[attribute] = param

    def show_resting(self) -> None:
        for registered, attribute, param in self._show_resting:
            registered[attribute] = param

    def stamp(self, version: int) -> None:
        """Set the version of the compute parameters; autograd refuses to use those of another version than it saved.

        So a backward that comes to a unit whose memory has another unit's weights, or newer ones, cannot go wrong.
        """
        torch._C._autograd._unsafe_set_version_counter(self._compute_params, (version,) * len(self._compute_params))

    def was_written(self, version: int) -> bool:
        """Whether a forward changed its own compute parameters where the change would be lost."""
        changed = [state for state in self.states for param in state.compute_params if param._version != version]
        return bool([state for state in changed if not state.flat.master_is_whole])

    def is_registered_in(self, registered: set[int]) -> bool:
        """Whether one of the modules with these parameter dicts holds a parameter of this unit."""
        return any(id(entry[0]) in registered for entry in self._show_compute)

    def show(self, instead: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Register other parameters in the place of resting ones."""
        for registered, attribute, resting in self._show_resting:
            if resting in instead:
                registered[attribute] = instead[resting]

    def registered(self) -> Iterator[tuple[nn.Parameter, nn.Parameter | None]]:
        """What the modules show at present, each beside the resting parameter of that place."""
        for registered, attribute, resting in self._show_resting:
            yield resting, registered.get(attribute)
