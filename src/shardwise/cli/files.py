"""What the verbs about checkpoints share: whether it is there, sizes as people write them, a bar for the patient."""

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ..base.errors import ConfigurationError, printable

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def say(*lines: str) -> None:
    """Print lines in which anybody's names may stand."""
    for line in lines:
        print(printable(line))


def require_there(path: Path) -> None:
    """A checkpoint may also lie complete under its other name."""
    try:
        is_there = path.exists() or path.with_name(f"{path.name}.partial").exists()
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or error}") from error
    if not is_there:
        raise ConfigurationError(f"{path}: there is no such folder")


def num_bytes_in(option: str, text: str) -> int:
    """5GB, 500MB, 1.5GiB, or a number of bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?|)B?", text.strip().upper())
    num_bytes = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if num_bytes < 1:
        raise ConfigurationError(f"{option}: {text!r} is no size; write 5GB, 500MB, 2GiB or a number of bytes")
    return num_bytes


@contextmanager
def streaming(what: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Around work on many bytes: on a terminal a bar, elsewhere nothing. SIGTERM ends it as Ctrl-C does: tidily."""
    import torch
    from rich import progress
    from rich.console import Console

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    torch.set_num_threads(1)  # copying blocks is for one; more would wait for each other, busily
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
    with progress.Progress(*columns, console=console, transient=True) as shown:
        yield partial(shown.advance, shown.add_task(printable(what), total=num_bytes))
