"""The engine as one of its optimizers sees it: the flats that are its own, and the units that its steps change."""

from collections.abc import Iterable

import torch

from ..optim.host_updates import FlatUpdate
from ..unit.state import FlatState
from .runtime import Engine
from .streams import Lane


class OwnFlats:
    """A step makes forwards invalid that its weights were read by, and those alone: a generator's may still lead to a
    backward after the discriminator's step."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.owner = engine
        self.trainable_states = [state for state in engine.trainable_states if state.flat.optimizer == number]
        own = set(self.trainable_states)
        self._changed = [
            unit.index
            for unit in engine.units
            if not unit.trainable_states or not own.isdisjoint(unit.trainable_states)
        ]
        self._own = own
        self._order_of: list[list[FlatState]] | None = None
        self._order: list[list[FlatState]] = []

    @property
    def device(self) -> torch.device:
        return self.owner.mesh.device

    @property
    def all_states(self) -> list[FlatState]:
        """Others', and frozen ones, too."""
        return [state for unit in self.owner.units for state in unit.states]

    @property
    def update_order(self) -> list[list[FlatState]]:
        if self._order_of is not self.owner.update_order:
            self._order_of = self.owner.update_order
            self._order = [[state for state in states if state in self._own] for states in self._order_of]
        return self._order

    def begin_step(self) -> None:
        self.owner.begin_step()

    def finish_gradients(self) -> None:
        self.owner.finish_gradients(self._own)

    def await_gradients(self) -> None:
        self.owner.await_gradients()

    def await_update_of(self, state: FlatState) -> None:
        self.owner.await_update_of(state)

    def await_host_of(self, state: FlatState) -> None:
        self.owner.await_host_of(state)

    def update_on_host(self, updates: Iterable[FlatUpdate]) -> None:
        self.owner.update_on_host(updates)

    def updating(self, states: list[FlatState], early: bool) -> Lane:
        return self.owner.updating(states, early)

    def forget_gradients(self, set_to_none: bool) -> None:
        self.owner.forget_gradients(self.trainable_states, set_to_none)

    def was_updated(self) -> None:
        self.owner.gathers.was_updated(self._changed)

    def close_step(self, updated: bool) -> None:
        self.owner.close_step(updated, self._changed)
