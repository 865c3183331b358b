"""The launcher's second thread: it passes signals on to the ranks, and ends ranks that would wait for ever.

Torch's elastic agent (`agent.py`) runs in the main thread and may block in a rendezvous. So signals are blocked there;
the ranks inherit this, until they can handle signals. This thread receives them and reads their numbers from a pipe.
To end the agent, it sends SIGUSR2 to the main thread, where the handler raises an exception that the agent catches.

- SIGTERM, SIGUSR1, SIGHUP: each rank gets one request to stop, also a rank that is still starting.
- SIGINT: the same; a second SIGINT kills the ranks.
- A rank has died: the agent sends SIGTERM to the others. A rank that waits inside a collective does not react, and the
  agent would kill it after 30 s. This thread kills it earlier.
- A rank has refused to run (REFUSALS): the agent waits for the others, and they may wait for that rank. They get time
  to find the same mistake; then they are killed.
- A rank has ended normally, another has not: the latter is killed after `timeout_s`, or earlier if SIGSTOP stopped it.

Before a rank is killed, a signal makes it write its stack, even while it is inside a library call. `first_failure` then
describes which rank failed first and why, and where the killed ranks were.
"""

import contextlib
import os
import re
import select
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from ..base.processes import state_of
from .rank import WRITE_STACK, Note, read_notes, stack_of
from .signals import INTERRUPTED, REQUEST_SIGNALS, STOP_SIGNALS, TERMINATED
from .start_status import MARK

POLL_S = 0.1
AFTER_A_DEATH_S = 5.0  # until the other ranks are killed
AFTER_A_REFUSAL_S = 15.0
STOPPED_S = 30.0  # a stopped process may be about to be continued
ANSWER_S = 1.0  # time for a rank to write its stack
LONGEST_TURN_S = 1.0  # if a turn of the loop takes longer, the launcher itself was stopped, as by Ctrl-Z
MAIN_THREAD_S = 5.0  # time for the agent to return
REFUSALS = (2, 3, 5)  # exit codes of a rank that refuses to run: request, memory, checkpoint
LAST_LINES, LAST_BYTES = 15, 1 << 20  # lines at the end of a log that are shown, and bytes that are read for them
MAX_KILLED_SHOWN = 4
# A death may be noticed this late. A rank that raised at most this long before then probably failed because of it.
NOTICED_S = 5 * POLL_S
# Start of an error text that one rank has sent to all. Every rank raises it; the number in it is the rank that failed.
_RAISED_BY = re.compile(r"rank (\d+): ")
_IGNORE: Callable[..., None] = lambda *_: None  # noqa: E731  a handler, unlike SIG_IGN, lets the number reach the pipe


@dataclass(slots=True)
class WatchedRank:
    note: Note
    is_requested: bool = False  # it got a request to stop
    is_killed: bool = False  # by the watcher
    where: str = ""  # its stack when it was killed
    gone_s: float | None = None  # when the watcher saw that the process had ended
    status: int | None = None  # its exit code, negative for a signal; None: it runs, or the agent reaped it first

    @property
    def has_ended(self) -> bool:
        """Return whether its note says that it ends. Its process may still run."""
        return self.note.ended_s is not None


class RankWatcher:
    """Raises `stop_agent` in the main thread when the ranks have to be killed; `code` is then the exit code."""

    def __init__(self, say: Callable[[str], None], stop_agent: Exception, timeout_s: float, folder: Path) -> None:
        self.code: int | None = None
        self.leave_terminal: Callable[[], None] = _IGNORE  # called when a rank runs
        self._timeout_s = timeout_s
        self._temporary_folder = folder
        self._turned_s = time.monotonic()
        self._late_s = self._stopped_s = 0.0  # how long ranks have been late, see `_watch_late_ranks`, or stopped
        self.ranks: dict[int, WatchedRank] = {}
        self._say, self._stop_agent = say, stop_agent
        self._folder: Path | None = None  # of the ranks' notes; None before the first start
        self._requested: int | None = None  # the exit code with which the ranks have to stop
        self._trouble = ""  # the last error of this thread, which is printed once
        self._grace_end_s = float("inf")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwise-watch", daemon=True)
        self._lock = threading.Lock()
        self._signals = {s for s in {*STOP_SIGNALS, signal.SIGINT} if signal.getsignal(s) != signal.SIG_IGN}

    def watch(self, folder: Path) -> None:
        """Watch the ranks that are being started; they will leave their notes in this folder."""
        with self._lock:
            self._folder = folder
            self.ranks = {}
            self._grace_end_s = float("inf")
            self._late_s = self._stopped_s = 0.0

    def __enter__(self) -> Self:
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._old_pipe = signal.set_wakeup_fd(self._pipe[1])
        self._old = {number: signal.signal(number, _IGNORE) for number in self._signals}
        self._old[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, self._end_agent)
        self._thread.start()  # before the mask, which it would inherit
        ensure_running()  # the resource tracker: if it started later, with the ranks, it would unblock signals
        self._old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        signal.signal(signal.SIGUSR2, _IGNORE)  # nothing is left to end
        self._closing.set()
        self._thread.join()
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
        signal.set_wakeup_fd(self._old_pipe)
        for end in self._pipe:
            os.close(end)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        while not self._closing.is_set():
            try:
                if select.select([self._pipe[0]], [], [], POLL_S)[0]:
                    for number in os.read(self._pipe[0], 64):
                        if number in self._signals:
                            self._handle(signal.Signals(number))
                with self._lock:
                    self._check()
            except Exception as error:  # noqa: BLE001, without this thread the run could not be stopped
                trouble = f"cannot watch the ranks: {error!r}; it tries again"
                is_new, self._trouble = trouble != self._trouble, trouble
                if is_new:
                    self._say(trouble)
                self._closing.wait(POLL_S)

    def _handle(self, number: signal.Signals) -> None:
        if number == signal.SIGINT and self._requested == INTERRUPTED:
            self._end(INTERRUPTED, "interrupted twice: the ranks are killed, and nothing is saved")
        elif self._folder is None:
            self._end(INTERRUPTED if number == signal.SIGINT else TERMINATED, f"{number.name} before any rank ran")
        elif number == signal.SIGINT:
            self._requested = INTERRUPTED
            self._say("stopping after this step, with a checkpoint; Ctrl-C again ends it at once, without one")
        elif self._requested is None:
            self._requested = TERMINATED
            self._say(f"{number.name}: stopping after this step, with a checkpoint")

    def _check(self) -> None:
        if self._folder is None:
            return
        for note in read_notes(self._folder):
            self.ranks.setdefault(note.local_rank, WatchedRank(note)).note = note
        if self.ranks and (mark := self._folder / MARK).exists():
            self.leave_terminal()
            mark.unlink()
        for rank in self.ranks.values():
            if rank.gone_s is None:
                self._update(rank)
        # Time limit of the ranks that still run after a crash or a refusal.
        gone = [rank for rank in self.ranks.values() if rank.gone_s is not None and not rank.has_ended]
        has_crash = bool(gone) or any(rank.note.has_raised for rank in self.ranks.values())
        if has_crash or self.refusal is not None:
            grace_s = AFTER_A_DEATH_S if has_crash else AFTER_A_REFUSAL_S
            self._grace_end_s = min(self._grace_end_s, time.monotonic() + grace_s)
            if time.monotonic() > self._grace_end_s:
                self._end_running()
        else:
            self._watch_late_ranks()

    def _update(self, rank: WatchedRank) -> None:
        try:
            # WNOWAIT: do not reap the process. The agent does that.
            gone = os.waitid(os.P_PID, rank.note.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            rank.gone_s = time.time()
            return
        if gone is not None:
            rank.gone_s = time.time()
            rank.status = gone.si_status if gone.si_code == os.CLD_EXITED else -gone.si_status
        elif self._requested is not None and not rank.is_requested and not rank.has_ended:
            rank.is_requested = True
            _send(rank, REQUEST_SIGNALS[self._requested])

    @property
    def refusal(self) -> int | None:
        """Exit code of a rank that has refused to run, if there is one."""
        return next((rank.note.code for rank in self.ranks.values() if rank.note.code in REFUSALS), None)

    def _watch_late_ranks(self) -> None:
        """End ranks that still run long after another has ended normally."""
        now_s = time.monotonic()
        turn_s, self._turned_s = min(now_s - self._turned_s, LONGEST_TURN_S), now_s
        late, ended = self._running(), [rank.note for rank in self.ranks.values() if rank.has_ended]
        is_waiting = bool(late and ended)
        self._late_s = self._late_s + turn_s if is_waiting else 0.0
        is_stopped = is_waiting and all(_is_stopped(rank) for rank in late)
        self._stopped_s = self._stopped_s + turn_s if is_stopped else 0.0
        if self._stopped_s > STOPPED_S or self._late_s > self._timeout_s:
            first = min(ended, key=lambda note: note.ended_s or 0.0)
            places = self._stacks(late)
            hint = "" if is_stopped else f"; --timeout gives it more than {self._timeout_s:g} s"
            self._end(1, f"rank {first.rank} has ended, but not all others, which are killed{hint}:\n{places}")

    def _running(self) -> list[WatchedRank]:
        return [rank for rank in self.ranks.values() if rank.gone_s is None and not rank.has_ended]

    def _stacks(self, running: list[WatchedRank]) -> str:
        """Ask running ranks for their stacks, before they are killed."""
        asked = [rank for rank in running if not _is_stopped(rank)]
        for rank in asked:
            _send(rank, WRITE_STACK)
        end_s = time.monotonic() + ANSWER_S
        assert self._folder is not None
        while time.monotonic() < end_s and not all(stack_of(self._folder, rank.note.local_rank) for rank in asked):
            time.sleep(0.02)
        for rank in running:
            note = rank.note
            where = f"is stopped (kill -CONT {note.pid} would let it continue)"
            if rank in asked:
                where = stack_of(self._folder, note.local_rank) or "does not answer"
            rank.where = f"  rank {note.rank}, process {note.pid}, {where}"
        return "\n".join(rank.where for rank in running)

    def _end_running(self) -> None:
        self._grace_end_s = float("inf")
        running = self._running()
        places = self._stacks(running)
        if self.refusal is not None and not all(rank.has_ended for rank in self.ranks.values()):
            why = "a rank has refused to run; the others did not notice, and are killed"
            self._end(self.refusal, f"{why}:\n{places}" if places else why)
            return
        for rank in running:
            rank.is_killed = True
            _send(rank, signal.SIGKILL)

    def _end(self, code: int, why: str) -> None:
        """Make the agent kill its ranks and return; if it does not, kill them and exit."""
        self.code = code
        self._say(why)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGUSR2)
        if not self._closing.wait(MAIN_THREAD_S):
            for rank in self.ranks.values():
                if rank.gone_s is None:
                    _send(rank, signal.SIGKILL)
            shutil.rmtree(self._temporary_folder, ignore_errors=True)
            os._exit(code)

    def _end_agent(self, _: int, __: FrameType | None) -> None:
        raise self._stop_agent


def _send(rank: WatchedRank, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # the agent has just reaped it
        os.kill(rank.note.pid, number)


def _is_stopped(rank: WatchedRank) -> bool:
    """Return whether a signal has stopped it. A process in a debugger has another state."""
    return state_of(rank.note.pid) == "T"


def first_failure(ranks: Sequence[WatchedRank], reported: Mapping[int, tuple[int, int]], host: str) -> str:
    """Describe the first failure, and the ranks that had to be killed: the failed one may have waited for them.

    `reported`: the agent's report of failed ranks, from local rank to (rank, exit code).
    """
    raised = sorted((rank.note for rank in ranks if rank.note.has_raised), key=lambda note: note.ended_s or 0.0)
    died = [rank for rank in ranks if rank.gone_s is not None and not rank.is_killed and not rank.has_ended]
    silent = sorted((rank for rank in died if rank.status != 0), key=lambda rank: rank.gone_s or 0.0)
    if silent and not (raised and (raised[0].ended_s or 0.0) < (silent[0].gone_s or 0.0) - NOTICED_S):
        note, status = silent[0].note, silent[0].status
        _, code = reported.get(note.local_rank, (note.rank, status))
        text = _death(note.rank, code if status is None else status, note.log, host)
    elif raised:
        text = _failure(raised[0], ranks, host)
    else:
        number, code = next(iter(reported.values()), (-1, 1))
        text = _death(number, code, "", host)
    killed = [rank.where for rank in ranks if rank.is_killed and rank.where]
    if not killed:
        return text
    more = [f"and {len(killed) - MAX_KILLED_SHOWN} more"] if len(killed) > MAX_KILLED_SHOWN else []
    return "\n".join([text, "did not end by themselves, and were killed:", *killed[:MAX_KILLED_SHOWN], *more])


def _failure(first: Note, ranks: Sequence[WatchedRank], host: str) -> str:
    raised_by = _RAISED_BY.match(first.error)
    number = int(raised_by[1]) if raised_by else first.rank
    note = next((rank.note for rank in ranks if rank.note.rank == number), None)
    where = f"on {host}" if note else "on another machine"
    log = f"\nits log: {note.log}" if note and note.log else ""
    return f"rank {number} {where} failed:\n\n{first.error[raised_by.end() if raised_by else 0 :]}{log}"


def _death(rank: int, code: int | None, log: str, host: str) -> str:
    """Describe the end of a rank whose note does not say how it ended."""
    if code is None:
        how = "died"
    elif code >= 0:
        how = f"ended with exit code {code}"
    else:
        name = signal.Signals(-code).name
        how = f"was ended by {name}" + (", as the kernel does when memory runs out" if name == "SIGKILL" else "")
    text = f"rank {rank} on {host} {how}"
    if not log:
        return text
    try:
        with Path(log).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_BYTES))
            lines = file.read(LAST_BYTES).decode(errors="replace").splitlines()[-LAST_LINES:]
    except OSError as error:
        lines = [f"({error})"]
    return "\n".join([text, f"the end of its log, {log}:", "", *lines])
