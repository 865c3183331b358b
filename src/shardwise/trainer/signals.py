"""Requests to a rank between two steps: to stop, or to save.

SIGTERM, SIGUSR1 and SIGHUP ask to stop with exit code 143. A user can create a file SAVE or STOP in the run folder;
STOP is like Ctrl-C, exit code 130. A signal only sets a flag. The loop reads it on every rank at the end of a step, and
a request to any rank is a request to all of them.

Ctrl-C reaches every process of a terminal. A rank under `launch` ignores it: the launcher counts how often it came, and
sends SIGUSR2 to its ranks. A rank under torchrun or srun has no such launcher, and counts by itself.

A terminal may be closed. SIGHUP reports that late, and only to the leader of the session. So a rank notices it by a
write that fails, and from then on discards its output.
"""

import errno
import io
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

INTERRUPTED, TERMINATED = 130, 143

# Signals that the launcher sends to its ranks, by the exit code with which they should stop.
REQUEST_SIGNALS = {INTERRUPTED: signal.SIGUSR2, TERMINATED: signal.SIGUSR1}
STOP_SIGNALS = {signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}
# SIGINTs within this time count as one: torchrun passes on the one that ranks already have from the terminal.
ONE_CTRL_C_S = 1.0
CHECK_FILES_S = 0.2  # interval: the run folder may be on a network


@dataclass(slots=True)
class _Received:
    """Signals that this process has received since `listen`."""

    has_launcher: bool = False
    stop: int | None = None
    interrupted_s: float | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            self.interrupted_s = self.interrupted_s or now
            if now - self.interrupted_s > ONE_CTRL_C_S:
                signal.default_int_handler(number, frame)
        self.stop = self.stop or (INTERRUPTED if number in (signal.SIGINT, signal.SIGUSR2) else TERMINATED)


_received = _Received()


def listen(*, has_launcher: bool) -> None:
    """Handle signals as requests from here on. Called in the main thread of a rank, after its output is redirected."""
    _received.has_launcher = has_launcher
    sys.stdout, sys.stderr = _surviving(sys.stdout), _surviving(sys.stderr)
    handled = {*STOP_SIGNALS, signal.SIGUSR2} if has_launcher else STOP_SIGNALS
    for number in handled:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _received.handle)
    # Processes that this rank starts (compilers, a tracker's service) inherit that SIGINT is ignored, and survive too.
    signal.signal(signal.SIGINT, signal.SIG_IGN if has_launcher else _received.handle)
    # The launcher has blocked these signals in its ranks until there is a handler.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*handled, signal.SIGINT})


def has_launcher() -> bool:
    """Return whether our launcher has made the checks and started this rank."""
    return _received.has_launcher


class Requests:
    """Requests, read at the end of every step. `folder` is the run folder on the rank that watches it, else None."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._checked_s = 0.0

    def read(self) -> tuple[int | None, bool]:
        """Return the requested exit code (None: go on), and whether a checkpoint is requested since the last call."""
        save, now = False, time.monotonic()
        if self._folder is not None and now - self._checked_s >= CHECK_FILES_S:
            self._checked_s = now
            with suppress(OSError):
                (self._folder / "SAVE").unlink()
                save = True
            with suppress(OSError):
                (self._folder / "STOP").unlink()
                _received.stop = _received.stop or INTERRUPTED
        return _received.stop, save


class _Terminal(io.FileIO):
    """Discards output once the terminal is gone: an error would end a run in the middle of its save."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        return super().write(data)


def _surviving(stream: TextIO) -> TextIO:
    """Return the stream, or one for the same terminal that discards output once the terminal is gone."""
    if not stream.isatty():
        return stream
    stream.flush()
    raw = _Terminal(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=True)
