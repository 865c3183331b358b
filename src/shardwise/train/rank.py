"""A rank that the launcher's agent has started, from its first line to its exit code.

It dies with its launcher, writes to its own log unless it is rank 0, hears signals, and runs the entry. An ending
that was decided (any exit code) is returned: what is raised is a crash, after which the agent may start it again.
"""

import io
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path

import torch.multiprocessing

from ..errors import SaveError, StoreError
from . import notes, signals


@dataclass(frozen=True, slots=True)
class Task:
    """What a rank is started with. `entry` is MODULE:FUNCTION, of settings as JSON, so that only ranks import it."""

    entry: str
    settings: str
    logs: str
    launcher_pid: int


def run_task(task: Task) -> int:
    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # type: ignore[attr-defined]
    if os.getppid() != task.launcher_pid:  # it died before it was asked to take this rank along
        os._exit(1)
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent
    log = str(Path(task.logs) / f"rank-{rank:05}.log") if rank else ""
    if log:
        _write_to(log, rank)
    signals.listen(has_launcher=True)
    notes.write(folder, notes.Started(rank, local_rank, os.getpid(), log))
    try:
        code = call(task.entry, task.settings)
    except Exception as error:
        raised_s = time.time()
        # From the entry on: what called it is ours, and the same for every failure. A disk's failure is a sentence.
        stack = error.__traceback__ and error.__traceback__.tb_next and error.__traceback__.tb_next.tb_next
        lines = traceback.format_exception(error.with_traceback(stack))
        text = f"{error}\n" if isinstance(error, SaveError | StoreError) else "".join(lines)
        notes.write(folder, notes.Ended(local_rank, raised_s, error=text))
        if log:
            print(text, file=sys.stderr, flush=True)
        raise
    notes.write(folder, notes.Ended(local_rank, time.time(), code=code))
    return code


def call(entry: str, settings: str) -> int:
    """The exit code of an entry; `sys.exit` in it is an ending like any other."""
    module, _, name = entry.partition(":")
    try:
        code = getattr(import_module(module), name)(settings)
    except SystemExit as end:
        code = end.code
    return code if isinstance(code, int) else int(code is not None)


def _write_to(log: str, rank: int) -> None:
    """Both streams into one file, behind what an earlier start has left there."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        stream.flush()
        os.dup2(file, number)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    os.close(file)
    print(f"--- rank {rank}, process {os.getpid()}, {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z} ---", flush=True)
