"""Starting worker processes. Every run has fresh ones, so that no contender inherits allocator, caches or hooks.

`launch` starts the ranks of one case (one process for an emulated fabric or a contender without a process group),
waits for them, and returns their answers. No worker outlives the launcher, however it ends.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..base.processes import as_child, temporary_folder
from ..trainer.loopback import ADDRESS, rank_variables, store_at
from .case import SINGLE_PROCESS, Case


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answers of one run, by rank; or a status other than ok, and why."""

    answers: tuple[dict[str, Any], ...] = ()
    status: str = "ok"
    error: str = ""


Calls = dict[str, float]  # of Python functions, by name
Launch = Callable[[Case], Outcome]
Say = Callable[[str], None]  # prints a line of progress


def num_processes(case: Case) -> int:
    return 1 if case.fabric or case.contender in SINGLE_PROCESS else case.world_size


def launch(case: Case, timeout_s: float) -> Outcome:
    """Run one case. Inside `disk_path` it has a temporary folder, because some peers leave files behind."""
    if not case.disk_path:
        return _launch(case, timeout_s)
    with temporary_folder(case.disk_path) as own:
        return _launch(replace(case, disk_path=str(own)), timeout_s)


def _launch(case: Case, timeout_s: float) -> Outcome:
    with temporary_folder() as folder:
        ranks = range(num_processes(case))
        files = [folder / f"rank{rank}.json" for rank in ranks]
        logs = [folder / f"rank{rank}.log" for rank in ranks]
        store = store_at(ADDRESS)
        joining = rank_variables(store, os.environ)
        workers: list[subprocess.Popen[bytes]] = []
        try:
            for rank, file, log in zip(ranks, files, logs, strict=True):
                command = [sys.executable, "-m", "shardwise.bench.measure", case.to_json(), str(file)]
                variables = as_child({**environment(case, rank, store.port), **joining})
                with log.open("w") as sink:
                    workers.append(subprocess.Popen(command, env=variables, stdout=sink, stderr=subprocess.STDOUT))
            is_late = _wait(workers, timeout_s)
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
                worker.wait()
        answers = [json.loads(file.read_text()) if file.exists() else {} for file in files]
        failures = sorted((answer for answer in answers if "status" in answer), key=lambda answer: answer["at"])
        if failures:
            return Outcome(status=failures[0]["status"], error=failures[0]["error"])
        if all(answers) and not is_late:
            return Outcome(answers=tuple(answers))
        if is_late:
            return Outcome(status="failed", error=f"still running after {timeout_s:g} s")
        lost = next(rank for rank in ranks if not answers[rank])
        return _death(lost, workers[lost].returncode, logs[lost].read_text())


def environment(case: Case, rank: int, port: int) -> dict[str, str]:
    """Torchrun's variables. For an emulated fabric they describe the emulated world."""
    world_size = 1 if case.contender in SINGLE_PROCESS else case.world_size
    return {
        "OMP_NUM_THREADS": str(num_threads(case)),  # overridden by the user's value
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(min(case.node_size, world_size)),
        "LOCAL_SIZE": str(min(case.node_size, world_size)),  # DeepSpeed's name for it
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": case.device,
    }


def num_threads(case: Case) -> int:
    """Threads per process: one for CPU ranks, as with torchrun; for GPU ranks an equal share of the cores.

    A contender that updates weights on the host uses all of them.
    """
    if case.device == "cpu":
        return 1
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, num_cores // num_processes(case))


def _wait(workers: list[subprocess.Popen[bytes]], timeout_s: float) -> bool:
    """Wait until all workers are done or one has failed. Return True if the time limit was reached first."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        codes = [worker.poll() for worker in workers]
        if all(code == 0 for code in codes):
            return False
        if any(codes):
            time.sleep(1.0)  # another rank may be writing down that it failed first
            return False
        time.sleep(0.05)
    return True


def _death(rank: int, code: int | None, log: str) -> Outcome:
    """The outcome of a worker that ended without an answer."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
        return Outcome(status="failed", error=f"rank {rank} was ended by {name}{hint}")
    last = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "nothing")
    return Outcome(status="failed", error=f"rank {rank} ended with exit code {code}; its last output: {last}")
