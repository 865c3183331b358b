"""Helpers that several commands use: their options and help, printing, checks of paths and sizes, and progress bars."""

import inspect
import re
import signal
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..base.errors import ConfigurationError, did_you_mean, printable

Command = Callable[..., None]
PANELS: Mapping[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("help.toml").read_text())
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def documented(command: Command, more: Iterable[inspect.Parameter] = ()) -> Command:
    """Give a command the help and the options that help.toml has under its name.

    `more`: the options that the command gets as `**flags`. In the help they come before keyword-only parameters.
    """
    panels = dict(PANELS[command.__name__])
    command.__doc__ = panels.pop("help")
    known = {name: (panel, option) for panel, options in panels.items() for name, option in options.items()}
    own = [
        parameter if parameter.annotation is typer.Context else _parameter(parameter, *known[parameter.name])
        for parameter in inspect.signature(command).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    ordered = sorted([*own, *more], key=lambda parameter: parameter.kind is inspect.Parameter.KEYWORD_ONLY)
    named = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in ordered]
    command.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return command


def _parameter(parameter: inspect.Parameter, panel: str, option: Any) -> inspect.Parameter:
    """Return the parameter with its typer option. A switch that is on by default also has a --no flag."""
    words = {"help": option} if isinstance(option, str) else dict(option)
    if panel == "Arguments":
        return parameter.replace(annotation=Annotated[parameter.annotation, typer.Argument(**words)])
    off = [f"--{parameter.name.replace('_', '-')}"] if parameter.default is False else []
    info = typer.Option(*words.pop("flags", off), rich_help_panel=panel, **words)
    return parameter.replace(annotation=Annotated[parameter.annotation, info])


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
    """Turn SIGTERM into SystemExit, so that `finally` blocks run and stop the processes that were started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@contextmanager
def progress_bar(title: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal; yield the function that advances it. SIGTERM cleans up like Ctrl-C."""
    import torch
    from rich import progress
    from rich.console import Console

    exit_on_sigterm()
    torch.set_num_threads(1)  # copying blocks is work for one thread; more threads would only wait
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
