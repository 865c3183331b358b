"""The geometry of charts: memory bars, the loss curve, and one step over time. `charts.svg.j2` draws them.

A chart has no fixed width. Shapes are in an inner SVG of 1000 x 1000 that is stretched to the available size. Text is
in the outer SVG, positioned in percent, so that its size is the same on every screen. Each bar is an SVG of its own, so
that names and numbers are ordinary text of the page, which can wrap. The chart of a step shows the memory at every
instant and below it, on the same time axis, what each lane does. Spans that would be narrower than a line are merged,
so that the files stay small for steps of many micro-batches.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..base.text import seconds, size
from .plan_facts import (
    CLASSES,
    CONTEXT,
    SEGMENTS,
    Json,
    Plan,
    Strategy,
    amount,
    listed,
    mapping,
    rows,
    stacked,
    text_of,
)

Point = tuple[float, float]  # step and loss
STRETCHED = 1000  # width and height of the inner SVG
# Bars are cut at this multiple of the GPU's memory, so that differences near the limit can be seen.
MOST_GPUS = 1.5
# The GPU's memory is not drawn if it is this many times the longest bar: everything else would be too small to see.
FAR = 4
MOST_POINTS = 800
MOST_INSTANTS = 600
FINEST = 1 / 2500  # fraction of the step: spans of a lane that are closer than this are merged
WHOLE = 0.9  # fraction of the step: if less time is drawn, micro-batches are left out
ZOOMS = (1, 4, 16)
HEADROOM = 1.1  # top of the axis, relative to the highest value
FILLED = 0.95  # fraction of a span's width; the gap separates it from the next
PASSES = ("forward", "backward")
LANES = {
    "compute": "compute",
    "gather": "gather",
    "reduce": "reduce",
    "copy": "copy to and from the host",
    "host": "host",
    "disk": "disk",
}


class Mark(NamedTuple):
    """A label on an axis. `share`: its position, in percent of the width."""

    words: str
    share: float
    class_: str = ""
    zoom: int = 1  # the axis is this many times wider than the page

    @property
    def anchor(self) -> str:
        left, right = self.share * self.zoom, (100 - self.share) * self.zoom
        return "start" if left < 3 else "end" if right < 5 else "middle"


class Box(NamedTuple):
    """A rectangle of full height, with a tooltip."""

    left: float
    width: float
    class_: str
    about: str
    num_bytes: int = 0


def path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in points)


def unit_for(num_bytes: float) -> tuple[str, float]:
    """Return the unit for the labels of an axis up to `num_bytes`, and its size."""
    return next(((unit, factor) for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)) if num_bytes >= factor),
                ("kB", 1e3))  # fmt: skip


def ticks(most: float, about: int = 5) -> list[float]:
    """Return 0 and further round numbers up to `most`, approximately `about` of them."""
    if not most > 0:
        return [0.0]
    exact = most / about
    power = 10.0 ** math.floor(math.log10(exact))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= exact * 0.999)
    return [index * step for index in range(math.floor(most / step * 1.000001) + 1)]


# --- bars


class Scale(NamedTuple):
    """Scale of the bars. `full`: bytes from the left to the right edge; `limit`: memory of the GPU."""

    full: float
    limit: float | None

    def at(self, num_bytes: float) -> float:
        return STRETCHED * num_bytes / self.full

    def segments(self, strategy: Strategy) -> Iterator[Box]:
        below = 0.0
        for name, num_bytes in strategy.segments.items():
            left, right = self.at(below), min(self.at(below + num_bytes), STRETCHED)
            if right > left:
                yield Box(left, right - left, f"c-{name}", f"{SEGMENTS[name]}: {size(num_bytes)}", int(num_bytes))
            below += num_bytes

    def whisker(self, strategy: Strategy) -> str:
        """SVG path of the interval of the needed memory; empty if it is unknown or the bar is cut."""
        if not strategy.interval or strategy.needed > self.full:
            return ""
        low, high = (min(self.at(edge), STRETCHED) for edge in strategy.interval)
        return f"M{low:.1f} 500H{high:.1f}M{low:.1f} 330V670M{high:.1f} 330V670"

    @property
    def axis(self) -> list[Mark]:
        """Ticks under the bars; the GPU's size has a label of its own above them."""
        unit, factor = unit_for(self.full)
        values = ticks(self.full / factor, 4)
        return [Mark(f"{value:g}{'' if value else f' {unit}'}", self.at(value * factor) / 10) for value in values]


def scale_of(plan: Plan) -> Scale:
    longest = max([*(max(row.needed, (row.interval or (0, 0))[1]) for row in plan.strategies), 1.0])
    if plan.limit is None:
        return Scale(longest * 1.02, None)
    is_far = plan.limit > FAR * longest
    full = longest * 1.25 if is_far else min(max(longest, plan.limit), MOST_GPUS * plan.limit) * 1.02
    return Scale(full, plan.limit)


# --- the loss


def draw_curve(curve: Json) -> dict[str, object]:
    """Return paths, dots, and the positions of horizontal lines in percent. `left` has abandoned branches: steps
    after which the run was continued from an earlier step."""
    train, evaluation, abandoned = curve["train"], curve["evaluation"], [part for part in curve["left"] if part]
    points = [*train, *evaluation, *itertools.chain(*abandoned)]
    most_steps = max(step for step, _ in points) or 1
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    margin = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    bottom, top = (0.0 if low >= 0 and low - margin < 0 else low - margin), high + margin

    def place(point: Point) -> tuple[float, float]:
        return STRETCHED * point[0] / most_steps, STRETCHED * (top - point[1]) / (top - bottom)

    first = ticks(top - bottom, 4)
    step = first[1] - first[0] if len(first) > 1 else 1.0
    values = [index * step for index in range(math.ceil(bottom / step), math.ceil(top / step))]
    paths = [("left", part) for part in abandoned] + ([("train", train)] if len(train) > 1 else [])
    dots = [("dot", "loss", point) for point in train if len(train) == 1]
    dots += [("ring", "evaluation loss", point) for point in thinned(evaluation)]
    label = "Loss over steps"
    if train:
        label += ": " + ", ".join(f"{loss:.4f} at step {step:,}" for step, loss in (train[0], train[-1]))
    if evaluation:
        label += f"; evaluation {evaluation[-1][1]:.4f} at step {evaluation[-1][0]:,}"
    return {
        "paths": [(class_, path(map(place, thinned(part)))) for class_, part in paths],
        "dots": [
            (class_, *place((step, loss)), f"step {step:,}: {kind} {loss:.4f}") for class_, kind, (step, loss) in dots
        ],
        "axis": [
            Mark(f"{value:,.0f}" if value else "step 0", 100 * value / most_steps)
            for value in ticks(most_steps, 4)
            if value == int(value)
        ],
        "lines": {place((0, value))[1] / 10: f"{value:.4g}" for value in values},
        "label": label,
    }


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Average neighbours if there are more points than can be distinguished."""
    if len(points) <= MOST_POINTS:
        return points
    edges = [len(points) * index // MOST_POINTS for index in range(MOST_POINTS + 1)]
    parts = [points[first:last] for first, last in itertools.pairwise(edges)]
    return [(part[-1][0], sum(loss for _, loss in part) / len(part)) for part in parts]


# --- one step


class Instant(NamedTuple):
    name: str
    at_s: float
    held: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.held.values())

    def __str__(self) -> str:
        return f"{self.name}, at {seconds(self.at_s)}: {size(self.total)}\n{listed(self.held)}"


class Span(NamedTuple):
    name: str
    begin_s: float
    end_s: float
    num: int = 1


class Lane(NamedTuple):
    name: str
    busy_s: float
    share: float  # of the step
    boxes: Sequence[Box]
    label: str


def draw_step(plan: Plan, chosen: Strategy) -> dict[str, object] | None:
    """Return memory at every instant, and what each lane does; None if the plan has neither."""
    instants: list[Instant] = []
    at_s = 0.0
    for row in rows(chosen.row.get("instants")):
        at_s = max(at_s, amount(row, "at_s"))
        instants.append(Instant(text_of(row.get("name")), at_s, stacked({**mapping(row.get("bytes")), CONTEXT: 0})))
    spans: dict[str, list[Span]] = {}
    for row in rows(chosen.row.get("timeline")):
        span = Span(text_of(row.get("name")), amount(row, "begin_s"), amount(row, "end_s"))
        if span.end_s > span.begin_s:
            spans.setdefault(text_of(row.get("lane")), []).append(span)
    # This is less than the step if the plan leaves out equal micro-batches in the middle.
    drawn_s = max([at_s, *(span.end_s for lane in spans.values() for span in lane)])
    step_s = chosen.amount("step_seconds")
    full_s = drawn_s if 0 < drawn_s < WHOLE * step_s else max(drawn_s, step_s)
    if not full_s or not (instants or spans):
        return None
    # Instants have the memory of the allocator, without the context of CUDA and NCCL.
    context = amount(chosen.held, CONTEXT)
    room = max(plan.limit - context, 0.0) if plan.limit else None
    order = [*LANES, *(name for name in spans if name not in LANES)]
    return {
        "seconds": max(full_s, chosen.step_s or 0.0),
        "is_all": full_s >= step_s,
        "memory": memory_over_time(instants, full_s, room) if instants else None,
        "classes": CLASSES,
        "lanes": [_lane(name, spans[name], full_s) for name in order if name in spans],
        # The marks for every zoom level; the page shows those of one.
        "axis": [
            Mark(_short(value), 100 * value / full_s, f"z{zoom}", zoom)
            for zoom in ZOOMS
            for value in ticks(full_s, 5 * zoom)
        ],
        "zooms": ZOOMS,
        "limit_word": f"{plan.device}, without {CLASSES[CONTEXT]}" if context else plan.device,
    }


def _short(value: float) -> str:
    """Format as seconds, or as milliseconds below one second."""
    return "0" if value == 0 else f"{value:.4g} s" if value >= 1 else f"{value * 1e3:.4g} ms"


def memory_over_time(instants: Sequence[Instant], full_s: float, limit: float | None) -> dict[str, object]:
    """Return areas and tooltips, the positions of horizontal lines in percent, and the instant of the peak."""
    peak = max(instants, key=lambda instant: instant.total)
    shown = instants
    if len(instants) > MOST_INSTANTS:
        # Show one instant per column: the one with the most memory.
        columns: dict[int, list[Instant]] = {}
        for instant in instants:
            columns.setdefault(int(MOST_INSTANTS * instant.at_s / full_s), []).append(instant)
        shown = [max(column, key=lambda instant: instant.total) for column in columns.values()]
    if limit and limit > FAR * peak.total:
        limit = None
    top = HEADROOM * max(peak.total, limit or 0.0, 1.0)

    def y(value: float) -> float:
        return STRETCHED * (1 - value / top)

    begins = [STRETCHED * instant.at_s / full_s for instant in shown]
    edges = list(zip(begins, [*begins[1:], STRETCHED], strict=True))
    areas, below = {}, [0.0] * len(shown)
    for name in CLASSES:
        above = [floor + instant.held.get(name, 0.0) for floor, instant in zip(below, shown, strict=True)]
        if above != below:
            upper, lower = (
                [(x, y(value)) for value, pair in zip(border, edges, strict=True) for x in pair]
                for border in (above, below)
            )
            areas[name] = f"{path([*upper, *reversed(lower)])}Z"
        below = above
    unit, factor = unit_for(top)
    return {
        "areas": areas,
        "lines": {y(value * factor) / 10: f"{value:g} {unit}" for value in ticks(top / factor, 4)[1:]},
        "limit": limit and y(limit) / 10,
        "boxes": [
            Box(left, max(right - left, 0.1), "hover", str(instant))
            for (left, right), instant in zip(edges, shown, strict=True)
        ],
        "peak": peak,
        "share": 100 * peak.at_s / full_s,
        "height": y(peak.total) / 10,
    }


def _lane(name: str, spans: list[Span], full_s: float) -> Lane:
    busy_s, until_s = 0.0, 0.0
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: span.begin_s):
        busy_s += max(0.0, span.end_s - max(span.begin_s, until_s))
        until_s = max(until_s, span.end_s)
        last = merged[-1] if merged else None
        if last is not None and span.end_s - last.begin_s < full_s * FINEST:
            # Merge neighbours that are too narrow to be seen.
            called = last.name if last.num > 1 else f"from {last.name} on"
            merged[-1] = Span(called, last.begin_s, max(last.end_s, span.end_s), last.num + 1)
        else:
            merged.append(span)
    boxes = []
    for span in merged:
        duration_s, kind = span.end_s - span.begin_s, span.name.partition(" ")[0]
        about = f"{span.name}\n{seconds(span.begin_s)} + {seconds(duration_s)}"
        classes = f"l-{name} {kind}" if kind in PASSES else f"l-{name}"
        left, width = STRETCHED * span.begin_s / full_s, STRETCHED * duration_s / full_s
        boxes.append(Box(left, width * FILLED, classes, about))
    called = LANES.get(name, name)
    label = f"{called}: busy {seconds(busy_s)} of {seconds(full_s)}, {len(spans):,} spans"
    return Lane(called, busy_s, busy_s / full_s, boxes, label)
