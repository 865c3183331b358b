"""Detection of ranks that wait for each other forever.

Every rank has a thread that reads the store of the process group about twice a second. When its own rank has waited for
a while, it asks all others where they are, and every thread answers for its rank: the collective it waits in, or its
stack. The first thread to find that the ranks cannot go on writes a verdict: an error message that is raised on every
rank. The ranks cannot go on if

- a rank announces a collective (`collective_order.py`) and another has gone on with something else,
- a rank has left or died,
- every rank has waited for `hang_s`, and not in the same collective.

A rank in the user's code may be slow for good reasons: first a warning names it, and after `timeout_s` a verdict. If it
is idle there (its main thread stays at one place and uses no processor time), or its process is stopped, the verdict
comes after three times `hang_s`. A rank that reads or writes a checkpoint is idle while its disk works, so waits for a
checkpoint have a time limit of their own (`Channel.patience_s`).
"""

import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
import zlib
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ...base.errors import WireError
from ...base.processes import state_of
from .collective_order import Event, Order
from .ledger import Call

logger = logging.getLogger(__name__)

TICK_S = 0.5
SLICE = timedelta(seconds=0.5)
# A rank asks the others where they are this long after an announcement; while it waits in a collective, twice that.
ANNOUNCED_S = 1.0
# A rank that fails because another one is gone waits this long for that rank's own error.
LAST_WORDS_S = 3.0
# How many times `hang_s` a rank may be idle in the user's code, or be stopped, while others wait for it.
NUM_HANGS = 3
# A thread that uses fewer processor seconds between two looks is idle: it only wakes up and sleeps again.
LITTLE_S = 0.02
NUM_FRAMES = 6
DEAD = ("", "Z", "X")  # states of a process that has ended; Z is a zombie
_BARRIERS = ("barrier", "monitored_barrier")
_OURS, _TORCH = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)

Doing = Literal["collective", "announcing", "meeting", "barrier", "code"]


@dataclass(frozen=True, slots=True)
class State:
    """Where a rank is: its answer to question number `asked`. `passed` counts its events (`Order`) so far; `recent`
    are the last of them, each with its number, its checksum and a description."""

    asked: int
    doing: Doing
    what: str
    waited_s: float
    announced: int  # the checksum of the event
    passed: int
    recent: list[tuple[int, int, str]]
    where: str
    idle_s: float
    dead: list[int]  # ranks on its machine whose process has ended
    stopped: list[int]  # ranks on its machine whose process is stopped by a signal

    def __str__(self) -> str:
        what = {
            "announcing": f"wants to continue with {self.what}, which the others must do too",
            "barrier": "waits in a barrier of its own code",
            "code": "is in code of its own" + (f", idle for {self.idle_s:.0f} s" if self.idle_s > 1 else ""),
        }.get(self.doing, f"waits in {self.what}")
        return f"{what}, {self.where}" if self.where else what


@dataclass(slots=True)
class _Wait:
    doing: Doing
    what: str
    since_s: float
    announced: int = 0
    patience_s: float = 0.0


@dataclass(slots=True)
class Limits:
    """Time limits: `hang_s` for ranks that wait for each other, `timeout_s` for a rank in the user's code."""

    hang_s: float
    timeout_s: float


class Watch:
    def __init__(self, store: Any, rank: int, num_ranks: int, limits: Limits) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._limits = limits
        self.order = Order(self._announce)
        self._num_meshes = 0
        self.verdict = ""
        self._store = PrefixStore("shardwise_watch", store)
        self._wait: _Wait | None = None
        self._totals = [0, 0]
        self._num_announced = 0
        self._num_answered = 0
        self._has_warned = False
        self._neighbours: dict[int, int] = {}
        # Looks in a row at which a rank was stopped. Seconds would also count while this rank itself is stopped.
        self._stopped: Counter[int] = Counter()
        # At the last look: the place of the main thread, its processor time, and since when it has been idle there.
        self._last_look = ("", 0.0, time.monotonic())
        self._closing = threading.Event()
        self._store.set(f"process/{rank}", f"{os.getpid()} {socket.gethostname()}")
        self._thread = threading.Thread(target=self._run, name="shardwise-ranks", daemon=True)
        self._thread.start()

    def number_mesh(self) -> int:
        """Number a new mesh. Every rank has started by now, so look up the processes of the ranks on this machine."""
        keys = [f"process/{rank}" for rank in range(self.num_ranks)]
        for rank, value in enumerate(self._store.multi_get(keys)):
            pid, host = value.decode().split(" ", 1)
            if host == socket.gethostname() and state_of(int(pid)) not in DEAD:
                self._neighbours[rank] = int(pid)
        self._num_meshes += 1
        return self._num_meshes - 1

    def close(self) -> None:
        """Tell the other ranks that this rank leaves, and why."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join(2.0)
            error: Any = getattr(sys, "last_value", None)
            words = "its process has ended" if error is None else f"{type(error).__name__}: {error}"
            try:
                self._store.set(f"left/{self.rank}", words)
            except RuntimeError:
                logger.debug("the store is gone before rank %s", self.rank)

    # Called by the rank's own threads.

    def wait(self, work: dist.Work, what: str, is_meeting: bool, patience_s: float) -> None:
        """Wait for a collective on a CPU that was not done within `SLICE`, until a verdict comes."""
        if is_meeting and threading.current_thread() is not threading.main_thread():
            work.wait()  # in a background thread
            return
        doing: Doing = "meeting" if is_meeting else "collective"
        phase = "" if is_meeting else self.order.in_phase
        self._wait = _Wait(doing, f"{what}{phase}", time.monotonic(), patience_s=patience_s)
        try:
            while not self.verdict:
                try:
                    work.wait(SLICE)
                    return
                except RuntimeError:
                    if work.is_completed():
                        work.wait()
                        return
            self._raise_verdict()
        finally:
            self._wait = None

    def _announce(self, event: Event) -> None:
        """Add the checksum of the event to a sum in the store, and wait until the sum shows that all ranks added the
        same. Two keys are used alternately, because a rank is at most one announcement ahead of another."""
        self._raise_verdict()
        checksum = checksum_of(self.order.num_passed, event)
        turn = self._num_announced % 2
        self._num_announced += 1
        self._totals[turn] += self.num_ranks * checksum
        what = f"{describe(event)}{self.order.in_phase if isinstance(event[0], Call) else ''}"
        self._wait = _Wait("announcing", what, time.monotonic(), checksum)
        num_tries = 0
        try:
            while self._store.add(f"announced/{turn}", 0 if num_tries else checksum) != self._totals[turn]:
                num_tries += 1
                if num_tries > 20:
                    time.sleep(min(0.02, 1e-5 * num_tries))
                self._raise_verdict()
        except WireError:
            raise
        except RuntimeError as error:
            gone = f"{describe(event)} could not be announced: the store of the process group is gone ({error})"
            self.verdict = self.verdict or gone
            raise WireError(self.verdict) from error
        finally:
            self._wait = None

    def _raise_verdict(self) -> None:
        if self.verdict:
            raise WireError(self.verdict)

    def explain(self, failure: str) -> str:
        """Return the cause of a failure, with the errors of other ranks, and tell the waiting ranks."""
        until_s = time.monotonic() + LAST_WORDS_S
        try:
            while not self.verdict and time.monotonic() < until_s:
                gone = self._gone({})
                if gone:
                    self._judge(f"{'; '.join(gone.values())}. Rank {self.rank}: {failure}")
                time.sleep(0.1)
            if not self.verdict:
                self._judge(f"rank {self.rank}: {failure}")
        except RuntimeError:
            return failure
        return self.verdict

    # Run by the watching thread.

    def _run(self) -> None:
        while not self._closing.wait(TICK_S):
            try:
                self._look()
            except RuntimeError as error:
                if self._wait is None or self._closing.is_set():
                    return  # the process group is gone, and no rank waits
                gone = f"the store of the process group, which rank 0 may serve, is gone: {error}"
                self.verdict = self.verdict or gone
                self.order.stop()
            except Exception:
                logger.exception("the thread that watches over the ranks")
                return

    def _look(self) -> None:
        store, wait = self._store, self._wait
        if not self.verdict and store.check(["verdict"]):
            self.verdict = store.get("verdict").decode()
            if wait is None:
                logger.error("%s", self.verdict)
        if self.verdict:
            self.order.stop()
            return
        patience_s = ANNOUNCED_S if wait is not None and wait.doing == "announcing" else 2 * ANNOUNCED_S
        asks = wait is not None and time.monotonic() - wait.since_s > min(self._limits.hang_s, patience_s)
        num_asked = store.add("asked", 1 if asks else 0)
        if num_asked > self._num_answered:
            self._num_answered = num_asked
            store.set(f"state/{self.rank}", json.dumps(asdict(self._state(num_asked))))
        if asks:
            self._judge_all(num_asked)
        else:
            self._stopped.clear()

    def _state(self, num_asked: int) -> State:
        wait, recent, idle_s = self._wait, list(self.order.recent), 0.0
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        walked = [] if main is None else traceback.walk_stack(main)  # the innermost call first
        frames = traceback.StackSummary.extract(walked, lookup_lines=False)
        if wait is None:
            nearest = frames[:NUM_FRAMES]
            barriers = [frame for frame in nearest if frame.name in _BARRIERS and frame.filename.startswith(_TORCH)]
            wait = _Wait("barrier" if barriers else "code", "", time.monotonic())
            where = "".join(f"\n    {_line(frame)}" for frame in nearest)
            used_s = time.clock_gettime(
                time.pthread_getcpuclockid(threading.main_thread().ident or threading.get_ident())
            )
            at, before_s, since_s = self._last_look
            if where != at or used_s - before_s > LITTLE_S:
                since_s = time.monotonic()
            self._last_look = (where, used_s, since_s)
            idle_s = time.monotonic() - since_s
        else:
            outside = [frame for frame in frames if not frame.filename.startswith((_OURS, _TORCH, "<"))]
            where = f"called from {_line(outside[0])}" if outside else ""
        waited_s, passed = time.monotonic() - wait.since_s, recent[-1][0] + 1 if recent else 0
        events = [(number, checksum_of(number, event), describe(event)) for number, event in recent]
        place = (wait.doing, wait.what, waited_s, wait.announced, passed, events)
        dead, stopped = self._neighbours_that_are(DEAD), self._neighbours_that_are(("T",))
        return State(num_asked, *place, where, idle_s, dead, stopped)

    def _neighbours_that_are(self, letters: tuple[str, ...]) -> list[int]:
        """Ranks of this machine whose process is in one of these states."""
        return [rank for rank, pid in self._neighbours.items() if state_of(pid) in letters]

    def _gone(self, states: dict[int, State]) -> dict[int, str]:
        """Ranks that have left or died, with the reason."""
        dead = {*self._neighbours_that_are(DEAD)}.union(*(state.dead for state in states.values()))
        found = {rank: f"rank {rank} has died" for rank in sorted(dead)}
        for rank in range(self.num_ranks):
            if self._store.check([f"left/{rank}"]):
                found[rank] = f"rank {rank} has left: {self._store.get(f'left/{rank}').decode()}"
        return found

    def _judge_all(self, num_asked: int) -> None:
        wait, states = self._wait, dict[int, State]()
        for rank in range(self.num_ranks):
            if self._store.check([f"state/{rank}"]):
                state = State(**json.loads(self._store.get(f"state/{rank}")))
                if state.asked >= num_asked - 2 * self.num_ranks:  # else it is older than the previous question
                    states[rank] = state
        gone, passed = self._gone(states), self.order.num_passed
        if wait is None or wait is not self._wait:
            return  # this rank no longer waits there
        self._stopped = Counter({rank: self._stopped[rank] + 1 for state in states.values() for rank in state.stopped})
        waited_s = time.monotonic() - wait.since_s
        headline = f"rank {self.rank} has waited for {waited_s:.0f} s"
        most_idle_s = NUM_HANGS * self._limits.hang_s
        idle = [rank for rank in states if states[rank].idle_s > most_idle_s and not wait.patience_s]
        stopped = [rank for rank, num in self._stopped.items() if num * TICK_S > most_idle_s]
        known = states.values()
        are_waiting = [state.doing == "barrier" or state.waited_s > self._limits.hang_s for state in known]
        all_wait = len(known) == self.num_ranks and all(are_waiting)
        cause = ""
        if gone:
            cause = f"{'; '.join(gone.values())}, and the others wait"
        elif wait.doing == "announcing" and (
            difference := difference_from(wait.announced, passed, states, waited_s > self._limits.hang_s)
        ):
            cause = f"the ranks do not do the same: rank {self.rank} wants to continue with {wait.what}, {difference}"
        elif all_wait and len({(s.doing, "" if s.doing == "collective" else s.what, s.announced) for s in known}) > 1:
            # Ranks that all wait in collectives do not count: the first of these can still finish.
            cause = "no rank can continue"
        elif idle:
            cause = f"rank {idle[0]} does nothing, and rank {self.rank} waits for it"
        elif stopped:
            cause = f"rank {stopped[0]} is stopped, and rank {self.rank} waits for it"
        elif waited_s > (wait.patience_s or self._limits.timeout_s):
            cause = headline
        if cause:
            self._judge(self._report(cause, states, gone))
        elif waited_s > self._limits.hang_s and not self._has_warned:
            self._has_warned = True
            if self.rank == min((rank for rank, state in states.items() if state.doing != "code"), default=-1):
                logger.warning("%s", self._report(headline, states, gone))

    def _report(self, headline: str, states: dict[int, State], gone: dict[int, str]) -> str:
        lines = [f"{headline}:"]
        for rank in range(self.num_ranks):
            known = str(states[rank]) if rank in states else "does not answer"
            if self._stopped[rank]:
                pid = self._neighbours.get(rank)
                fix = "" if pid is None else f"; kill -CONT {pid} would let it continue"
                known = f"was stopped by a signal (SIGSTOP, Ctrl-Z){fix}"
            lines.append(f"  {gone[rank]}" if rank in gone else f"  rank {rank} {known}")
        return "\n".join(lines)

    def _judge(self, text: str) -> None:
        """Write a verdict, unless there is one already: the first counts, on every rank."""
        self.verdict = self._store.compare_set("verdict", "", text).decode()
        self.order.stop()


def checksum_of(number: int, event: Event) -> int:
    return zlib.crc32(repr((number, event)).encode())


def describe(event: Event) -> str:
    head, *rest = event
    whose = f" of sharded model {rest[-1]}" if rest[-1] != 0 else ""
    if isinstance(head, Call):
        return f"{head.kind} of {rest[0]}{whose} over axis {head.axis!r}"
    return f"{head}{whose}"


def difference_from(announced: int, passed: int, states: dict[int, State], is_overdue: bool) -> str:
    """Describe a rank whose event number `passed` is not the announced one; empty if there is none.

    A rank that is ahead because all ranks have announced the same does not differ: this rank will see that as soon as
    it runs again. A rank so far ahead that `recent` no longer has the event (on a GPU collectives are only queued)
    differs if this rank `is_overdue`."""
    for rank, state in states.items():
        events = {number: (checksum, f"went on with {what}") for number, checksum, what in state.recent}
        if state.doing == "announcing":
            events[state.passed] = (state.announced, f"wants to continue with {state.what}")
        checksum, what = events.get(passed, (None, "went on with something else"))
        differs = is_overdue and state.passed > passed if checksum is None else checksum != announced
        if differs:
            return f"where rank {rank} {what}"
    return ""


def _line(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
