"""Pages of the benchmarks in this folder: named after the date and the script, with its command."""

import datetime
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.bench.pages import Page, markdown_table

table = markdown_table


def benchmark_page(
    benchmark: str,
    title: str,
    began: datetime.datetime,
    machine: Mapping[str, Any],
    figures: Mapping[str, Any],
    before: Sequence[str] = (),
    after: Sequence[str] = (),
) -> Page:
    """The page of the module `benchmark`. A page that is written again keeps its date, and so its name."""
    command = shlex.join(["python", "-m", f"benchmarks.{benchmark}", *sys.argv[1:]])
    return Page(title, command, machine, figures, before, after, began)


def write(page: Page, folder: Path, variant: str = "") -> Path:
    """Write the page and the JSON. `variant` distinguishes files of the same benchmark. Return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    benchmark = page.command.split()[2].removeprefix("benchmarks.").replace("_", "-")
    name = "-".join(filter(None, (f"{page.date:%Y-%m-%d-%H%M}", benchmark, variant)))
    path = folder / f"{name}.md"
    page.write(path)
    return path


def show(page: Page, folder: Path | None, variant: str = "") -> None:
    """Print the page, and write it if there is a folder."""
    print(page)
    if folder is not None:
        write(page, folder, variant)


def spread(values: Iterable[float], digits: int = 2) -> str:
    each = list(values)
    return f"{statistics.median(each):.{digits}f} ({min(each):.{digits}f}-{max(each):.{digits}f})"
