"""What the ranks of a machine write down for their launcher, in a private folder: that they run, and how they ended.

The agent tells of one failed rank, not always of the first: a rank that breaks takes its partners with it, and the
agent may see them first. A note is written before its rank lets go of its partners, so the oldest one is the cause.
"""

import dataclasses
import faulthandler
import json
import linecache
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Makes a rank write its stack down.
TELL_STACK = signal.SIGVTALRM
NUM_FRAMES = 3
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Started:
    rank: int
    local_rank: int
    pid: int
    log: str  # where it writes; "": the terminal


@dataclass(frozen=True, slots=True)
class Ended:
    """`code` is what it returned; None: it raised, and `error` is the traceback."""

    local_rank: int
    time_s: float
    code: int | None = None
    error: str = ""


def write(folder: Path, note: Started | Ended) -> None:
    file = folder / f"{type(note).__name__.lower()}-{note.local_rank}.json"
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(dataclasses.asdict(note)))
    draft.replace(file)


def started(folder: Path) -> Iterator[Started]:
    for file in folder.glob("started-*.json"):
        yield Started(**json.loads(file.read_text()))


def ended(folder: Path) -> Iterator[Ended]:
    for file in folder.glob("ended-*.json"):
        yield Ended(**json.loads(file.read_text()))


def offer_stack(folder: Path, local_rank: int) -> None:
    """From here on this rank can be asked with TELL_STACK. Python's own handler answers, whatever the rank does."""
    # It keeps the file open.
    faulthandler.register(TELL_STACK, _stack_file(folder, local_rank).open("w"), all_threads=False)


def stack(folder: Path, rank: Started) -> str:
    """Where a rank was when it was asked, its innermost calls first; "" if it has not answered."""
    frames = _FRAME.findall(_stack_file(folder, rank.local_rank).read_text(errors="replace"))[:NUM_FRAMES]
    lines = [
        f"{file}:{number} in {name}: {linecache.getline(file, int(number)).strip()}" for file, number, name in frames
    ]
    return "is at " + "\n    called from ".join(lines) if lines else ""


def _stack_file(folder: Path, local_rank: int) -> Path:
    return folder / f"stack-{local_rank}.txt"
