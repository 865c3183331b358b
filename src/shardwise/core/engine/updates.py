"""Updates of master weights: on the device, on a lane of their own, and on the host, by a thread."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ...base.errors import StateError
from ..offload.host_lane import HostLane, Job
from ..optim.host_updates import FlatUpdate
from ..unit.state import FlatState, Unit
from .reductions import Reductions
from .streams import Lane, Mark, PendingHostCopy, has_passed, host_waits_for


class Updates:
    """The lane on which the optimizer updates masters on the device, perhaps already during the backward."""

    def __init__(self, reductions: Reductions, device: torch.device) -> None:
        self._reductions = reductions
        self.lane = Lane(device)
        # With early updates: the point where this step's forward began; True if weights have changed since.
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
        """Return the lane of updates, behind the reductions of `states`; others may still be in flight. Unless the
        update is early, it also comes behind all work of the compute stream so far, which may read weights."""
        lane = self.lane.after(self._forward_began) if early else self.lane.after_compute()
        for state in states:
            lane.after(self._reductions.reduced_at(state))
        return lane

    def wait(self) -> None:
        """Let the computation wait for reductions and updates in flight."""
        self.lane.join()
        self._reductions.wait()

    def close_step(self) -> None:
        self.wait()
        self._awaits_step = False


class HostJobs:
    """Updates that a thread of the host runs while the device computes.

    Three things wait for the update of a flat: its next gather, a read of its masters, and its next gradient, which
    overwrites the last one.
    """

    def __init__(self, units: list[Unit]) -> None:
        self._units = units
        self._lane = HostLane()
        weakref.finalize(self, self._lane.end)
        self._jobs: dict[FlatState, Job] = {}
        # The clipping factors of this step, on their way to the host.
        self._clips: dict[Tensor, PendingHostCopy] = {}

    def give(self, updates: Iterable[FlatUpdate], order: Sequence[int], arrived: Mapping[FlatState, Mark]) -> None:
        """Queue updates, each to run when its gradient has `arrived`. Units that come first in `order`, the forward's,
        are updated first. Later changes of the clipping factors have no effect."""
        position_of = {unit: position for position, unit in enumerate(order)}
        urgency = {state: position_of[unit.index] for unit in self._units for state in unit.trainable_states}
        for update in sorted(updates, key=lambda update: urgency[update.state]):
            state, clipped_by = update.state, update.state.gradient.clipped_by
            clip = None
            if clipped_by is not None:
                clip = self._clips.get(clipped_by) or PendingHostCopy(clipped_by)
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


def _run_update(update: FlatUpdate, arrived: Mark, clip: PendingHostCopy | None, ask_ahead: Callable[[], None]) -> None:
    host_waits_for(arrived)
    factor = 1.0 if clip is None else clip.read()[0]
    update.run(factor, ask_ahead)
