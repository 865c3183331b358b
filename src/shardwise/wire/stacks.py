"""Where the main thread of this process is, for reports about ranks that wait."""

import linecache
import sys
import threading
from pathlib import Path
from types import FrameType

import torch

NUM_FRAMES = 6
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
