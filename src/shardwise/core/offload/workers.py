"""Threads that do jobs in the order in which they were given."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

Job = Callable[[], None]


class Workers:
    """Not an executor's threads: those take no more work once the main thread has ended, and a save may outlive it."""

    def __init__(self, name: str, num: int) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._jobs,), name=f"{name}-{number}", daemon=True)
            for number in range(num)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, job: Job) -> None:
        """A job must not raise."""
        self._jobs.put(job)

    def close(self) -> None:
        """Returns when all jobs are done."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # the last job may hold the last reference to their owner
                thread.join()


def _work(jobs: "SimpleQueue[Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds tensors, and the next one may be long in coming
