"""Updates of master weights on the host, by a thread, while the device computes."""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.profiler import record_function

from ...base.errors import ShardwiseError, StateError
from ..optim.host_updates import FlatUpdate
from ..unit.state import FlatState, Unit
from .streams import Mark, PendingHostCopy, host_waits_for

# The number of host jobs whose state is read ahead, if there is room: with one, a short job would leave the disk idle.
NUM_AHEAD = 2


@dataclass(slots=True, eq=False)
class HostJob:
    """The update of one flat on the host. Jobs of smaller `urgency` run first."""

    urgency: int
    update: FlatUpdate
    arrived: Mark  # the point after which the gradient is on the host
    clip: PendingHostCopy | None  # the factor of gradient clipping
    done: threading.Event = field(default_factory=threading.Event)


class HostJobs:
    """Updates on the host. A thread always runs the most urgent job that is ready, and ends when no job is left.

    Three things wait for the update of a flat: its next gather, a read of its masters, and its next gradient, which
    overwrites the last one. Jobs release the GIL while they run, so that the thread which queues work for the device
    can continue. A failure is stored and raised for every caller that waits for a job or adds one, because the state is
    only partly updated.
    """

    def __init__(self, units: list[Unit]) -> None:
        self._units = units
        self._jobs: dict[FlatState, HostJob] = {}
        self._lock = threading.Lock()
        self._waiting: list[HostJob] = []
        self._has_thread = False
        self._error: BaseException | None = None

    def give(
        self, updates: Iterable[FlatUpdate], position_of: Mapping[int, int], arrived: Mapping[FlatState, Mark]
    ) -> None:
        """Queue updates, each to run when its gradient has `arrived`. Units that come first in the forward are updated
        first. Later changes of the clipping factors have no effect."""
        self.raise_failure()
        urgency = {state: position_of[unit.index] for unit in self._units for state in unit.trainable_states}
        copies: dict[Tensor, PendingHostCopy] = {}
        for update in sorted(updates, key=lambda update: urgency[update.state]):
            state, factor = update.state, update.state.gradient.clipped_by
            if factor is not None and factor not in copies:
                copies[factor] = PendingHostCopy(factor)
            clip = None if factor is None else copies[factor]
            job = HostJob(urgency[state], update, arrived.get(state), clip)
            with self._lock:
                if not self._has_thread:
                    # It waits for the lock. If it cannot be started, nobody must wait for its job.
                    threading.Thread(target=self._work, name="shardwise host updates", daemon=True).start()
                    self._has_thread = True
                self._waiting.append(job)
                self._jobs[state] = job

    def _work(self) -> None:
        while True:
            with self._lock:
                self._has_thread = bool(self._waiting)
                if not self._waiting:
                    return
                try:
                    job = _first_of(self._waiting)
                except RuntimeError as error:  # the device has failed, so that its events cannot be queried
                    self._error, job = error, self._waiting[0]
                self._waiting.remove(job)
            try:
                if self._error is None:
                    with record_function(f"shardwise::host update {job.update.state.unit_name}"):
                        host_waits_for(job.arrived)
                        job.update.run(1.0 if job.clip is None else job.clip.read()[0], self._read_ahead)
            except BaseException as error:  # noqa: BLE001  raised for everyone who waits
                self._error = error
            job.done.set()

    def _read_ahead(self) -> None:
        with self._lock:
            left = list(self._waiting)
        for _ in range(min(NUM_AHEAD, len(left))):
            job = _first_of(left)
            job.update.ask()
            left.remove(job)

    def raise_failure(self) -> None:
        if isinstance(self._error, ShardwiseError):
            raise type(self._error)(*self._error.args) from self._error
        if self._error is not None:
            raise StateError(f"an update on the host failed: {self._error}") from self._error

    def is_updated(self, unit: Unit) -> bool:
        return all(self._jobs[state].done.is_set() for state in unit.trainable_states if state in self._jobs)

    def await_update_of(self, state: FlatState) -> None:
        job = self._jobs.pop(state, None)
        if job is not None:
            job.done.wait()
            self.raise_failure()

    def finish_all(self) -> None:
        for job in self._jobs.values():
            job.done.wait()
        self.raise_failure()
        self._jobs.clear()


def _first_of(jobs: list[HostJob]) -> HostJob:
    """The most urgent job that is ready; if none is, the oldest, which will be ready first."""
    ready = [job for job in jobs if job.arrived is None or job.arrived.query()]
    return min(ready, key=lambda job: job.urgency) if ready else jobs[0]
