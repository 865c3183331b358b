"""Results for readers: tables on the terminal, a dated Markdown page, and the same figures as JSON next to it.

Every page names the command and the machine. `shardwise bench`, `shardwise bench wire` and the scripts in
`benchmarks/` all write their pages with this module.
"""

import datetime
import itertools
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

Columns = Mapping[str, Sequence[str]]  # the cells of each column, by title; the first column names the rows


@dataclass(frozen=True)
class Page:
    """One result, finished or not. Paragraphs `before` are above the command; those `after` are below the machine."""

    title: str
    command: str
    machine: Mapping[str, Any]
    figures: Mapping[str, Any]  # written to the JSON file
    before: Sequence[str] = ()
    after: Sequence[str] = ()
    date: datetime.datetime = field(default_factory=datetime.datetime.now)
    tables: Sequence[tuple[str, Columns]] = ()  # for the terminal, each with a note that explains it
    problems: Sequence[str] = ()

    @property
    def document(self) -> dict[str, Any]:
        """The content of the JSON file."""
        about = {"command": self.command, "date": f"{self.date:%Y-%m-%d %H:%M}", "machine": dict(self.machine)}
        return {"schema": 1, **about, **self.figures}

    def __str__(self) -> str:
        machine = ", ".join(f"{key} {value}" for key, value in self.machine.items())
        head = [f"# {self.title}, {self.date:%Y-%m-%d %H:%M}", *self.before, f"    {self.command}", machine]
        return "\n\n".join([*head, *self.after]) + "\n"

    def write(self, path: Path) -> None:
        """Write the page to `path` and the JSON next to it."""
        path.with_suffix(".json").write_text(json.dumps(self.document, indent=1) + "\n")
        path.write_text(str(self))

    def show(self) -> None:
        """Print all tables. Lines of a wide table continue on the next line of the terminal; nothing is cut."""
        console = Console(highlight=False)
        for note, columns in self.tables:
            table = Table(box=SIMPLE_HEAD, pad_edge=False)
            for index, title in enumerate(columns):
                table.add_column(Text(title), justify="right" if index else "left", no_wrap=True)
            for texts in zip(*columns.values(), strict=True):
                table.add_row(*map(Text, texts))  # no markup: names contain brackets
            needed = console.measure(table, options=console.options.update(max_width=10_000)).maximum
            Console(width=max(console.width, needed)).print(table)
            console.print(note, markup=False)
        for problem in self.problems:
            console.print(problem, style="red", markup=False)


def results_page(
    title: str,
    machine: Mapping[str, Any],
    figures: Mapping[str, Any],
    tables: Sequence[tuple[str, Columns]],
    problems: Sequence[str],
    details: Sequence[str] = (),
) -> Page:
    """Make the page of a command: the first table below its note, then problems, other tables, and more paragraphs."""
    (note, columns), *more = tables
    after = [columns_as_markdown(columns), *(f"- {problem}" for problem in problems)]
    after += [text for words, cells in more for text in (words, columns_as_markdown(cells))]
    command = shlex.join(["shardwise", *sys.argv[1:]])
    about = {"note": note, **figures}
    return Page(title, command, machine, about, [note], [*after, *details], tables=tables, problems=problems)


def new_page(folder: Path, name: str) -> Path:
    """Return the path `<date>-<name>.md` for a new page. If it exists already, a number is added."""
    folder.mkdir(parents=True, exist_ok=True)
    begin = f"{datetime.datetime.now():%Y-%m-%d-%H%M}-{name}"
    names = (begin if number == 1 else f"{begin}-{number}" for number in itertools.count(1))
    return next(folder / f"{name}.md" for name in names if not (folder / f"{name}.json").exists())


def machine(device: str, torch_version: str) -> dict[str, Any]:
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "device": device,
        "python": platform.python_version(),
        "torch": torch_version,
        "commit": commit(),
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str:
    """Return the git commit of the checkout that contains this file, or "none"."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.check_output(command, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"


def cells(rows: Sequence[Mapping[str, Any]], key: str, form: str = "", unit: float | None = None) -> list[str]:
    """Return one column as text, with this format and unit. Unknown values are empty."""
    values = [row.get(key) for row in rows]
    return ["" if value is None else f"{value / unit if unit else value:{form}}" for value in values]


def filled(columns: Columns) -> dict[str, Sequence[str]]:
    """Return the columns that have any text."""
    return {title: texts for title, texts in columns.items() if any(texts)}


def markdown_table(titles: Collection[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (titles, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(titles), *lines[1:]])


def columns_as_markdown(columns: Columns) -> str:
    return markdown_table(columns, ([f"`{name}`", *texts] for name, *texts in zip(*columns.values(), strict=True)))
