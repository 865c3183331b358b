"""Counting the Python calls that sharding adds to a step.

They are the calls of one whole step (forward, backward, optimizer) after a few warm-up steps, minus those of the plain
model with the plain optimizer. Models of two depths separate the calls per unit from those per step.

A call is the start of a function or the resumption of a generator. Torch's backward threads count too.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from .case import FLOORS, Case
from .launch import Launch, Say

Calls = dict[str, float]

SHALLOW, DEEP = 4, 8  # blocks


@dataclass(frozen=True, slots=True)
class AddedCalls:
    """Python calls that sharding adds to a step: per unit (in total and by function), and once per step."""

    by_function: Calls
    per_unit: float
    besides: float


def added_calls(cases: Sequence[Case], launch: Launch, say: Say) -> dict[Case, AddedCalls]:
    """Added calls by case. Counted once per contender and shape: links and dtypes change no calls."""
    launch = cache(launch)  # the plain model is needed more than once
    found: dict[Case, AddedCalls] = {}
    for case in cases:
        if case.contender not in FLOORS:
            same = (case.contender, case.shape)
            known = (calls for other, calls in found.items() if (other.contender, other.shape) == same)
            added = next(known, None) or _added(case, launch, say)
            if added is not None:
                found[case] = added
    return found


def _added(case: Case, launch: Launch, say: Say) -> AddedCalls | None:
    counted = []
    for num_blocks in (SHALLOW, DEEP):
        sized = replace(case, shape=replace(case.shape, layers=num_blocks), count_calls=True, trace="")
        outcomes = [launch(sized), launch(replace(sized, contender="plain"))]
        if any(outcome.status != "ok" for outcome in outcomes):
            say(f"Python calls of {case}: {' '.join(outcome.error for outcome in outcomes)}")
            return None
        counted.append(_subtract(*(outcome.answers[0]["calls"] for outcome in outcomes)))
    shallow, deep = counted
    by_function = {name: times / (DEEP - SHALLOW) for name, times in _subtract(deep, shallow).items()}
    per_unit = sum(by_function.values())
    say(f"Python calls of {case}: {per_unit:.0f} per unit and step")
    return AddedCalls(by_function, per_unit, sum(shallow.values()) - SHALLOW * per_unit)


def _subtract(calls: Calls, others: Calls) -> Calls:
    names = {*calls, *others}
    return {name: calls.get(name, 0) - others.get(name, 0) for name in names}


def count_calls(function: Callable[[], object]) -> Calls:
    """Calls by "folder/file.py:function" during one call of `function`."""
    by_code: Counter[CodeType] = Counter()
    if sys.version_info >= (3, 12):
        _watch_all_threads(function, by_code)
    else:
        _watch_this_thread(function, by_code)
    by_name: Counter[str] = Counter()
    for code, times in by_code.items():
        by_name[f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_qualname}"] += times
    return dict(by_name)


def _watch_all_threads(function: Callable[[], object], calls: Counter[CodeType]) -> None:
    watch: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
    begun = (watch.events.PY_START, watch.events.PY_RESUME)

    def on_call(code: CodeType, _: int) -> None:
        calls[code] += 1

    watch.use_tool_id(watch.PROFILER_ID, "shardwise")
    for event in begun:
        watch.register_callback(watch.PROFILER_ID, event, on_call)
    watch.set_events(watch.PROFILER_ID, begun[0] | begun[1])
    try:
        function()
    finally:
        watch.set_events(watch.PROFILER_ID, 0)
        for event in begun:
            watch.register_callback(watch.PROFILER_ID, event, None)
        watch.free_tool_id(watch.PROFILER_ID)


def _watch_this_thread(function: Callable[[], object], calls: Counter[CodeType]) -> None:
    """Before Python 3.12, threads started by torch cannot be watched: the backward must run in this one."""

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls[frame.f_code] += 1

    threading.setprofile(on_event)  # for threads started from now on
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(on_event)
        try:
            function()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
