"""The status of a run that is starting: what it waits for, until its first lines are printed.

On a terminal it is one moving line; otherwise it is a plain line whenever another PLAIN_S have passed. The launcher
shows it first, then rank 0, which waits in `take_terminal` until the launcher's line is gone: only one process at a
time draws on a terminal.
"""

import sys
import threading
import time
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.status import Status
from rich.text import Text

PLAIN_S = 10.0
MAX_WAIT_S = 2.0  # for a launcher that is busy
MARK = "terminal-is-used"


class StartStatus:
    """A context manager. `show` may be called again after `stop`. What this process prints comes out above the line."""

    def __init__(self, is_shown: bool = True) -> None:
        self._is_shown, self._console = is_shown, Console(highlight=False)
        is_terminal = sys.stderr.isatty() and self._console.is_terminal and not self._console.is_dumb_terminal
        self._line = Status("", console=self._console) if is_terminal else None
        self._text, self._since_s, self._stopped = "", 0.0, threading.Event()
        self._stopped.set()

    def show(self, text: str) -> None:
        self._text, self._since_s = text, time.monotonic()
        if self._is_shown and self._line is not None:
            self._line.update(Text(text))
            self._line.start()
        elif self._is_shown and self._stopped.is_set():
            self._stopped = threading.Event()
            threading.Thread(target=self._print_plainly, args=(self._stopped,), daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        if self._line is not None:
            self._line.stop()

    def say(self, text: str) -> None:
        """Print a text as it is. Lines that are printed otherwise are wrapped to the terminal."""
        self._console.print(Text(text), soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._console.show_cursor()  # a rank that was killed has left it hidden

    def _print_plainly(self, stopped: threading.Event) -> None:
        while not stopped.wait(PLAIN_S):
            passed_s = time.monotonic() - self._since_s
            print(f"shardwise: still {self._text} ({passed_s:.0f} s)", file=sys.stderr, flush=True)


def take_terminal(folder: Path) -> None:
    """Wait until the launcher has removed its mark from the folder of the ranks' notes, and so its line."""
    end_s = time.monotonic() + MAX_WAIT_S
    while (folder / MARK).exists() and time.monotonic() < end_s:
        time.sleep(0.01)
