"""The lane of the host: work that runs in a thread beside the computation, of what is ready the most urgent first.

Its work releases the interpreter while it runs, so that the thread which feeds the device goes on. A failure is kept:
whoever waits for a job, or gives another one, is told of it, because what the job should have updated is in between.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from torch.profiler import record_function

from ...base.errors import ShardwiseError, StateError

# Jobs that are read ahead for, where there is room: one may be so short that a disk is through with the next too soon.
NUM_AHEAD = 2


@dataclass(slots=True, eq=False)
class Job:
    """`run` is called with what it may call to have read ahead what comes next."""

    urgency: int
    name: str
    run: Callable[[Callable[[], None]], None]
    ask: Callable[[], None] = lambda: None  # read ahead what it needs
    is_ready: Callable[[], bool] = lambda: True  # what it works on has arrived
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
            except BaseException as error:  # noqa: BLE001  told to whoever waits
                self._error = error
            with self._changed:
                self._running = None
            job.done.set()
            # Not held until the next one comes: it holds the host's memory.
            del job

    def end(self) -> None:
        """Nothing more will be given. The thread goes when it is through."""
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
        """Until nothing is left to do."""
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
    """The most urgent that is ready; if none is, what was given first is ready first."""
    ready = [job for job in jobs if job.is_ready()]
    return min(ready, key=lambda job: job.urgency) if ready else jobs[0]
