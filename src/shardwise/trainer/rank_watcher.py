"""The launcher's second thread: it passes signals on to the ranks, and sees to it that none of them waits for ever.

The agent owns the main thread, which may be deep in a rendezvous. So signals are blocked there, and by inheritance in
the ranks until they can hear them; this thread has them open and reads their numbers from a pipe. To end the agent, it
sends SIGUSR2 to the main thread, where an exception is raised that the agent knows.

- SIGTERM, SIGUSR1, SIGHUP: the ranks are asked to stop, once each, also those that are still starting.
- SIGINT: the same; a second one kills them.
- A rank has died: the agent ends the others, but those that wait inside a collective would hear that after half a
  minute. They are killed earlier.
- A rank has refused to run: the agent waits for all others, which may wait for that rank. They are given time to find
  the same mistake.
- A rank has ended as it should, and another does not end: it is killed after `timeout_s`, or earlier if it is stopped.

A rank that is killed is asked where it is first: a signal makes it write its stack into the folder of its notes, also
while it is deep in a library.
"""

import contextlib
import os
import select
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from ..base.processes import state_of
from . import rank_notes
from .signals import ASKS, INTERRUPTED, STOPPING, TERMINATED

POLL_S = 0.1
AFTER_A_DEATH_S = 5.0
AFTER_A_REFUSAL_S = 15.0
STOPPED_S = 30.0  # a process that is stopped may be about to be continued
ANSWER_S = 1.0  # for a stack to be written
LONGEST_TURN_S = 1.0  # what is more, the launcher was stopped itself, as by Ctrl-Z
MAIN_THREAD_S = 5.0  # for the agent to let go of what it waits for
REFUSALS = (2, 3, 5)


@dataclass(slots=True)
class Seen:
    """A rank as its launcher sees it."""

    started: rank_notes.Started
    is_asked: bool = False
    is_killed: bool = False  # by us
    where: str = ""  # when it was killed
    gone_s: float | None = None
    status: int | None = None  # its exit code, negative for a signal; None: runs, or the agent was faster


class Watch:
    """`stop_agent` is raised in the main thread when the ranks are to be killed; `code` then says why."""

    def __init__(
        self, say: Callable[[str], None], stop_agent: Exception, timeout_s: float, temporary_folder: Path
    ) -> None:
        self.code: int | None = None
        self._timeout_s = timeout_s
        self._temporary_folder = temporary_folder
        self._turned_s = time.monotonic()
        self._late_s = self._stopped_s = 0.0
        self.ranks: dict[int, Seen] = {}
        self.endings: dict[int, rank_notes.Ended] = {}
        self._say = say
        self._stop_agent = stop_agent
        self._folder: Path | None = None
        self._asked: int | None = None
        self._trouble = ""
        self._grace_end_s = float("inf")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwise-watch", daemon=True)
        self._lock = threading.Lock()
        self._heard = {s for s in {*STOPPING, signal.SIGINT} if signal.getsignal(s) != signal.SIG_IGN}

    def look_in(self, folder: Path) -> None:
        """The ranks start, or start again, and will leave their notes here."""
        with self._lock:
            self._folder = folder
            self.ranks, self.endings = {}, {}
            self._grace_end_s = float("inf")
            self._late_s = self._stopped_s = 0.0

    def __enter__(self) -> Self:
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._old_pipe = signal.set_wakeup_fd(self._pipe[1])
        self._old = {number: signal.signal(number, _nothing) for number in self._heard}
        self._old[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, self._end_agent)
        self._thread.start()  # before the mask, which it would inherit
        ensure_running()  # would be started with the ranks, and opens SIGINT and SIGTERM when it is
        self._old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._heard)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        signal.signal(signal.SIGUSR2, _nothing)  # too late to end anything
        self._closing.set()
        self._thread.join()
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
        signal.set_wakeup_fd(self._old_pipe)
        for end in self._pipe:
            os.close(end)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._heard)
        while not self._closing.is_set():
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001, without this thread nobody could stop the run
                trouble, self._trouble = self._trouble, f"the launcher's watch over its ranks: {error!r}; it goes on"
                if trouble != self._trouble:
                    self._say(self._trouble)
                self._closing.wait(POLL_S)

    def _turn(self) -> None:
        if select.select([self._pipe[0]], [], [], POLL_S)[0]:
            for number in os.read(self._pipe[0], 64):
                if number in self._heard:
                    self._hear(signal.Signals(number))
        with self._lock:
            self._look()

    def _hear(self, number: signal.Signals) -> None:
        if number == signal.SIGINT and self._asked == INTERRUPTED:
            self._end(INTERRUPTED, "interrupted twice: the ranks are killed, and nothing is saved")
        elif self._folder is None:
            self._end(INTERRUPTED if number == signal.SIGINT else TERMINATED, f"{number.name} before any rank ran")
        elif number == signal.SIGINT:
            self._asked = INTERRUPTED
            self._say("stopping after this step, with a checkpoint; Ctrl-C again ends it at once, without one")
        elif self._asked is None:
            self._asked = TERMINATED
            self._say(f"{number.name}: stopping after this step, with a checkpoint")

    def _look(self) -> None:
        if self._folder is None:
            return
        for started in rank_notes.started(self._folder):
            self.ranks.setdefault(started.local_rank, Seen(started))
        for ended in rank_notes.ended(self._folder):
            self.endings.setdefault(ended.local_rank, ended)
        for local_rank, seen in self.ranks.items():
            if seen.gone_s is None:
                self._look_at(seen, has_ended=local_rank in self.endings)
        grace_s = self._grace_s()
        if grace_s is not None:
            self._grace_end_s = min(self._grace_end_s, time.monotonic() + grace_s)
        if time.monotonic() > self._grace_end_s:
            self._lose_patience()
        elif grace_s is None:
            self._look_at_the_late()

    def _look_at(self, seen: Seen, has_ended: bool) -> None:
        pid = seen.started.pid
        try:
            # Without reaping it: that is the agent's.
            gone = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            seen.gone_s = time.time()
            return
        if gone is not None:
            seen.gone_s = time.time()
            seen.status = gone.si_status if gone.si_code == os.CLD_EXITED else -gone.si_status
        elif self._asked is not None and not seen.is_asked and not has_ended:
            seen.is_asked = True
            _send(pid, ASKS[self._asked])

    @property
    def refusal(self) -> int | None:
        """The exit code of a rank that has refused to go on, if one has."""
        return next((ending.code for ending in self.endings.values() if ending.code in REFUSALS), None)

    def _grace_s(self) -> float | None:
        """How long the ranks that still run may go on; None: as long as they like."""
        if any(ending.code is None for ending in self.endings.values()):
            return AFTER_A_DEATH_S
        if any(seen.gone_s is not None and rank not in self.endings for rank, seen in self.ranks.items()):
            return AFTER_A_DEATH_S
        if self.refusal is not None:
            return AFTER_A_REFUSAL_S
        return None

    def _look_at_the_late(self) -> None:
        """Ranks that have not ended though another has, as it should."""
        now_s = time.monotonic()
        turn_s, self._turned_s = min(now_s - self._turned_s, LONGEST_TURN_S), now_s
        late = self._running()
        is_waiting = bool(late and self.endings)
        self._late_s = self._late_s + turn_s if is_waiting else 0.0
        is_stopped = is_waiting and all(_is_stopped(seen) for seen in late)
        self._stopped_s = self._stopped_s + turn_s if is_stopped else 0.0
        if self._stopped_s > STOPPED_S or self._late_s > self._timeout_s:
            first = min(self.endings.values(), key=lambda ending: ending.time_s)
            ended = self.ranks[first.local_rank].started.rank
            places = self._where_they_are(late)
            hint = "" if is_stopped else f"; --timeout gives it more than {self._timeout_s:g} s"
            self._end(1, f"rank {ended} has ended, but not all others, which are killed{hint}:\n{places}")

    def _running(self) -> list[Seen]:
        return [seen for rank, seen in self.ranks.items() if seen.gone_s is None and rank not in self.endings]

    def _where_they_are(self, running: list[Seen]) -> str:
        """Ask ranks for their stacks. Nothing else is asked of one that is to be killed."""
        asked = [seen for seen in running if not _is_stopped(seen)]
        for seen in asked:
            _send(seen.started.pid, rank_notes.TELL_STACK)
        end_s = time.monotonic() + ANSWER_S
        assert self._folder is not None
        while time.monotonic() < end_s and not all(rank_notes.stack(self._folder, seen.started) for seen in asked):
            time.sleep(0.02)
        for seen in running:
            pid = seen.started.pid
            stopped = f"is stopped (kill -CONT {pid} would let it go on)"
            told = rank_notes.stack(self._folder, seen.started) or "does not answer"
            seen.where = f"  rank {seen.started.rank}, process {pid}, {told if seen in asked else stopped}"
        return "\n".join(seen.where for seen in running)

    def _lose_patience(self) -> None:
        self._grace_end_s = float("inf")
        running = self._running()
        places = self._where_they_are(running)
        if self.refusal is not None and len(self.endings) < len(self.ranks):
            why = "a rank has refused to run; the others did not notice, and are killed"
            self._end(self.refusal, f"{why}:\n{places}" if places else why)
            return
        for seen in running:
            seen.is_killed = True
            _send(seen.started.pid, signal.SIGKILL)

    def _end(self, code: int, why: str) -> None:
        """Get the agent to kill its ranks and return; and if it cannot, do without it."""
        self.code = code
        self._say(why)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGUSR2)
        if not self._closing.wait(MAIN_THREAD_S):
            for seen in self.ranks.values():
                if seen.gone_s is None:
                    _send(seen.started.pid, signal.SIGKILL)
            shutil.rmtree(self._temporary_folder, ignore_errors=True)
            os._exit(code)

    def _end_agent(self, _: int, __: FrameType | None) -> None:
        raise self._stop_agent


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # the agent has just reaped it
        os.kill(pid, number)


def _is_stopped(seen: Seen) -> bool:
    """By a signal, not by a debugger."""
    return state_of(seen.started.pid) == "T"


def _nothing(*_: Any) -> None:
    """A handler, so that a signal reaches the pipe."""
