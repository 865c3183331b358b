"""A rank that the launcher's agent has started, from its first line to its exit code.

It dies with its launcher, writes to its own log unless it is rank 0, hears signals, and runs the entry. An ending
that was decided (any exit code) is returned. A crash is an exit, after which the agent may start it again.
"""

import io
import os
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path

from ..base.errors import SaveError, StoreError, WireError
from ..base.processes import end_with
from . import rank_notes, signals


@dataclass(frozen=True, slots=True)
class Task:
    """What a rank is started with. `entry` is MODULE:FUNCTION, of settings as JSON, so that only ranks import it."""

    entry: str
    settings: str
    logs: str
    launcher_pid: int


def run_task(task: Task) -> int:
    end_with(task.launcher_pid)
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent
    log = str(Path(task.logs) / f"rank-{rank:05}.log") if rank else ""
    try:
        if log:
            _write_to(log, rank)
    except OSError as error:
        rank_notes.write(folder, rank_notes.Started(rank, local_rank, os.getpid(), ""))
        text = f"its log {log} cannot be written: {error.strerror}; is the run folder still there?\n"
        rank_notes.write(folder, rank_notes.Ended(local_rank, time.time(), error=text))
        sys.exit(1)
    signals.listen(has_launcher=True)
    rank_notes.offer_stack(folder, local_rank)
    rank_notes.write(folder, rank_notes.Started(rank, local_rank, os.getpid(), log))
    try:
        code = call(task.entry, task.settings)
    except Exception as error:  # noqa: BLE001, it is told by the launcher
        raised_s = time.time()
        # From the entry on: what called it is ours, and the same for every failure. A failure of a disk, or of other
        # ranks, is a sentence.
        stack = error.__traceback__ and error.__traceback__.tb_next and error.__traceback__.tb_next.tb_next
        lines = traceback.format_exception(error.with_traceback(stack))
        text = f"{error}\n" if isinstance(error, SaveError | StoreError | WireError) else "".join(lines)
        if log:
            print(text, file=sys.stderr, flush=True)
        try:
            rank_notes.write(folder, rank_notes.Ended(local_rank, raised_s, error=text))
        except OSError as unwritten:  # where temporary files go the disk is full, too
            told = "" if log else text
            print(f"{told}shardwise: {folder} cannot be written: {unwritten.strerror}", file=sys.stderr, flush=True)
        sys.exit(1)  # what is raised torch would write into a file of its own, which nobody removes
    rank_notes.write(folder, rank_notes.Ended(local_rank, time.time(), code=code))
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
