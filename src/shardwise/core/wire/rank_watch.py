"""Detection of ranks that wait for each other forever.

Every rank has a thread that reads the store of the process group about twice a second. When its own rank has waited for
a while, it asks all others where they are, and every thread answers for its rank: the collective it waits in, or its
stack. The first thread to find that the ranks cannot go on writes a verdict, which is raised on every rank. That is
certain when

- a rank announces a collective (`collective_order.py`) and another has gone on with something else,
- a rank has left or died,
- every rank has waited for `hang_s`, and not in the same collective.

A rank in the user's code may be slow for good reasons: a warning names it, and a verdict after `timeout_s`. If it is
idle there (its main thread stays at one place and uses no processor time), or its process is stopped, the verdict comes
after three times `hang_s`. A rank that reads or writes a checkpoint is idle while its disk works: where ranks meet for
that, they wait as long as the channel says.
"""

import json
import logging
import os
import socket
import sys
import threading
import time
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Literal, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ...base.errors import WireError
from ...base.processes import state_of
from .collective_order import Event, Order
from .ledger import Call
from .stacks import Idle, caller, is_in_barrier, stack_of_main

logger = logging.getLogger(__name__)

TICK_S = 0.5
SLICE = timedelta(seconds=0.5)
# A rank that has announced something asks the others after this long.
ANNOUNCED_S = 1.0
# A rank that fails because another one is gone waits this long for that rank's own error.
LAST_WORDS_S = 3.0
NUM_SHOWN = 16
# How many times `hang_s` a rank may do nothing in code of its own, or be stopped, while others wait for it.
NUM_HANGS = 3

Doing = Literal["collective", "announcing", "meeting", "barrier", "code"]


@dataclass(frozen=True, slots=True)
class State:
    """The place of a rank. `passed` counts the events of its order so far, `recent` are the last of them."""

    asked: int
    doing: Doing
    what: str
    waited_s: float
    passed: int
    announced: int  # a number computed from the event
    recent: list[str]
    where: str
    idle_s: float = 0.0
    dead: list[int] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)  # of its machine, as `dead`

    def __str__(self) -> str:
        what = {
            "collective": f"waits in {self.what}",
            "announcing": f"wants to go on with {self.what}, which the others must do too",
            "meeting": f"waits in {self.what}",
            "barrier": "waits in a barrier of its own code",
            "code": "is in code of its own" + (f", idle for {self.idle_s:.0f} s" if self.idle_s > 1 else ""),
        }[self.doing]
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
    """Time limits for ranks that wait for each other in different places, and for a rank in the user's code."""

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
        # Looks at which a rank was stopped, one after the other. Seconds would count while this rank is stopped, too.
        self._stopped: Counter[int] = Counter()
        self._idle = Idle()
        self._closing = threading.Event()
        self._store.set(f"process/{rank}", f"{os.getpid()} {socket.gethostname()}")
        self._thread = threading.Thread(target=self._run, name="shardwise-ranks", daemon=True)
        self._thread.start()

    def number_mesh(self) -> int:
        """Number a new mesh. Every rank is there now, so look up the processes of the ranks on this machine."""
        keys = [f"process/{rank}" for rank in range(self.num_ranks)]
        for rank, value in enumerate(self._store.multi_get(keys)):
            pid, host = value.decode().split(" ", 1)
            if host == socket.gethostname() and _is_alive(int(pid)):
                self._neighbours[rank] = int(pid)
        self._num_meshes += 1
        return self._num_meshes - 1

    def close(self, words: str) -> None:
        """Tell the other ranks that this rank leaves, and why."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join(2.0)
            try:
                self._store.set(f"left/{self.rank}", words)
            except RuntimeError:
                logger.debug("the store is gone before rank %s", self.rank)

    # The rank's own threads.

    def wait(self, work: dist.Work, kind: str, what: str, is_meeting: bool, patience_s: float) -> None:
        """Wait for work on a CPU that was not done within a slice of time."""
        if is_meeting and threading.current_thread() is not threading.main_thread():
            work.wait()  # in a background thread
            return
        doing: Doing = "meeting" if is_meeting else "collective"
        phase = "" if is_meeting else self._in_phase()
        self._wait = _Wait(doing, f"{kind} of {what}{phase}", time.monotonic(), patience_s=patience_s)
        try:
            while not self.verdict:
                try:
                    work.wait(SLICE)
                    return
                except RuntimeError:
                    if work.is_completed():
                        work.wait()
                        return
            self.raise_verdict()
        finally:
            self._wait = None

    def _in_phase(self) -> str:
        return f" ({self.order.phase})" if self.order.phase else ""

    def _announce(self, event: Event) -> None:
        """Add a number for the event to a sum in the store, and wait until the sum says that all ranks added the same.
        Two keys take turns, because a rank is at most one announcement ahead of another."""
        if self.verdict:
            self.raise_verdict()
        number = zlib.crc32(repr((self.order.num_passed, event)).encode())
        key, turn = f"announced/{self._num_announced % 2}", self._num_announced % 2
        self._num_announced += 1
        self._totals[turn] += self.num_ranks * number
        what = f"{describe(event)}{self._in_phase() if isinstance(event[0], Call) else ''}"
        self._wait = _Wait("announcing", what, time.monotonic(), number)
        try:
            total = self._store.add(key, number)
            num_tries = 0
            while total != self._totals[turn]:
                num_tries += 1
                if num_tries > 20:
                    time.sleep(min(0.02, 1e-5 * num_tries))
                if self.verdict:
                    self.raise_verdict()
                total = self._store.add(key, 0)
        except RuntimeError as error:
            if isinstance(error, WireError):
                raise
            self._fail(f"{describe(event)} could not be announced: the store of the process group is gone ({error})")
        finally:
            self._wait = None

    def explain(self, failure: str) -> str:
        """Explain a failure with what other ranks know about it, and tell the ranks that wait."""
        patience_s = time.monotonic() + LAST_WORDS_S
        try:
            while not self.verdict and time.monotonic() < patience_s:
                gone = self._gone()
                if gone:
                    self._judge(f"{'; '.join(gone.values())}. Rank {self.rank}: {failure}")
                time.sleep(0.1)
            if not self.verdict:
                self._judge(f"rank {self.rank}: {failure}")
        except RuntimeError:
            return failure
        return self.verdict

    def _fail(self, failure: str) -> NoReturn:
        self.verdict = self.verdict or failure
        self.raise_verdict()

    def raise_verdict(self) -> NoReturn:
        raise WireError(self.verdict)

    # The thread.

    def _run(self) -> None:
        while not self._closing.wait(TICK_S):
            try:
                self._look()
            except RuntimeError as error:
                if self._wait is None or self._closing.is_set():
                    return  # the process group is gone, and no rank waits
                self.verdict = (
                    self.verdict or f"the store of the process group, which rank 0 may serve, is gone: {error}"
                )
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
        asks = wait is not None and time.monotonic() - wait.since_s > self._patience_s(wait)
        num_asked = store.add("asked", 1 if asks else 0)
        if num_asked > self._num_answered:
            self._num_answered = num_asked
            store.set(f"state/{self.rank}", json.dumps(asdict(self._state(num_asked))))
        if asks:
            self._judge_all(num_asked)
        else:
            self._stopped.clear()

    def _patience_s(self, wait: _Wait) -> float:
        return (
            min(ANNOUNCED_S, self._limits.hang_s)
            if wait.doing == "announcing"
            else min(self._limits.hang_s, 2 * ANNOUNCED_S)
        )

    def _state(self, num_asked: int) -> State:
        wait, order = self._wait, self.order
        recent = [describe(event) for event in list(order.recent)[-NUM_SHOWN:]]
        dead = [rank for rank in self._neighbours if not _is_alive(self._neighbours[rank])]
        stopped = [rank for rank, pid in self._neighbours.items() if state_of(pid) == "T"]
        if wait is not None:
            waited_s, what = time.monotonic() - wait.since_s, wait.what
            passed, announced = order.num_passed, wait.announced
            return State(num_asked, wait.doing, what, waited_s, passed, announced, recent, caller(), 0.0, dead, stopped)
        doing: Doing = "barrier" if is_in_barrier() else "code"
        where = "".join(f"\n    {line}" for line in stack_of_main())
        idle_s = self._idle.seconds(where)
        return State(num_asked, doing, "", 0.0, order.num_passed, 0, recent, where, idle_s, dead, stopped)

    def _gone(self, states: dict[int, State] | None = None) -> dict[int, str]:
        """Ranks that have left or died, with the reason."""
        found = {rank: f"rank {rank} has died" for rank, pid in self._neighbours.items() if not _is_alive(pid)}
        for state in (states or {}).values():
            found |= {rank: f"rank {rank} has died" for rank in state.dead}
        for rank in range(self.num_ranks):
            if self._store.check([f"left/{rank}"]):
                found[rank] = f"rank {rank} has left: {self._store.get(f'left/{rank}').decode()}"
        return found

    def _states(self, num_asked: int) -> dict[int, State]:
        """The ranks' answers, unless they are older than the previous question."""
        found: dict[int, State] = {}
        for rank in range(self.num_ranks):
            if self._store.check([f"state/{rank}"]):
                state = State(**json.loads(self._store.get(f"state/{rank}")))
                if state.asked >= num_asked - 2 * self.num_ranks:
                    found[rank] = state
        return found

    def _judge_all(self, num_asked: int) -> None:
        wait = self._wait
        states = self._states(num_asked)
        gone = self._gone(states)
        passed = self.order.num_passed
        if wait is None or wait is not self._wait:
            return  # it has gone on meanwhile
        seen = {rank for state in states.values() for rank in state.stopped}
        self._stopped = Counter({rank: self._stopped[rank] + 1 for rank in seen})
        waited_s = time.monotonic() - wait.since_s
        headline = f"rank {self.rank} has waited for {waited_s:.0f} s"
        most_idle_s = NUM_HANGS * self._limits.hang_s
        if gone:
            self._judge(self._report(f"{'; '.join(gone.values())}, and the others wait", states, gone))
        elif apart := self._apart(wait, passed, states):
            self._judge(self._report(apart, states, gone))
        elif len(states) == self.num_ranks and _is_deadlock(states, self._limits.hang_s):
            self._judge(self._report("no rank can go on", states, gone))
        elif not wait.patience_s and (idle := [rank for rank in states if states[rank].idle_s > most_idle_s]):
            self._judge(self._report(f"rank {idle[0]} does nothing, and rank {self.rank} waits for it", states, gone))
        elif stopped := [rank for rank, num in self._stopped.items() if num * TICK_S > most_idle_s]:
            self._judge(self._report(f"rank {stopped[0]} is stopped, and rank {self.rank} waits for it", states, gone))
        elif waited_s > (wait.patience_s or self._limits.timeout_s):
            self._judge(self._report(headline, states, gone))
        elif waited_s > self._limits.hang_s and not self._has_warned:
            self._has_warned = True
            if self.rank == min((rank for rank, state in states.items() if state.doing != "code"), default=-1):
                logger.warning("%s", self._report(headline, states, gone))

    def _apart(self, wait: _Wait, passed: int, states: dict[int, State]) -> str:
        """Describe a rank that went on with something else than this rank announces; empty if there is none."""
        if wait.doing == "announcing":
            for rank, state in states.items():
                went_on = ""
                if state.passed > passed:
                    at = len(state.recent) - (state.passed - passed)
                    went_on = f"went on with {state.recent[at] if at >= 0 else 'something else'}"
                elif (state.doing, state.passed) == ("announcing", passed) and state.announced != wait.announced:
                    went_on = f"wants to go on with {state.what}"
                if went_on:
                    return (
                        f"the ranks do not do the same: rank {self.rank} wants to go on with {wait.what}, where rank "
                        f"{rank} {went_on}"
                    )
        return ""

    def _report(self, headline: str, states: dict[int, State], gone: dict[int, str]) -> str:
        lines = [f"{headline}:"]
        for rank in range(self.num_ranks):
            known = str(states[rank]) if rank in states else "does not answer"
            if self._stopped[rank]:
                pid = self._neighbours.get(rank)
                fix = "" if pid is None else f"; kill -CONT {pid} would let it go on"
                known = f"was stopped by a signal (SIGSTOP, Ctrl-Z){fix}"
            lines.append(f"  {gone[rank]}" if rank in gone else f"  rank {rank} {known}")
        return "\n".join(lines)

    def _judge(self, text: str) -> None:
        """Write a verdict, unless there is one already: the first counts, on every rank."""
        self.verdict = self._store.compare_set("verdict", "", text).decode()
        self.order.stop()


def describe(event: Event) -> str:
    head, *rest = event
    whose = f" of sharded model {rest[-1]}" if rest[-1] != 0 else ""
    if isinstance(head, Call):
        return f"{head.kind} of {rest[0]}{whose} over axis {head.axis!r}"
    return f"{head}{whose}"


def _is_deadlock(states: dict[int, State], hang_s: float) -> bool:
    """True if all ranks wait, and not only in collectives: the first of those would still make progress."""
    doing = {(s.doing, "" if s.doing == "collective" else s.what, s.announced) for s in states.values()}
    return all(state.doing == "barrier" or state.waited_s > hang_s for state in states.values()) and len(doing) > 1


def _is_alive(pid: int) -> bool:
    """True if a process runs; False also for one that has ended and was not waited for."""
    try:
        os.kill(pid, 0)
        return state_of(pid) not in ("Z", "X")
    except PermissionError:
        return True
    except OSError:
        return False


def last_words() -> str:
    """The reason why a process ends, for the other ranks."""
    error: Any = getattr(sys, "last_value", None)
    return "its process has ended" if error is None else f"{type(error).__name__}: {error}"
