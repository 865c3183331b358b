"""Counting Python function calls: those that sharding adds to a step are paid for by the host, unit by unit.

A call is what the interpreter sees begin or go on: a function, or a generator that is resumed. Threads that torch
starts for the backward count too.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

Calls = dict[str, float]


def count_calls(function: Callable[[], object]) -> Calls:
    """Calls by "folder/file.py:function" while `function` runs."""
    by_code: Counter[CodeType] = Counter()
    if sys.version_info >= (3, 12):
        _watch_everywhere(function, by_code)
    else:
        _watch_this_thread(function, by_code)
    by_name: Counter[str] = Counter()
    for code, times in by_code.items():
        by_name[f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_qualname}"] += times
    return dict(by_name)


def subtract(calls: Calls, others: Calls) -> Calls:
    names = {*calls, *others}
    return {name: calls.get(name, 0) - others.get(name, 0) for name in names}


def _watch_everywhere(function: Callable[[], object], calls: Counter[CodeType]) -> None:
    watch: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
    begun = watch.events.PY_START | watch.events.PY_RESUME

    def on_call(code: CodeType, _: int) -> None:
        calls[code] += 1

    watch.use_tool_id(watch.PROFILER_ID, "shardwise")
    watch.register_callback(watch.PROFILER_ID, watch.events.PY_START, on_call)
    watch.register_callback(watch.PROFILER_ID, watch.events.PY_RESUME, on_call)
    watch.set_events(watch.PROFILER_ID, begun)
    try:
        function()
    finally:
        watch.set_events(watch.PROFILER_ID, 0)
        watch.free_tool_id(watch.PROFILER_ID)


def _watch_this_thread(function: Callable[[], object], calls: Counter[CodeType]) -> None:
    """Before Python 3.12 threads of others cannot be watched: the backward has to run in this one."""

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls[frame.f_code] += 1

    threading.setprofile(on_event)  # threads that start from now on
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(on_event)
        try:
            function()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
