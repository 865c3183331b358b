"""How long a step computed, copied and updated on the host, and how much of that went on at the same time.

Pure: from the events of a chrome trace to figures and text. The trace has three steps, and the second is the one that
counts: from its first kernel to the first of the third, so that whatever the first left behind is counted too, and
what it leaves to the third is not. Where there are no kernels, torch's operations on the CPU are what computes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

Interval = tuple[float, float]  # begin and end
Event = dict[str, Any]

COMPUTE, HOST_UPDATE = "compute", "host update"
KINDS = (COMPUTE, "collectives", "host to device", "device to host", HOST_UPDATE)
# NCCL's kernels, and those that occupy the wires of an emulated fabric.
_COLLECTIVES = ("nccl", "occupy", "begin_carrying", "carry")


@dataclass(frozen=True, slots=True)
class Overlap:
    """Seconds of one step. What did not occur at all is left out."""

    step_s: float
    busy_s: dict[str, float]  # by kind
    beside_compute_s: dict[str, float]  # of it, while kernels computed
    idle_s: float  # nothing of any kind


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in order, nothing twice."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif begin < end:
            found.append((begin, end))
    return found


def common(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What two merged lists have in common."""
    found, place = [], 0
    for begin, end in some:
        while place < len(others) and others[place][1] <= begin:
            place += 1
        for other_begin, other_end in others[place:]:
            if other_begin >= end:
                break
            found.append((max(begin, other_begin), min(end, other_end)))
    return found


def without(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What a merged list has that another has not."""
    ends = [float("-inf"), *chain.from_iterable(others), float("inf")]
    return common(some, list(zip(ends[::2], ends[1::2], strict=True)))


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def overlap_of(by_kind: dict[str, list[Interval]], window: Interval) -> Overlap:
    """`by_kind` in seconds, in any order and overlapping as they may."""
    inside = {kind: common(merged(intervals), [window]) for kind, intervals in by_kind.items()}
    inside = {kind: intervals for kind, intervals in inside.items() if intervals}
    computing = inside.get(COMPUTE, [])
    anything = merged(chain.from_iterable(inside.values()))
    return Overlap(
        step_s=window[1] - window[0],
        busy_s={kind: length(intervals) for kind, intervals in inside.items()},
        beside_compute_s={
            kind: length(common(intervals, computing)) for kind, intervals in inside.items() if kind != COMPUTE
        },
        idle_s=window[1] - window[0] - length(anything),
    )


def from_trace(events: Sequence[Event], host_updates: str) -> Overlap:
    """`host_updates` begins the names of the ranges in which the host updates weights; empty: there are none."""
    whole = [event for event in events if event.get("ph") == "X"]
    by_kind: dict[str, list[Interval]] = {kind: [] for kind in KINDS}
    for event in whole:
        kind = _kind_of(event, host_updates)
        if kind:
            by_kind[kind].append(_interval(event))
    if not by_kind[COMPUTE]:
        by_kind[COMPUTE] = _computed_by_host(whole, host_updates)
    return overlap_of(by_kind, _window_of(whole))


def _interval(event: Event) -> Interval:
    begin_s = event["ts"] * 1e-6
    return begin_s, begin_s + event["dur"] * 1e-6


def _computed_by_host(events: Sequence[Event], host_updates: str) -> list[Interval]:
    """Operations, but those of updates."""
    found = []
    for thread in {event["tid"] for event in events}:
        own = [event for event in events if event["tid"] == thread]
        updates = merged(_interval(event) for event in own if _kind_of(event, host_updates) == HOST_UPDATE)
        found += without(merged(_interval(event) for event in own if event.get("cat") == "cpu_op"), updates)
    return found


def _kind_of(event: Event, host_updates: str) -> str | None:
    category, name = event.get("cat"), event["name"]
    if category == "kernel":
        return "collectives" if name.startswith(_COLLECTIVES) else COMPUTE
    if category == "gpu_memcpy":
        return "host to device" if "HtoD" in name else "device to host" if "DtoH" in name else None
    if category == "user_annotation" and host_updates and name.startswith(host_updates):
        return HOST_UPDATE
    return None


def _window_of(events: Sequence[Event]) -> Interval:
    """The second step: on the device where it computes, or else on the host."""
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
    """A line for each kind."""
    lines = [f"{'step':<16}{overlap.step_s:>10.4f} s"]
    for kind in KINDS:
        if kind in overlap.busy_s:
            busy_s = overlap.busy_s[kind]
            line = f"{kind:<16}{busy_s:>10.4f} s{busy_s / overlap.step_s:>8.1%} of the step"
            if kind in overlap.beside_compute_s:
                line += f",{overlap.beside_compute_s[kind] / busy_s:>7.1%} of it beside compute"
            lines.append(line)
    lines.append(f"{'nothing':<16}{overlap.idle_s:>10.4f} s{overlap.idle_s / overlap.step_s:>8.1%} of the step")
    return "\n".join(lines)
