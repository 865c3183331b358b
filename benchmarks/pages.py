"""What a benchmark leaves: a dated page for people and JSON for programs, both with the command and the machine."""

import datetime
import json
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Page:
    """`before` are paragraphs in front of the command, `after` those behind the machine; `figures` go to the JSON."""

    benchmark: str  # the module of this folder
    title: str
    began: datetime.datetime  # a page that is written again keeps its name
    machine: Mapping[str, Any]
    figures: Mapping[str, Any]
    before: Sequence[str] = ()
    after: Sequence[str] = ()
    variant: str = ""  # what tells its files from others of the same benchmark

    @property
    def about(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "command": shlex.join(["python", "-m", f"benchmarks.{self.benchmark}", *sys.argv[1:]]),
            "date": f"{self.began:%Y-%m-%d %H:%M}",
            "machine": dict(self.machine),
        }

    @property
    def name(self) -> str:
        words = f"{self.began:%Y-%m-%d-%H%M}", self.benchmark.replace("_", "-"), self.variant
        return "-".join(filter(None, words))

    def __str__(self) -> str:
        about = self.about
        described = ", ".join(f"{key} {value}" for key, value in self.machine.items())
        head = [f"# {self.title}, {about['date']}", *self.before, f"    {about['command']}", described]
        return "\n\n".join([*head, *self.after]) + "\n"


def write(page: Page, folder: Path) -> Path:
    """The path of the page; the JSON is beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{page.name}.json").write_text(json.dumps({**page.about, **page.figures}, indent=1) + "\n")
    path = folder / f"{page.name}.md"
    path.write_text(str(page))
    return path


def show(page: Page, folder: Path | None) -> None:
    """On the terminal, and in the folder if there is one."""
    print(page)
    if folder is not None:
        write(page, folder)


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    titles = list(heads)
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (titles, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(titles), *lines[1:]])


def spread(values: Iterable[float], digits: int = 2) -> str:
    each = list(values)
    return f"{statistics.median(each):.{digits}f} ({min(each):.{digits}f}-{max(each):.{digits}f})"
