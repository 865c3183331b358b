"""Chrome traces, and how much of a step's copies, collectives and host updates overlapped with computation.

A trace has three steps. The second is measured, from its first kernel to the first kernel of the third. Work of the
first step that runs in this window counts; work of the second that runs after it does not. If there are no kernels,
torch's operations on the CPU count as computation.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..planner.hardware.links import parse
from .case import Case, label

Interval = tuple[float, float]  # begin and end
Event = dict[str, Any]

COMPUTE, HOST_UPDATE = "compute", "host update"
KINDS = (COMPUTE, "collectives", "host to device", "device to host", HOST_UPDATE)
# NCCL's kernels, and those that occupy the wires of an emulated fabric.
_COLLECTIVES = ("nccl", "occupy", "begin_carrying", "carry")
STEPS_IN_TRACE = 3
TRACED_STEPS = 1 + STEPS_IN_TRACE


@dataclass(frozen=True, slots=True)
class Overlap:
    """Seconds of one step. Kinds of work that did not occur are left out."""

    step_s: float
    busy_s: dict[str, float]  # by kind
    beside_compute_s: dict[str, float]  # the part that overlapped with computation
    idle_s: float  # without work of any kind


def segments(by_kind: Mapping[str, Iterable[Interval]]) -> Iterator[tuple[Interval, set[str]]]:
    """Cut time wherever an interval begins or ends, and yield each piece with the kinds of work that run in it."""
    edges = [(begin, 1, kind) for kind, intervals in by_kind.items() for begin, _ in intervals]
    edges += [(end, -1, kind) for kind, intervals in by_kind.items() for _, end in intervals]
    running = Counter[str]()
    last = float("-inf")
    for instant, change, kind in sorted(edges):
        if instant > last:
            yield (last, instant), {kind for kind, times in running.items() if times}
        last = instant
        running[kind] += change
    yield (last, float("inf")), set()


def overlap_of(by_kind: Mapping[str, Iterable[Interval]], window: Interval) -> Overlap:
    """Measure intervals (in seconds, in any order, possibly overlapping) inside a window."""
    busy_s, beside_s = dict.fromkeys(by_kind, 0.0), dict.fromkeys(by_kind, 0.0)
    idle_s = 0.0
    for (begin, end), kinds in segments(by_kind):
        seconds = max(min(end, window[1]) - max(begin, window[0]), 0.0)
        idle_s += 0.0 if kinds else seconds
        for kind in kinds:
            busy_s[kind] += seconds
            beside_s[kind] += seconds if COMPUTE in kinds else 0.0
    busy_s = {kind: seconds for kind, seconds in busy_s.items() if seconds}
    beside_s = {kind: beside_s[kind] for kind in busy_s if kind != COMPUTE}
    return Overlap(window[1] - window[0], busy_s, beside_s, idle_s)


def from_trace(events: Sequence[Event], host_updates: str) -> Overlap:
    """Return the overlap in a trace. `host_updates`: the prefix of profiler ranges of updates on the host, or empty."""
    whole = [event for event in events if event.get("ph") == "X"]
    by_kind: dict[str, list[Interval]] = {kind: [] for kind in KINDS}
    by_thread: dict[int, dict[str, list[Interval]]] = {}  # operations and weight updates on the host
    for event in whole:
        category, name = event.get("cat"), event["name"]
        interval = event["ts"] * 1e-6, event["ts"] * 1e-6 + event["dur"] * 1e-6
        if category == "kernel":
            by_kind["collectives" if name.startswith(_COLLECTIVES) else COMPUTE].append(interval)
        elif category == "gpu_memcpy" and ("HtoD" in name or "DtoH" in name):
            by_kind["host to device" if "HtoD" in name else "device to host"].append(interval)
        elif category == "user_annotation" and host_updates and name.startswith(host_updates):
            by_kind[HOST_UPDATE].append(interval)
            by_thread.setdefault(event["tid"], {}).setdefault(HOST_UPDATE, []).append(interval)
        elif category == "cpu_op":
            by_thread.setdefault(event["tid"], {}).setdefault(COMPUTE, []).append(interval)
    if not by_kind[COMPUTE]:
        for work in by_thread.values():
            by_kind[COMPUTE] += [piece for piece, kinds in segments(work) if kinds == {COMPUTE}]
    return overlap_of(by_kind, _window_of(whole))


def _window_of(events: Sequence[Event]) -> Interval:
    """Return the time of the second step: on the device if there are kernels, else on the host."""
    begins = sorted(event["ts"] for event in events if event["name"].startswith("ProfilerStep"))
    kernels = {event["args"]["correlation"]: event["ts"] for event in events if event.get("cat") == "kernel"}
    launches = sorted(
        (event["ts"], event["args"]["correlation"])
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and event["args"].get("correlation") in kernels
    )
    if launches:
        begins = [next(kernels[number] for at, number in launches if at >= begin) for begin in begins]
    return begins[1] * 1e-6, begins[2] * 1e-6


def in_words(overlap: Overlap) -> str:
    """Text with one line per kind of work."""
    lines = [f"{'step':<16}{overlap.step_s:>10.4f} s"]
    for kind in KINDS:
        if kind in overlap.busy_s:
            busy_s = overlap.busy_s[kind]
            line = f"{kind:<16}{busy_s:>10.4f} s{busy_s / overlap.step_s:>8.1%} of the step"
            if kind in overlap.beside_compute_s:
                line += f",{overlap.beside_compute_s[kind] / busy_s:>7.1%} of it during compute"
            lines.append(line)
    lines.append(f"{'nothing':<16}{overlap.idle_s:>10.4f} s{overlap.idle_s / overlap.step_s:>8.1%} of the step")
    return "\n".join(lines)


def trace_file(case: Case) -> Path:
    words = [label(case.contender), case.shape.name, str(case.shape.tokens), case.reduce]
    if case.fabric:
        where = parse(case.fabric)
        words.append(f"{where.num_nodes}x{where.node_size}-{where.intra.gigabytes_per_s:g}GBs")
    return Path(case.trace) / (re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(words)) + ".trace.json.gz")


def trace(step: Callable[[], object], synchronise: Callable[[], None], device: str, file: Path) -> None:
    """Write a chrome trace of consecutive steps, with all threads of this process."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile, schedule

    file.parent.mkdir(parents=True, exist_ok=True)
    with profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda"),
        schedule=schedule(wait=0, warmup=1, active=STEPS_IN_TRACE, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(file)),
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
        acc_events=True,  # otherwise torch warns that it drops earlier profiler cycles, although there are none
    ) as profiler:
        for number in range(TRACED_STEPS):
            step()
            if number == TRACED_STEPS - 1:
                synchronise()
            profiler.step()


def overlap_in(file: Path, host_updates: str) -> Overlap:
    """Return the overlap in a trace file, and write it as text next to the file."""
    with gzip.open(file) as opened:
        overlap = from_trace(json.load(opened)["traceEvents"], host_updates)
    file.with_name(file.name.replace(".trace.json.gz", ".overlap.txt")).write_text(in_words(overlap) + "\n")
    return overlap
