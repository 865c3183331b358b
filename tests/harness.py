"""Real ranks for tests: OS processes joined by gloo, started once and sent one function after another.

A `World` is N processes. Each waits at its pipe for a job (a module-level function and its arguments),
runs it inside an initialised process group, and sends back how it ended. The pipe carries plain pickles made
here, so functions travel by reference and tensors by value; nothing is shared between the processes but the
store that the parent serves for the rendezvous.

The parent never waits without a limit. Once a rank has failed, the others get a short grace (a rank whose
partner is gone would wait for long), and at the deadline the whole world is asked for its Python stacks and
killed. A world in which anything went wrong is not used again, because a collective that failed half way
leaves the group's counters apart; the next job starts a fresh one. Ranks are forked from one process that has
imported torch already, so that a fresh world costs milliseconds.
"""

import atexit
import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

START_DEADLINE_S = 180.0
DEADLINE_S = 120.0
GROUP_TIMEOUT_S = 600.0  # longer than any deadline: the harness, which can show stacks, should act first
GRACE_S = 3.0
MAX_OPEN_FILES = 700  # sockets of process groups that jobs made and left; beyond this the world is replaced
MAX_WORLDS = 2
PRELOADED = ["torch", "torch._dynamo", "shardwise", "tests.harness"]  # by the process that ranks are forked from

Job = Callable[..., Any]


# ---------------------------------------------------------------------------------------------------------
# how a job ended


@dataclass(frozen=True)
class Ending:
    """How one rank's job ended, and how many seconds after it was sent.

    `error` is "TypeName: message" of what was raised, and `detail` its traceback; for a rank that hung,
    `detail` is its stacks. `exitcode` is that of a rank that died: negative for a signal, as in
    `multiprocessing`.
    """

    rank: int
    kind: Literal["returned", "raised", "died", "hung"]
    seconds: float
    value: Any = None
    error: str = ""
    detail: str = ""
    exitcode: int | None = None

    @property
    def lost(self) -> bool:
        """Whether the rank itself is gone, or must go."""
        return self.kind in ("died", "hung")

    def __str__(self) -> str:
        return {
            "returned": f"rank {self.rank} returned after {self.seconds:.1f} s",
            "raised": f"rank {self.rank} raised after {self.seconds:.1f} s: {first_line(self.error)}",
            "died": f"rank {self.rank} died after {self.seconds:.1f} s: {exit_name(self.exitcode)}",
            "hung": f"rank {self.rank} was still running after {self.seconds:.1f} s",
        }[self.kind]


class WorldFailed(Exception):
    """A job failed on some rank. The message begins with the root cause; `endings` has every rank."""

    def __init__(self, message: str, endings: Sequence[Ending]) -> None:
        super().__init__(message)
        self.endings = list(endings)


class WorldHung(WorldFailed):
    """No rank failed, but some were still running at the deadline; the message shows their stacks."""


def failure(job_name: str, endings: Sequence[Ending]) -> WorldFailed:
    """The exception for these endings: the earliest failure in full, then a line for each other rank."""
    # A rank that died comes before those that raised: they may have noticed its death before the parent did.
    gravity = ("died", "raised", "hung", "returned")
    by_cause = sorted(endings, key=lambda ending: (gravity.index(ending.kind), ending.seconds))
    root, *others = by_cause
    lines = [f"{job_name} on {len(endings)} ranks: {root}"]
    if root.kind == "hung":
        lines += [f"\n--- stacks of rank {e.rank} ---\n{e.detail}" for e in by_cause if e.kind == "hung"]
        lines += [str(e) for e in others if e.kind != "hung"]
        return WorldHung("\n".join(lines), endings)
    lines += [root.detail, *map(str, others)]
    lines += [f"\n--- stacks of rank {e.rank} ---\n{e.detail}" for e in others if e.kind == "hung"]
    return WorldFailed("\n".join(lines), endings)


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def exit_name(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"exit code {exitcode}"


# ---------------------------------------------------------------------------------------------------------
# what goes through the pipe


class _Pickler(pickle.Pickler):
    """Sends tensors as their values on the CPU: no grad history, no device, no more storage than is used."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in (torch.Tensor, torch.nn.Parameter):
            return obj.detach().cpu().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class WarningFilter(NamedTuple):
    """One of the parent's warning filters, in the words of `warnings.filterwarnings`."""

    action: Any
    message: str
    category: type[Warning]
    module: str
    lineno: int

    @staticmethod
    def current() -> list["WarningFilter"]:
        def pattern(part: str | re.Pattern[str] | None) -> str:
            return part.pattern if isinstance(part, re.Pattern) else (part or "")

        return [
            WarningFilter(action, pattern(message), category, pattern(module), lineno)
            for action, message, category, module, lineno in warnings.filters
        ]


class Report(NamedTuple):
    """What a rank sends back: when it ended, and either the pickled value or the error and its traceback."""

    at: float
    value: bytes | None
    error: str
    detail: str
    num_open_files: int


# ---------------------------------------------------------------------------------------------------------
# a rank


@dataclass(frozen=True)
class Seat:
    """What a rank is told about its place in the world."""

    rank: int
    size: int
    store_port: int
    group_timeout_s: float
    join_group: bool
    stacks: Path
    environment: dict[str, str]


def rank_main(seat: Seat, pipe: Connection) -> None:
    """The life of a rank: join, then run jobs until the parent closes the pipe."""
    with seat.stacks.open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the parent, which closes the pipe
        take_seat(seat)
        gc.freeze()  # what torch's import made never dies; the collections between jobs need not look at it
        pipe.send_bytes(dumps(Report(time.monotonic(), dumps(None), "", "", num_open_files())))
        while True:
            try:
                message = pipe.recv_bytes()
            except (EOFError, OSError):
                break
            pipe.send_bytes(dumps(run_job(message)))
    # Not a normal exit: the destructors of groups that jobs left behind would wait for ranks that have gone.
    os._exit(0)


def take_seat(seat: Seat) -> None:
    """Make this process what torchrun would have made it, on one thread, in an initialised gloo group."""
    os.environ.clear()
    os.environ.update(
        seat.environment,
        RANK=str(seat.rank),
        WORLD_SIZE=str(seat.size),
        LOCAL_RANK=str(seat.rank),
        LOCAL_WORLD_SIZE=str(seat.size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(seat.store_port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is the parent's: `env://` connects to it as well
        OMP_NUM_THREADS="1",
    )
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if seat.join_group:
        timeout = timedelta(seconds=seat.group_timeout_s)
        store = dist.TCPStore("127.0.0.1", seat.store_port, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.size, timeout=timeout)


def run_job(message: bytes) -> Report:
    """Run one job under the parent's warning filters, seeded, and leave the process as it was found."""
    environment = dict(os.environ)
    num_modules = len(sys.modules)
    value, error, detail = None, "", ""
    with warnings.catch_warnings():
        try:
            filters: list[WarningFilter]
            filters, job = pickle.loads(message)
            warnings.resetwarnings()
            for rule in reversed(filters):
                warnings.filterwarnings(*rule)
            fn, args, kwargs = pickle.loads(job)
            torch.manual_seed(0)
            value = dumps(fn(*args, **kwargs))
        except BaseException as exc:
            error = f"{type(exc).__name__}: {exc}"
            detail = "".join(traceback.format_exception(exc))
        at = time.monotonic()
    os.environ.clear()
    os.environ.update(environment)
    gc.collect()
    if len(sys.modules) > num_modules:
        gc.freeze()  # what was imported stays, and need not be looked at after every job
    return Report(at, value, error, detail, num_open_files())


def num_open_files() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


# ---------------------------------------------------------------------------------------------------------
# a world


class World:
    """N ranks that live until `close`, or until something went wrong in them (`usable` is then False).

    `worn_out` says that jobs have left so many process groups behind that a fresh world is better.
    """

    def __init__(self, size: int, *, group_timeout_s: float = GROUP_TIMEOUT_S, join_group: bool = True) -> None:
        self.size = size
        self.usable = True
        self.worn_out = False
        self._folder = Path(tempfile.mkdtemp(prefix="shardwise-ranks-"))
        # Kept here and not by rank 0, so that the rendezvous outlives any rank, as under torchrun.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for rank in range(size):
            ours, theirs = context.Pipe()
            stacks = self._folder / f"rank{rank}"
            seat = Seat(rank, size, self._store.port, group_timeout_s, join_group, stacks, dict(os.environ))
            process = context.Process(target=rank_main, args=(seat, theirs), name=f"rank {rank} of {size}")
            process.start()
            theirs.close()
            self._ranks.append(process)
            self._pipes.append(ours)
        endings = self._collect(time.monotonic(), START_DEADLINE_S, GRACE_S)
        if not self.usable:
            raise failure("start", endings)

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def endings(
        self, fn: Job, *args: Any, deadline: float = DEADLINE_S, grace: float | None = None, **kwargs: Any
    ) -> list[Ending]:
        """Run `fn` on every rank and say how it ended on each.

        After a first failure the other ranks get `grace` seconds, or all the time there is when it is None.
        """
        if not self.usable:
            raise RuntimeError(f"this world of {self.size} failed and was closed; ask for a new one")
        message = dumps((WarningFilter.current(), dumps((fn, args, kwargs))))
        sent_at = time.monotonic()
        for pipe in self._pipes:
            pipe.send_bytes(message)
        return self._collect(sent_at, deadline, grace)

    def run(self, fn: Job, *args: Any, deadline: float = DEADLINE_S, **kwargs: Any) -> list[Any]:
        """What `fn` returned, by rank; the root cause is raised if it failed anywhere."""
        endings = self.endings(fn, *args, deadline=deadline, grace=GRACE_S, **kwargs)
        if any(ending.kind != "returned" for ending in endings):
            self.close()
            raise failure(job_name(fn), endings)
        return [ending.value for ending in endings]

    def errors(self, fn: Job, *args: Any, deadline: float = DEADLINE_S, **kwargs: Any) -> list[str | None]:
        """What `fn` raised on each rank, as "TypeName: message"; None where it returned.

        A rank that hangs or dies is not a refusal, and is raised. The world lives on only if its ranks can
        still meet at a barrier.
        """
        endings = self.endings(fn, *args, deadline=deadline, **kwargs)
        if any(ending.lost for ending in endings):
            raise failure(job_name(fn), endings)
        if any(ending.kind == "raised" for ending in endings):
            met = self.endings(dist.barrier, deadline=GRACE_S, grace=0.0)
            if any(ending.kind == "raised" for ending in met):
                self.close()
        return [ending.error or None for ending in endings]

    def _collect(self, sent_at: float, deadline: float, grace: float | None) -> list[Ending]:
        """One ending for each rank, at the latest at the deadline; closes the world if a rank is lost."""
        found: dict[int, Ending] = {}
        limit = sent_at + deadline
        while len(found) < self.size:
            missing = [rank for rank in range(self.size) if rank not in found]
            watched = [w for rank in missing for w in (self._pipes[rank], self._ranks[rank].sentinel)]
            if not wait(watched, max(0.0, limit - time.monotonic())):
                break
            for rank in missing:
                if self._pipes[rank].poll() or not self._ranks[rank].is_alive():
                    found[rank] = self._receive(rank, sent_at)
            if grace is not None and any(ending.kind != "returned" for ending in found.values()):
                limit = min(limit, time.monotonic() + grace)
                grace = None
        missing = [rank for rank in range(self.size) if rank not in found]
        for rank, stacks in self._stacks(missing).items():
            found[rank] = Ending(rank, "hung", time.monotonic() - sent_at, detail=stacks)
        if any(ending.lost for ending in found.values()):
            self.close()
        return [found[rank] for rank in range(self.size)]

    def _receive(self, rank: int, sent_at: float) -> Ending:
        """The report in this rank's pipe, or its death."""
        try:
            report: Report = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            died_at = time.monotonic()
            self._ranks[rank].join(GRACE_S)
            exitcode = self._ranks[rank].exitcode
            return Ending(rank, "died", died_at - sent_at, detail=exit_name(exitcode), exitcode=exitcode)
        seconds = report.at - sent_at
        self.worn_out |= report.num_open_files > MAX_OPEN_FILES
        if report.value is None:
            return Ending(rank, "raised", seconds, error=report.error, detail=report.detail)
        return Ending(rank, "returned", seconds, value=pickle.loads(report.value))

    def _stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """The Python stacks of all threads of these ranks, as far as they can be had within two seconds."""
        files = {rank: self._folder / f"rank{rank}" for rank in ranks}
        for rank, file in files.items():
            pid = self._ranks[rank].pid
            # Before the rank has made the file and listens, the signal would kill it.
            if pid is not None and file.exists():
                os.kill(pid, signal.SIGUSR1)
        patience = time.monotonic() + 2.0
        stacks = dict.fromkeys(ranks, "")
        while time.monotonic() < patience and not all(stacks.values()):
            time.sleep(0.1)  # a dump takes milliseconds; the pause lets one that began be written to its end
            stacks = {rank: file.read_text() if file.exists() else "" for rank, file in files.items()}
        return {rank: text or "(no answer)" for rank, text in stacks.items()}

    def close(self) -> None:
        """End every rank: politely if all is well, by SIGKILL if a rank does not listen."""
        self.usable = False
        for pipe in self._pipes:
            pipe.close()
        polite = time.monotonic() + 1.0
        for process in self._ranks:
            process.join(max(0.0, polite - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._ranks, self._pipes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)


def job_name(fn: Job) -> str:
    inner = getattr(fn, "func", fn)  # functools.partial
    return getattr(inner, "__qualname__", repr(inner))


# ---------------------------------------------------------------------------------------------------------
# the pool


class Pool:
    """At most one world of each size, started when first asked for; the fixture `run_ranks` is one.

    Few are kept at a time: gloo's threads wake a hundred times a second, and idle worlds would take a fifth of the CPU.
    """

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}
        atexit.register(self.close)

    def world(self, size: int) -> World:
        """The living world of this size; a fresh one if there was none or the last one failed."""
        known = self._worlds.pop(size, None)
        if known is None or not known.usable or known.worn_out:
            if known is not None:
                known.close()
            while len(self._worlds) >= MAX_WORLDS:
                self._worlds.pop(next(iter(self._worlds))).close()
            known = World(size)
        self._worlds[size] = known  # the last in the order of use
        return known

    def __call__(self, size: int, fn: Job, *args: Any, deadline: float = DEADLINE_S, **kwargs: Any) -> list[Any]:
        """What `fn(*args, **kwargs)` returned on each of `size` ranks."""
        return self.world(size).run(fn, *args, deadline=deadline, **kwargs)

    def errors(self, size: int, fn: Job, *args: Any, deadline: float = DEADLINE_S, **kwargs: Any) -> list[str | None]:
        """What `fn(*args, **kwargs)` raised on each of `size` ranks, as "TypeName: message"."""
        return self.world(size).errors(fn, *args, deadline=deadline, **kwargs)

    def throwaway(
        self,
        size: int,
        fn: Job,
        *args: Any,
        deadline: float = DEADLINE_S,
        group_timeout_s: float = GROUP_TIMEOUT_S,
        join_group: bool = True,
        **kwargs: Any,
    ) -> list[Ending]:
        """How `fn` ended on each rank of a world of its own, in which ranks may die.

        With `join_group=False` the ranks have torchrun's environment but no process group yet.
        """
        with World(size, group_timeout_s=group_timeout_s, join_group=join_group) as world:
            return world.endings(fn, *args, deadline=deadline, **kwargs)

    def close(self) -> None:
        while self._worlds:
            self._worlds.popitem()[1].close()
