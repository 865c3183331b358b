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
        # Where each parameter is registered, and the two objects that the place may show: when it computes, and else.
        self._sites: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]] = []
        for state in states:
            for spec, compute, user in zip(state.flat.params, state.compute_params, state.user_params, strict=True):
                for site in spec.sites:
                    registered = modules[site.module]._parameters
                    registered[site.attribute] = user
                    self._sites.append((registered, site.attribute, compute, user))

    def show_compute(self) -> None:
        """What somebody else has put there for a while (`torch.func.functional_call`) stays."""
        for registered, attribute, compute, user in self._sites:
            if registered[attribute] is user:
                registered[attribute] = compute

    def show_resting(self) -> None:
        for registered, attribute, compute, user in self._sites:
            if registered[attribute] is compute:
                registered[attribute] = user

    def replaced(self) -> str | None:
        """The name of a parameter in whose place another one is registered, or none."""
        for registered, attribute, compute, user in self._sites:
            current = registered.get(attribute)
            if current is not user and current is not compute:
                return attribute
        return None

    def stamp(self, version: int) -> None:
        """Set the version of the compute parameters; autograd refuses to use those of another version than it saved.

        So a backward that comes to a unit whose memory has another unit's weights, or newer ones, cannot go wrong.
        """
        torch._C._autograd._unsafe_set_version_counter(self._compute_params, (version,) * len(self._compute_params))

    def was_written(self, version: int) -> bool:
        """Whether a forward changed its own compute parameters, where that is lost or other ranks do not know."""
        changed = [state for state in self.states for param in state.compute_params if param._version != version]
        return bool([state for state in changed if not state.flat.master_is_whole or state.flat.num_ranks > 1])

    def is_registered_in(self, registered: set[int]) -> bool:
        """Whether one of the modules with these parameter dicts holds a parameter of this unit."""
        return any(id(site[0]) in registered for site in self._sites)

    def show(self, instead: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Register other parameters in the place of the user's."""
        for registered, attribute, _, user in self._sites:
            if user in instead:
                registered[attribute] = instead[user]

    def take_back(self) -> Iterator[tuple[nn.Parameter, nn.Parameter | None]]:
        """Show the user's parameters again; gives what was registered in the place of each."""
        for registered, attribute, _, user in self._sites:
            yield user, registered.get(attribute)
            registered[attribute] = user
