"""A process that has imported everything, and forks ranks of the trainer as often as it is asked to.

Importing torch takes seconds, and a test that kills ranks sixty times starts them sixty times. The nursery computes
nothing itself, so that a fork of it has no threads to miss. Asked on its standard input, it answers on its standard
output, a line of JSON each: `{"settings": ..., "log": ...}` starts two ranks and gives their processes' ids;
`{"wait_s": ...}` waits for them, ends those that are left by then, and gives their exit codes.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

NUM_RANKS = 2


class Nursery:
    """The side of whoever asks."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).resolve().parents[2],
        )
        self._answer()

    def start(self, settings: str, log: Path) -> list[int]:
        """The processes of the ranks. What they say goes to `log`, and `log` with their number."""
        return self._ask({"settings": settings, "log": str(log)})

    def wait(self, wait_s: float) -> list[int]:
        """How they ended, as `subprocess` says it; -9 also for those that were ended here."""
        return self._ask({"wait_s": wait_s})

    def _ask(self, message: dict[str, Any]) -> list[int]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> list[int]:
        assert self._process.stdout is not None
        answer: list[int] = json.loads(self._process.stdout.readline())
        return answer

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()  # it ends with its standard input, and takes its ranks along


def main() -> None:
    import torch

    import shardwise.trainer.run  # noqa: F401  what a rank would wait for

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    pids: list[int] = []
    print("[]", file=answers, flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        if "settings" in message:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            pids = [_fork(rank, port, message["settings"], message["log"]) for rank in range(NUM_RANKS)]
            print(json.dumps(pids), file=answers, flush=True)
        else:
            print(
                json.dumps([_wait(pid, time.monotonic() + message["wait_s"]) for pid in pids]), file=answers, flush=True
            )


def _fork(rank: int, port: int, settings: str, log: str) -> int:
    pid = os.fork()
    if pid == 0:
        _be_a_rank(rank, port, settings, f"{log}-{rank}" if rank else log)
    return pid


def _be_a_rank(rank: int, port: int, settings: str, log: str) -> NoReturn:
    import torch.multiprocessing

    from shardwise.trainer.run import run_rank

    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # type: ignore[attr-defined]
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(NUM_RANKS),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(NUM_RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        code = run_rank(settings)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter that ends: it waits for its threads
    sys.stdout.flush()
    os._exit(code)


def _wait(pid: int, deadline: float) -> int:
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main()
