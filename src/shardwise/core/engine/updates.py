"""Updates of master weights on the host, by a thread, while the device computes."""

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.profiler import record_function

from ...base.errors import ShardwiseError, StateError
from ..optim.host_updates import FlatUpdate
from ..unit.state import FlatState, Unit
from .streams import Mark, PendingHostCopy, has_passed, host_waits_for

# The number of host jobs whose state is read ahead, if there is room: with one, a short job would leave the disk idle.
NUM_AHEAD = 2


@dataclass(slots=True, eq=False)
class HostJob:
    """The update of one flat on the host. Jobs of smaller `urgency` run first."""

    urgency: int
    update: FlatUpdate
    arrived: Mark  # the gradient has
    clip: PendingHostCopy | None
    done: threading.Event = field(default_factory=threading.Event)

    def run(self, ask_ahead: Callable[[], None]) -> None:
        with record_function(f"shardwise::host update {self.update.state.unit_name}"):
            host_waits_for(self.arrived)
            self.update.run(1.0 if self.clip is None else self.clip.read()[0], ask_ahead)


class HostLane:
    """A thread for updates on the host while the device computes: of the jobs that are ready, it runs the most urgent.

    Jobs release the GIL while they run, so that the thread which queues work for the device can continue. A failure is
    stored and raised for every caller that waits for a job or adds one, because the state is only partly updated.
    """

    def __init__(self) -> None:
        self._waiting: list[HostJob] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_over = False

    def give(self, job: HostJob) -> HostJob:
        self.raise_failure()
        with self._changed:
            self._waiting.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="shardwise host updates", daemon=True)
                self._thread.start()
            self._changed.notify()
        return job

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_over)
                if not self._waiting:
                    return
                job = _first_of(self._waiting)
                self._waiting.remove(job)
            try:
                if self._error is None:
                    job.run(self._ask_ahead)
            except BaseException as error:  # noqa: BLE001  raised for everyone who waits
                self._error = error
            job.done.set()
            # A job holds host memory: do not keep it until the next one comes.
            del job

    def end(self) -> None:
        """Let the thread end after the last job; no more jobs will come."""
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def _ask_ahead(self) -> None:
        with self._changed:
            left = list(self._waiting)
        for _ in range(min(NUM_AHEAD, len(left))):
            job = _first_of(left)
            job.update.ask()
            left.remove(job)

    def raise_failure(self) -> None:
        if self._error is None:
            return
        if isinstance(self._error, ShardwiseError):
            raise type(self._error)(*self._error.args) from self._error
        raise StateError(f"an update on the host failed: {self._error}") from self._error


def _first_of(jobs: list[HostJob]) -> HostJob:
    """The most urgent job that is ready; if none is, the oldest, which will be ready first."""
    ready = [job for job in jobs if has_passed(job.arrived)]
    return min(ready, key=lambda job: job.urgency) if ready else jobs[0]


class HostJobs:
    """Three things wait for the update of a flat: its next gather, a read of its masters, and its next gradient, which
    overwrites the last one."""

    def __init__(self, units: list[Unit]) -> None:
        self._units = units
        self._lane = HostLane()
        weakref.finalize(self, self._lane.end)
        self._jobs: dict[FlatState, HostJob] = {}
        # The clipping factors of this step, on their way to the host.
        self._clips: dict[Tensor, PendingHostCopy] = {}
        self.raise_failure = self._lane.raise_failure

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
            self._jobs[state] = self._lane.give(HostJob(urgency[state], update, arrived.get(state), clip))

    def is_updated(self, unit: Unit) -> bool:
        if not self._jobs:
            return True
        jobs = [self._jobs.get(state) for state in unit.trainable_states]
        return all(job is None or job.done.is_set() for job in jobs)

    def await_updates(self, unit: Unit) -> None:
        for state in unit.trainable_states if self._jobs else ():
            self.await_update_of(state)

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

    def close_step(self) -> None:
        self._clips.clear()
