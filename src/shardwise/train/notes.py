"""What the ranks of a machine write down for their launcher, in a private folder: that they run, and how they ended.

The agent tells of one failed rank, not always of the first: a rank that breaks takes its partners with it, and the
agent may see them first. A note is written before its rank lets go of its partners, so the oldest one is the cause.
"""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


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
