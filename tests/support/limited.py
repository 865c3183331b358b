"""The command line in processes of their own, each with a limit on its time and its memory.

One process imports torch and the commands, and forks: a command then costs milliseconds. Asked on its standard input,
it answers on its standard output, a line of JSON each.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ending:
    """`code`: as `subprocess` says it, negative where the time was not enough."""

    code: int
    text: str  # both streams
    cpu_s: float
    peak_bytes: int  # resident, of which torch has some 200 MB


class Limited:
    """The side of whoever asks. `cpu_s`: of work; who waits, does so for ten times as long at most. `num_bytes`: of
    memory, beside what torch itself takes."""

    def __init__(self, cpu_s: int, num_bytes: int) -> None:
        words = [sys.executable, "-m", __name__, str(cpu_s), str(num_bytes)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )

    def __call__(self, *words: object) -> Ending:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(word) for word in words]) + "\n")
        self._process.stdin.flush()
        return Ending(**json.loads(self._process.stdout.readline()))

    def __enter__(self) -> "Limited":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()  # it ends with its standard input


def _main(cpu_s: int, num_bytes: int) -> None:
    import shardwise.checkpoint.interop.dcp_write
    import shardwise.checkpoint.verification
    import shardwise.checkpoint.writer  # noqa: F401  what a command would import
    from shardwise.cli import app  # noqa: F401

    for line in sys.stdin:
        with tempfile.TemporaryFile() as said:
            pid = os.fork()
            if pid == 0:
                _run(json.loads(line), said.fileno(), cpu_s, num_bytes)
            code, usage = _wait(pid, time.monotonic() + 10 * cpu_s)
            said.seek(0)
            text = said.read().decode(errors="surrogateescape")
        ending = Ending(code, text, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)
        print(json.dumps(asdict(ending)), flush=True)


def _run(words: Sequence[str], said: int, cpu_s: int, num_bytes: int) -> NoReturn:
    code = 70
    try:
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        used = 1024 * int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0])
        resource.setrlimit(resource.RLIMIT_DATA, (used + num_bytes, used + num_bytes))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        sys.argv = ["shardwise", *words]
        from shardwise.cli import main

        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:  # noqa: BLE001  a traceback is what a test looks for
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pid: int, deadline: float) -> tuple[int, resource.struct_rusage]:
    while True:
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status), usage
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]))
