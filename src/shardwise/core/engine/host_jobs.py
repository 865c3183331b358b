"""Updates that the host makes beside the computation, and who waits for them.

The next gather of a flat does, whoever reads its masters, and the next gradient that takes the place of the last.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from torch import Tensor

from ..offload.host_lane import HostLane, Job
from ..optim.host_updates import FlatUpdate
from ..unit.state import FlatState
from ..unit.unit import Unit
from .streams import Later, Mark, has_passed, host_waits_for


class HostJobs:
    def __init__(self, units: list[Unit]) -> None:
        self._units = units
        self._lane = HostLane()
        weakref.finalize(self, self._lane.end)
        self._jobs: dict[FlatState, Job] = {}
        # What clips the gradients of this step, on its way to the host.
        self._clips: dict[Tensor, Later] = {}

    def give(self, updates: Iterable[FlatUpdate], order: Sequence[int], arrived: Mapping[FlatState, Mark]) -> None:
        """Update flats when their gradients have `arrived`, those first that the next forward needs first, by the
        `order` of their units. Gradients count as clipped as they are now."""
        position_of = {unit: position for position, unit in enumerate(order)}
        urgency = {state: position_of[unit.index] for unit in self._units for state in unit.trainable_states}
        for update in sorted(updates, key=lambda update: urgency[update.state]):
            state, clipped_by = update.state, update.state.gradient.clipped_by
            clip = None
            if clipped_by is not None:
                clip = self._clips.get(clipped_by) or Later(clipped_by)
                self._clips[clipped_by] = clip
            mark = arrived.get(state)
            run, is_ready = partial(_run_update, update, mark, clip), partial(has_passed, mark)
            name = f"host update {state.unit_name}"
            self._jobs[state] = self._lane.give(Job(urgency[state], name, run, update.ask, is_ready))

    def is_updated(self, unit: Unit) -> bool:
        if not self._jobs:
            return True
        jobs = [self._jobs.get(state) for state in unit.trainable_states]
        return all(job is None or job.is_done for job in jobs)

    def await_updates(self, unit: Unit) -> None:
        for state in unit.trainable_states if self._jobs else ():
            self.await_update_of(state)

    def await_update_of(self, state: FlatState) -> None:
        self._lane.wait_for(self._jobs.pop(state, None))

    def finish_all(self) -> None:
        self._lane.drain()
        self._jobs.clear()

    def raise_failure(self) -> None:
        self._lane.raise_failure()

    def close_step(self) -> None:
        self._clips.clear()


def _run_update(update: FlatUpdate, arrived: Mark, clip: Later | None, ask_ahead: Callable[[], None]) -> None:
    host_waits_for(arrived)
    factor = 1.0 if clip is None else clip.read()[0]
    update.run(factor, ask_ahead)
