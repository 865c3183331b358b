"""A thread for updates on the host while the device computes: of the jobs that are ready, it runs the most urgent.

Jobs release the GIL while they run, so that the thread which queues work for the device can continue. A failure is
stored and raised for every caller that waits for a job or adds one, because the state is only partly updated.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from torch.profiler import record_function

from ...base.errors import ShardwiseError, StateError

# The number of jobs whose state is read ahead, if there is room: with one, a short job would leave the disk idle.
NUM_AHEAD = 2


@dataclass(slots=True, eq=False)
class Job:
    """`run` gets a function that starts to read ahead for the next jobs."""

    urgency: int
    name: str
    run: Callable[[Callable[[], None]], None]
    ask: Callable[[], None] = lambda: None  # starts to read its state ahead
    is_ready: Callable[[], bool] = lambda: True  # its gradient has arrived
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def is_done(self) -> bool:
        return self.done.is_set()


class HostLane:
    def __init__(self) -> None:
        self._waiting: list[Job] = []
        self._running: Job | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_over = False

    def give(self, job: Job) -> Job:
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
                while not self._waiting:
                    if self._is_over:
                        return
                    self._changed.wait()
                self._running = job = _first_of(self._waiting)
                self._waiting.remove(job)
            try:
                if self._error is None:
                    with record_function(f"shardwise::{job.name}"):
                        job.run(self._ask_ahead)
            except BaseException as error:  # noqa: BLE001  raised for everyone who waits
                self._error = error
            with self._changed:
                self._running = None
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
            job.ask()
            left.remove(job)

    def wait_for(self, job: Job | None) -> None:
        if job is not None:
            job.done.wait()
            self.raise_failure()

    def drain(self) -> None:
        """Wait for all jobs."""
        with self._changed:
            left = [*self._waiting, *([self._running] if self._running is not None else [])]
        for job in left:
            job.done.wait()
        self.raise_failure()

    def raise_failure(self) -> None:
        if self._error is None:
            return
        if isinstance(self._error, ShardwiseError):
            raise type(self._error)(*self._error.args) from self._error
        raise StateError(f"an update on the host failed: {self._error}") from self._error


def _first_of(jobs: list[Job]) -> Job:
    """The most urgent job that is ready; if none is, the oldest, which will be ready first."""
    ready = [job for job in jobs if job.is_ready()]
    return min(ready, key=lambda job: job.urgency) if ready else jobs[0]
