"""Updates of master weights on the host, by a thread, while the device computes.

An update that waits for the factor of gradient clipping may run ahead of it, into spare memory, as if nothing will be
clipped. It may even begin during the backward, before optimizer.step() asks for it. If the factor is 1 and the step
asks for the same update, the results take the place of the old state. Otherwise the update runs again, as usual.
"""

import threading
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from torch import Tensor
from torch.profiler import record_function

from ...base.errors import ShardwiseError, StateError
from ..offload.host_memory import HostMemory, Spare
from ..optim.host_updates import FlatUpdate
from ..unit.state import FlatState, Unit
from .streams import Mark, PendingHostCopy, has_passed, host_waits_for

# Updates do not run ahead if more than half of this number of last steps were clipped, nor for as many steps after an
# update was dropped for another reason: the work would be wasted.
NUM_RECENT = 8
# The number of host jobs whose state is read ahead, if there is room: with one, a short job would leave the disk idle.
NUM_AHEAD = 2
_URGENCY = attrgetter("urgency")


@dataclass(slots=True, eq=False)
class HostJob:
    """The update of one flat on the host. Jobs of smaller `urgency` run first."""

    urgency: int
    update: FlatUpdate
    arrived: Mark  # the point after which the gradient is on the host
    clip: PendingHostCopy | None = None  # the factor of gradient clipping
    is_given: bool = True  # False until optimizer.step() asks for it
    spare: Spare | None = None  # memory to run ahead, and whether it has the results
    has_results: bool = False
    is_running: bool = False
    is_done: bool = False

    @property
    def is_decided(self) -> bool:
        """True if it may change the state: a step asked for it, its factor is known, no gather reads old weights."""
        is_known = self.is_given and (self.clip is None or self.clip.is_here)
        return is_known and has_passed(self.update.state.read_on_host)

    def wait(self) -> None:
        """Wait for the next event that it needs."""
        if not has_passed(self.arrived):
            host_waits_for(self.arrived)
        elif self.clip is not None and not self.clip.is_here:
            self.clip.wait()
        else:
            host_waits_for(self.update.state.read_on_host)


class HostJobs:
    """Updates on the host. A thread always runs the most urgent job that is ready, and ends when no job is left.

    Three things wait for the update of a flat: its next gather, a read of its masters, and its next gradient, which
    overwrites the last one. If optimizer.step() has not asked for the update yet, the last two drop it instead. The
    update itself waits for earlier gathers: after a forward between backward and step, their copies to the device may
    still read the old weights. Jobs release the GIL while they run, so that the thread which queues work for the device
    can continue. A failure is stored and raised for every caller that waits for a job or adds one, because the state is
    only partly updated.
    """

    def __init__(self, units: list[Unit], host: HostMemory) -> None:
        self._units = units
        self._host = host
        self._jobs: dict[FlatState, HostJob] = {}
        self._ahead: dict[FlatState, HostJob] = {}  # those that no step has asked for yet
        self._changed = threading.Condition()
        self._waiting: list[HostJob] = []  # the most urgent first
        self._has_thread = False
        self._error: BaseException | None = None
        # Flats that were updated ahead of the clipping factor: "accepted", and "dropped" for any reason.
        self.num_ahead: Counter[str] = Counter()
        self._recent: deque[PendingHostCopy] = deque(maxlen=NUM_RECENT)  # factors of the last steps
        self._num_paused = 0

    def _urgency(self, position_of: Mapping[int, int]) -> dict[FlatState, int]:
        return {state: position_of[unit.index] for unit in self._units for state in unit.trainable_states}

    @property
    def runs_ahead(self) -> bool:
        """True if there is spare memory, and the last steps suggest that results ahead of the step will be used."""
        factors = [factor.read()[0] for factor in self._recent if factor.is_here]
        num_clipped = sum(factor != 1.0 for factor in factors)
        return self._host.spare_bytes > 0 and not self._num_paused and 2 * num_clipped <= len(factors)

    def run_ahead(
        self, updates: Iterable[FlatUpdate], position_of: Mapping[int, int], arrived: Mapping[FlatState, Mark]
    ) -> None:
        """Queue updates that optimizer.step() will probably ask for, as far as there is spare memory."""
        self.raise_failure()
        urgency = self._urgency(position_of)
        for update in updates:
            self.drop(update.state)
            spare = self._take_spare(update)
            if spare is not None:
                state = update.state
                job = HostJob(urgency[state], update, arrived.get(state), is_given=False, spare=spare)
                with self._changed:
                    self._add(job)
                    self._ahead[state] = job

    def give(
        self, updates: Iterable[FlatUpdate], position_of: Mapping[int, int], arrived: Mapping[FlatState, Mark]
    ) -> None:
        """Queue updates, each to run when its gradient has `arrived`. Units that come first in the forward are updated
        first. Later changes of the clipping factors have no effect."""
        self.raise_failure()
        urgency, runs_ahead = self._urgency(position_of), self.runs_ahead
        self._num_paused = max(self._num_paused - 1, 0)
        copies: dict[Tensor, PendingHostCopy] = {}
        for update in sorted(updates, key=lambda update: urgency[update.state]):
            state, factor = update.state, update.state.gradient.clipped_by
            if factor is not None and factor not in copies:
                copies[factor] = PendingHostCopy(factor)
            clip = None if factor is None else copies[factor]
            ahead = self._ahead.get(state)
            if ahead is not None and ahead.update.facts != update.facts:
                self.drop(state)
                ahead = None
            with self._changed:
                if ahead is None:
                    job = HostJob(urgency[state], update, arrived.get(state), clip)
                    if runs_ahead and clip is not None and not clip.is_here:
                        job.spare = self._take_spare(update)
                else:
                    job = self._ahead.pop(state)
                    job.clip, job.is_given = clip, True
                if job not in self._waiting and not job.is_running:
                    self._add(job)
                self._jobs[state] = job
        self._recent.extend(copies.values())

    def _take_spare(self, update: FlatUpdate) -> Spare | None:
        return self._host.take_spare(update.state.flat) if update.may_run_ahead else None

    def _release(self, job: HostJob) -> None:
        if job.spare is not None:
            self._host.give_back_spare(job.update.state.flat, job.spare)
            job.spare = None

    def _add(self, job: HostJob) -> None:
        if not self._has_thread:
            # It waits for the lock. If it cannot be started, nobody must wait for its job.
            threading.Thread(target=self._work, name="shardwise host updates", daemon=True).start()
            self._has_thread = True
        insort(self._waiting, job, key=_URGENCY)

    def _work(self) -> None:
        job: HostJob | None = None
        while True:
            try:
                with self._changed:
                    job = self._next()
                    if job is None:
                        return
                if job.is_running:
                    self._run(job)
                else:
                    job.wait()
            except BaseException as error:  # noqa: BLE001  raised for everyone who waits
                with self._changed:
                    self._error = error
                    if job is not None:
                        job.is_running, job.is_done = False, True
                    self._changed.notify_all()

    def _next(self) -> HostJob | None:
        """Take the most urgent job that is ready; if none is, return one to wait for. None ends the thread."""
        if self._error is not None:
            for job in self._waiting:
                job.is_done = True
            self._waiting.clear()
            self._changed.notify_all()
        self._has_thread = bool(self._waiting)
        if not self._waiting:
            return None
        chosen: HostJob | None = None
        for job in self._waiting:
            if has_passed(job.arrived):
                if job.is_decided:
                    chosen = job
                    break
                if chosen is None and job.spare is not None and not job.has_results:
                    chosen = job  # it can run ahead of its factor
        if chosen is None:
            # Gradients arrive in the reverse order of the forward, and before the factor.
            return max(self._waiting, key=lambda job: (not has_passed(job.arrived), job.is_given, job.urgency))
        self._waiting.remove(chosen)
        chosen.is_running = True
        return chosen

    def _run(self, job: HostJob) -> None:
        update, spare = job.update, job.spare
        is_decided = job.is_decided
        with record_function(f"shardwise::host update {update.state.unit_name}"):
            if not is_decided and spare is not None:
                update.run(1.0, self._read_ahead, spare)
            else:
                factor = 1.0 if job.clip is None else job.clip.read()[0]
                if spare is not None and job.has_results and factor == 1.0:
                    update.accept(spare)
                    self.num_ahead["accepted"] += 1
                else:
                    update.run(factor, self._read_ahead)
                    self.num_ahead["dropped"] += job.has_results
        with self._changed:
            job.is_running = False
            if is_decided:
                self._release(job)
                job.is_done = True
            else:
                job.has_results = True
                if job.is_given:
                    insort(self._waiting, job, key=_URGENCY)
            self._changed.notify_all()

    def _read_ahead(self) -> None:
        """Read state for the next jobs. One that may be dropped, or has its results, would not take what was read."""
        if self._host.disk is None:
            return
        with self._changed:
            takers = (job for job in self._waiting if job.is_given and not job.has_results and has_passed(job.arrived))
            following = list(islice(takers, NUM_AHEAD))
        for job in following:
            job.update.ask()

    def raise_failure(self) -> None:
        if isinstance(self._error, ShardwiseError):
            raise type(self._error)(*self._error.args) from self._error
        if self._error is not None:
            raise StateError(f"an update on the host failed: {self._error}") from self._error

    def is_updated(self, unit: Unit) -> bool:
        return not [state for state in unit.trainable_states if state in self._jobs and not self._jobs[state].is_done]

    def drop(self, state: FlatState) -> None:
        """Forget an update that optimizer.step() has not asked for."""
        job = self._ahead.pop(state, None)
        if job is None:
            return
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
            while job.is_running:
                self._changed.wait()
            self.num_ahead["dropped"] += job.has_results
            self._num_paused = NUM_RECENT
            self._release(job)

    def await_update_of(self, state: FlatState) -> None:
        self.drop(state)
        self.await_last_step_of(state)

    def await_last_step_of(self, state: FlatState) -> None:
        job = self._jobs.pop(state, None)
        if job is not None:
            self._await(job)

    def _await(self, job: HostJob) -> None:
        if not job.is_done:
            with self._changed:
                self._changed.wait_for(lambda: job.is_done)
        self.raise_failure()

    def finish_all(self) -> None:
        for state in list(self._ahead):
            self.drop(state)
        for job in self._jobs.values():
            self._await(job)
        self.raise_failure()
        self._jobs.clear()
