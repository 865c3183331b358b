"""The place of this process's main thread, for reports about ranks that wait."""

import linecache
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import torch

NUM_FRAMES = 6
# Processor seconds between two looks that count as idle: a thread that only wakes up and sleeps again uses less.
LITTLE_S = 0.02
_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
_BARRIERS = ("barrier", "monitored_barrier")


def stack_of_main() -> list[str]:
    """The innermost calls, the last one first."""
    return [_line(frame) for frame in _frames()[:NUM_FRAMES]]


def caller() -> str:
    """The innermost call that is not one of torch or of this library."""
    for frame in _frames():
        if not frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
            return f"called from {_line(frame)}"
    return ""


class Idle:
    """Measures how long the main thread has been at one place without using a processor."""

    def __init__(self) -> None:
        self._seen: tuple[str, float] = ("", 0.0)
        self._since_s = time.monotonic()

    def seconds(self, where: str) -> float:
        ident = threading.main_thread().ident
        used_s = 0.0 if ident is None else time.clock_gettime(time.pthread_getcpuclockid(ident))
        at, before_s = self._seen
        self._seen = (where, used_s)
        if where != at or used_s - before_s > LITTLE_S:
            self._since_s = time.monotonic()
        return time.monotonic() - self._since_s


def is_in_barrier() -> bool:
    return any(
        frame.f_code.co_name in _BARRIERS and frame.f_code.co_filename.startswith(_LIBRARIES[1])
        for frame in _frames()[:NUM_FRAMES]
    )


def _frames() -> list[FrameType]:
    found: list[FrameType] = []
    ident = threading.main_thread().ident
    frame = None if ident is None else sys._current_frames().get(ident)
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _line(frame: FrameType) -> str:
    code = frame.f_code
    text = linecache.getline(code.co_filename, frame.f_lineno).strip()
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}: {text}"
