"""The lane on which the optimizer updates masters on the device, perhaps already during the backward."""

from collections.abc import Callable

import torch

from ...base.errors import StateError
from ..unit.state import FlatState
from .reductions import Reductions
from .streams import Lane, Mark


class Updates:
    def __init__(self, reductions: Reductions, device: torch.device) -> None:
        self._reductions = reductions
        self.lane = Lane(device)
        # With early updates: where this step's forward began, and whether weights have changed since.
        self._forward_began: Mark = None
        self._awaits_step = False

    def make_early(self, update: Callable[[list[FlatState]], None]) -> None:
        """Have `update` called with flats as soon as their gradient is final."""

        def on_final(states: list[FlatState]) -> None:
            update(states)
            self._awaits_step = True

        self._reductions.on_final = on_final

    def begin_forward(self) -> None:
        if self._reductions.on_final is not None:
            self._forward_began = self.lane.mark_compute()

    def refuse_after_early(self, what: str) -> None:
        if self._awaits_step:
            raise StateError(
                f"a {what} after a backward that has updated weights (early_update=True) and before optimizer.step(): "
                "call step() first, and run all micro-batches but the last inside `with sw.accumulate(model):`"
            )

    def updating(self, states: list[FlatState], early: bool) -> Lane:
        """Inside, work goes to a lane of its own, behind the reductions of `states`; others may still be on their way.
        Unless it is early, it also comes behind all that the computation has been given, which may read weights."""
        lane = self.lane.after(self._forward_began) if early else self.lane.after_compute()
        for state in states:
            lane.after(self._reductions.reduced_at(state))
        return lane

    def wait(self) -> None:
        """Let the computation wait for reductions and updates under way."""
        self.lane.join()
        self._reductions.wait()

    def close_step(self) -> None:
        self.wait()
        self._awaits_step = False
