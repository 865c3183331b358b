"""Starting worker processes. Every run has fresh ones, so that no contender inherits allocator, caches or hooks.

`launch` starts the ranks of one case (one process for an emulated fabric or a contender without a process group),
waits for them, and returns their answers (the JSON that each writes). If the launcher dies, its workers end, too.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from ..base.processes import as_child, temporary_folder
from ..trainer.loopback import ADDRESS, rank_variables, store_at
from .case import SINGLE_PROCESS, Case


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answers of one run, by rank; or a status other than ok, and the reason."""

    answers: tuple[dict[str, Any], ...] = ()
    status: str = "ok"
    error: str = ""


Calls = dict[str, float]  # number of calls of each Python function, by name
Launch = Callable[[Case], Outcome]
Say = Callable[[str], None]  # prints a line of progress


def num_processes(case: Case) -> int:
    return 1 if case.fabric or case.contender in SINGLE_PROCESS else case.world_size


def launch(case: Case, timeout_s: float, module: str = "shardwise.bench.measure") -> Outcome:
    """Run one case. It gets a temporary folder in `disk_path`, because some peers leave files behind. `module`:
    what the processes run."""
    on_disk = temporary_folder(case.disk_path) if case.disk_path else nullcontext("")
    with temporary_folder() as folder, on_disk as own:
        question = replace(case, disk_path=str(own)).to_json()
        ranks = range(num_processes(case))
        files, logs = ([folder / f"rank{rank}.{suffix}" for rank in ranks] for suffix in ("json", "log"))
        store = store_at(ADDRESS)
        joining = rank_variables(store, os.environ)
        workers: list[subprocess.Popen[bytes]] = []
        try:
            for rank in ranks:
                command = [sys.executable, "-m", module, question, str(files[rank])]
                variables = as_child({**environment(case, rank, store.port), **joining})
                with logs[rank].open("w") as sink:
                    workers.append(subprocess.Popen(command, env=variables, stdout=sink, stderr=subprocess.STDOUT))
            is_late = _wait(workers, timeout_s)
        finally:
            for worker in workers:
                worker.kill()  # does nothing to workers that have ended
                worker.wait()
        answers = [json.loads(file.read_text()) if file.exists() else {} for file in files]
        failures = sorted((answer for answer in answers if "status" in answer), key=lambda answer: answer["at"])
        if failures:
            return Outcome(status=failures[0]["status"], error=failures[0]["error"])
        if is_late:
            return Outcome(status="failed", error=f"still running after {timeout_s:g} s")
        for rank, answer in enumerate(answers):
            if not answer:
                return Outcome(status="failed", error=_death(rank, workers[rank].returncode, logs[rank].read_text()))
        return Outcome(answers=tuple(answers))


def environment(case: Case, rank: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set. For an emulated fabric they describe the emulated world.

    A CPU rank has one thread, as with torchrun. A GPU rank has as many threads as its equal share of the cores, for
    contenders that update weights on the host.
    """
    world_size = 1 if case.contender in SINGLE_PROCESS else case.world_size
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    num_threads = 1 if case.device == "cpu" else max(1, num_cores // num_processes(case))
    return {
        "OMP_NUM_THREADS": str(num_threads),  # overridden by the user's value
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


def _wait(workers: list[subprocess.Popen[bytes]], timeout_s: float) -> bool:
    """Wait until all workers are done or one has failed. Return True if the time limit was reached first."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        codes = [worker.poll() for worker in workers]
        if all(code == 0 for code in codes):
            return False
        if any(codes):
            time.sleep(1.0)  # another rank may have failed earlier, and still be writing its error
            return False
        time.sleep(0.05)
    return True


def _death(rank: int, code: int, log: str) -> str:
    """Describe why a worker ended without an answer."""
    if code < 0:
        name = signal.Signals(-code).name
        hint = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
        return f"rank {rank} was ended by {name}{hint}"
    last = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "nothing")
    return f"rank {rank} ended with exit code {code}; its last output: {last}"
