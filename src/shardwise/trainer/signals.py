"""What a rank has been asked to do between two steps: to stop, or to save.

SIGTERM, SIGUSR1 and SIGHUP ask to stop with exit code 143. The files SAVE and STOP in the run folder are for people:
STOP is a Ctrl-C, exit code 130. Nothing happens at the moment of a signal: it sets a flag, the loop reads it on every
rank at the end of a step, and what any of them was asked is what all of them do.

Ctrl-C reaches every process of a terminal. A rank under `launch` ignores it: the launcher counts how often it came,
and asks its ranks with SIGUSR2. A rank under torchrun or srun has no such launcher, and counts for itself.

A terminal may go away. SIGHUP says so, later, and to the leader of its session alone; so a rank notices by itself,
when it writes, and writes to nowhere from then on.
"""

import errno
import io
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from ..base.errors import ConfigurationError

INTERRUPTED, TERMINATED = 130, 143

# What the launcher sends to a rank that is to end with this code.
ASKS = {INTERRUPTED: signal.SIGUSR2, TERMINATED: signal.SIGUSR1}
STOPPING = {signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}
# Torchrun passes on the SIGINT that its ranks have already had from the terminal.
ONE_CTRL_C_S = 1.0
LOOK_EVERY_S = 0.2  # the run folder may lie across a network


class _Heard:
    """The signals of this process, since `listen`."""

    def __init__(self) -> None:
        self.has_launcher = False
        self.stop: int | None = None
        self.interrupted_s: float | None = None

    def ask(self, code: int) -> None:
        self.stop = self.stop or code

    def take(self, number: int, _: FrameType | None) -> None:
        self.ask(INTERRUPTED if number == signal.SIGUSR2 else TERMINATED)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.interrupted_s is not None and now - self.interrupted_s > ONE_CTRL_C_S:
            signal.default_int_handler(number, frame)
        if self.interrupted_s is None:
            self.interrupted_s = now
        self.ask(INTERRUPTED)


_heard = _Heard()


def listen(*, has_launcher: bool) -> None:
    """From here on signals are requests. For the main thread of a rank, as soon as its streams lead where they will."""
    _heard.has_launcher = has_launcher
    sys.stdout, sys.stderr = _lasting(sys.stdout), _lasting(sys.stderr)
    handled = {*STOPPING, signal.SIGUSR2} if has_launcher else STOPPING
    for number in handled:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, _heard.take)
    # Ignored is inherited by what this rank starts (compilers, a tracker's service): they outlive Ctrl-C as it does.
    signal.signal(signal.SIGINT, signal.SIG_IGN if has_launcher else _heard.interrupt)
    # The launcher blocks them in its ranks until there is somebody to hear them, which is now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*handled, signal.SIGINT})


def has_launcher() -> bool:
    """Whether `launch` started this rank, and has looked at everything before."""
    return _heard.has_launcher


class Requests:
    """Read at the end of every step. `folder` is the run folder on the rank that looks there, None on all others."""

    def __init__(self, folder: Path | None) -> None:
        if folder is not None and not folder.is_dir():
            raise ConfigurationError(f"no run folder {folder}, in which SAVE and STOP could be found")
        self._folder = folder
        self._looked_s = 0.0
        self._save = False

    @property
    def stop(self) -> int | None:
        """The exit code that is asked for; None to go on."""
        self._look()
        return _heard.stop

    @property
    def save(self) -> bool:
        """Whether a checkpoint is asked for: once for each SAVE, so that reading takes it."""
        self._look()
        wanted, self._save = self._save, False
        return wanted

    def _look(self) -> None:
        now = time.monotonic()
        if self._folder is None or now - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now
        self._save |= _taken(self._folder / "SAVE")
        if _taken(self._folder / "STOP"):
            _heard.ask(INTERRUPTED)


def _taken(file: Path) -> bool:
    try:
        file.unlink()
    except OSError:
        return False
    return True


class _Terminal(io.FileIO):
    """When it is gone, this leads nowhere: an error for the next line would end a run in the middle of its save."""

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


def _lasting(stream: TextIO) -> TextIO:
    """The same stream, but one that outlives its terminal."""
    if not stream.isatty():
        return stream
    stream.flush()
    raw = _Terminal(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=True)
