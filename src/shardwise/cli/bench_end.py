"""What `bench` and `bench wire` say while they run, and how they end when they are told to: with what was seen."""

import signal
import sys
from pathlib import Path

import typer


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def end_on_sigterm() -> None:
    """By an exception, which ends what was started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def interrupted(page: Path | None) -> typer.Exit:
    """To be raised in place of KeyboardInterrupt, when everything that was started is stopped."""
    so_far = f"what was seen is in {page}" if page is not None and page.exists() else "nothing was written"
    say(f"interrupted; everything that was started is stopped, and {so_far}")
    return typer.Exit(130)
