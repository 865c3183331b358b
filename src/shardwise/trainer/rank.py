"""A rank that the launcher's agent has started, from its first line to its exit code.

It ends with its launcher, writes to its own log unless it is rank 0, handles signals, and calls the function of its
task. An exit code that this function returns is final. After an exception the agent may start the rank again.

In a private folder the rank writes a note for its launcher: that it runs, and later how it ended. The agent reports one
failed rank, not always the first: if a rank fails, ranks that wait for it fail, too, and the agent may see them first.
A rank writes its note before it closes its connections, so the oldest note names the cause.
"""

import dataclasses
import faulthandler
import io
import json
import linecache
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path

from ..base.errors import SaveError, StoreError, WireError
from ..base.processes import end_with
from . import signals
from .start_status import StartStatus, take_terminal

WRITE_STACK = signal.SIGVTALRM  # makes a rank write its stack into the folder of its notes
NUM_FRAMES = 3  # of a stack that are shown
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Task:
    """Arguments of a rank. `entry` is MODULE:FUNCTION, which only ranks import; it takes the settings as JSON."""

    entry: str
    settings: str
    logs: str
    launcher_pid: int


@dataclass(slots=True)
class Note:
    """The note of a rank for its launcher. `ended_s` is set when it ends: with a code, or without one if it raised."""

    rank: int
    local_rank: int
    pid: int
    log: str = ""  # where it writes; "": the terminal
    ended_s: float | None = None
    code: int | None = None
    error: str = ""  # the traceback

    @property
    def has_raised(self) -> bool:
        return self.ended_s is not None and self.code is None


def run_task(task: Task) -> int:
    end_with(task.launcher_pid)
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent
    note = Note(rank, local_rank, os.getpid())
    try:
        if rank:
            note.log = _write_to_log(Path(task.logs) / f"rank-{rank:05}.log", rank)
        signals.listen(has_launcher=True)
        # This handler is written in C, so it works even while the rank is inside a library. It keeps the file open.
        faulthandler.register(WRITE_STACK, _stack_file(folder, local_rank).open("w"), all_threads=False)
        write_note(folder, note)
        if not rank:
            take_terminal(folder)
        with StartStatus(is_shown=not rank) as status:
            status.show("loading torch and the trainer")
            import_module(task.entry.partition(":")[0])
        note.code = call(task.entry, task.settings)
    except Exception as error:  # noqa: BLE001, the launcher reports it
        note.ended_s = time.time()
        # The traceback starts at the entry: the frames above it are the same for every failure. An error of a disk, or
        # of other ranks, is shown without a traceback.
        stack = error.__traceback__ and error.__traceback__.tb_next and error.__traceback__.tb_next.tb_next
        lines = traceback.format_exception(error.with_traceback(stack))
        note.error = f"{error}\n" if isinstance(error, SaveError | StoreError | WireError) else "".join(lines)
        if note.log:
            print(note.error, file=sys.stderr, flush=True)
        try:
            write_note(folder, note)
        except OSError as unwritten:  # the disk of temporary files is full, too
            shown = "" if note.log else note.error
            print(f"{shown}shardwise: {folder} cannot be written: {unwritten.strerror}", file=sys.stderr, flush=True)
        sys.exit(1)  # torch would write a raised error into a file of its own, which nobody removes
    note.ended_s = time.time()
    write_note(folder, note)
    return note.code


def call(entry: str, settings: str) -> int:
    """Return the exit code of an entry; `sys.exit` in it counts as a returned code."""
    module, _, name = entry.partition(":")
    try:
        code = getattr(import_module(module), name)(settings)
    except SystemExit as end:
        code = end.code
    return code if isinstance(code, int) else int(code is not None)


def _write_to_log(log: Path, rank: int) -> str:
    """Redirect stdout and stderr to the end of one file, which may have text of earlier starts. Return its name."""
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise SaveError(f"its log {log} cannot be written: {error.strerror}; is the run folder still there?") from error
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        stream.flush()
        os.dup2(file, number)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    os.close(file)
    print(f"--- rank {rank}, process {os.getpid()}, {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z} ---", flush=True)
    return str(log)


def write_note(folder: Path, note: Note) -> None:
    file = folder / f"rank-{note.local_rank}.json"
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(dataclasses.asdict(note)))
    draft.replace(file)


def read_notes(folder: Path) -> Iterator[Note]:
    for file in folder.glob("rank-*.json"):
        yield Note(**json.loads(file.read_text()))


def stack_of(folder: Path, local_rank: int) -> str:
    """Return the stack of a rank when it got WRITE_STACK, the innermost call first; "" if it has not answered."""
    frames = _FRAME.findall(_stack_file(folder, local_rank).read_text(errors="replace"))[:NUM_FRAMES]
    lines = [
        f"{file}:{number} in {name}: {linecache.getline(file, int(number)).strip()}" for file, number, name in frames
    ]
    return "is at " + "\n    called from ".join(lines) if lines else ""


def _stack_file(folder: Path, local_rank: int) -> Path:
    return folder / f"stack-{local_rank}.txt"
