"""Helpers that several commands use: printing, checks of paths and sizes, progress bars, and the end of a benchmark."""

import json
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..base.errors import ConfigurationError, did_you_mean, printable

if TYPE_CHECKING:
    from ..bench.pages import Report

JSON_HELP = "Print JSON to the standard output."
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def panels(*titles: str) -> Iterator[Any]:
    """For each panel of the help, a `typer.Option` that belongs to it."""
    return (partial(typer.Option, rich_help_panel=title) for title in titles)


def say(*lines: str) -> None:
    """Print lines that may contain names from files; control characters are escaped."""
    for line in lines:
        print(printable(line))


def progress(line: str) -> None:
    """Print a line of progress to the standard error."""
    print(line, file=sys.stderr, flush=True)


def require_exists(path: Path) -> None:
    """Raise ConfigurationError unless the path exists. A complete checkpoint may still have its temporary name."""
    try:
        exists = path.exists() or path.with_name(f"{path.name}.partial").exists()
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or error}") from error
    if not exists:
        raise ConfigurationError(f"{path}: there is no such folder")


def require_known(option: str, word: str, known: Iterable[str]) -> str:
    if word not in known:
        raise ConfigurationError(f"{option}: unknown {word!r}; {did_you_mean(word, known)}")
    return word


def num_bytes_in(option: str, text: str) -> int:
    """Parse 5GB, 500MB, 1.5GiB, or a number of bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?|)B?", text.strip().upper())
    num_bytes = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if num_bytes < 1:
        raise ConfigurationError(f"{option}: {text!r} is not a size; write 5GB, 500MB, 2GiB or a number of bytes")
    return num_bytes


def write_file(file: Path, text: str) -> None:
    """Write a file that is complete or absent. A device or pipe is written directly."""
    draft = file if file.exists() and not file.is_file() else file.with_name(f"{file.name}.draft")
    try:
        draft.write_text(text)
        if draft is not file:
            draft.replace(file)
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be written: {error.strerror or error}") from error


def exit_on_sigterm() -> None:
    """Turn SIGTERM into an exception, so that everything that was started is stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@contextmanager
def progress_bar(title: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Work on many bytes: shows a bar on a terminal. SIGTERM ends the work as tidily as Ctrl-C does."""
    import torch
    from rich import progress
    from rich.console import Console

    exit_on_sigterm()
    torch.set_num_threads(1)  # copying blocks is work for one thread; more would only wait for each other
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda num: None
        return
    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, transient=True) as bar:
        yield partial(bar.advance, bar.add_task(printable(title), total=num_bytes))


def run_benchmark(reports: "Iterable[Report]", new_page: Callable[[], Path] | None, as_json: bool) -> typer.Exit:
    """Run a benchmark that yields a report after every run. Return the exit, to be raised.

    The page is rewritten after every run, so an interrupted benchmark keeps its results. `new_page` gives its path;
    None: no files are written.
    """
    page: Path | None = None
    try:
        for report in reports:
            if new_page is not None:
                page = page or new_page()
                report.page.write(page)
    except KeyboardInterrupt:
        saved = f"the results so far are in {page}" if page is not None else "nothing was written"
        progress(f"interrupted; everything that was started is stopped, and {saved}")
        return typer.Exit(130)
    if as_json:
        print(json.dumps(report.page.document, indent=1))
    else:
        report.show()
    if page is not None:
        progress(f"written: {page}")
    return typer.Exit(1 if report.problems else 0)
