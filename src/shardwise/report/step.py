"""One step over time: memory at every instant, and below it, on the same time axis, what each lane does.

Both are stretched to the available width, or to a multiple of it: the page has a zoom. Spans that would be narrower
than a line are merged, so that the files stay small for steps of many micro-batches.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..base.text import size
from .charts import STRETCHED, element, is_far, path, rect_about, stretched, text, ticks, unit_for
from .plan_facts import CLASSES, CONTEXT, LANES, Json, amount, mapping, rows, seconds, stacked, text_of

MOST_INSTANTS = 600
FINEST = 1 / 2500  # fraction of the step: spans of a lane that are closer than this are merged
WHOLE = 0.9  # fraction of the step: a shorter drawing leaves out micro-batches
ZOOMS = (1, 4, 16)
HEADROOM = 1.1
FILLED = 0.95  # fraction of a span's width; the gap separates it from the next
PASSES = ("forward", "backward")


class Instant(NamedTuple):
    name: str
    at_s: float
    held: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.held.values())


class Span(NamedTuple):
    name: str
    begin_s: float
    end_s: float
    num: int = 1


class Lane(NamedTuple):
    name: str
    busy_s: float
    share: float  # of the step
    drawing: str


def instants_of(strategy: Json) -> list[Instant]:
    """Return the instants in their order."""
    found: list[Instant] = []
    at_s = 0.0
    for row in rows(strategy.get("instants")):
        at_s = max(at_s, amount(row, "at_s"))
        found.append(Instant(text_of(row.get("name")), at_s, stacked({**mapping(row.get("bytes")), CONTEXT: 0})))
    return found


def duration_of(strategy: Json) -> float:
    """Duration of the drawn part: shorter than the step where equal micro-batches in its middle are left out."""
    ends = [amount(span, "end_s") for span in rows(strategy.get("timeline"))]
    begins = [instant.at_s for instant in instants_of(strategy)]
    drawn, step_s = max([*ends, *begins], default=0.0), amount(strategy, "step_seconds")
    return drawn if 0 < drawn < WHOLE * step_s else max(drawn, step_s)


def memory_over_time(instants: Sequence[Instant], full_s: float, limit: float | None) -> dict[str, Any]:
    """Return the drawing, the positions of its horizontal lines, and the instant of the peak."""
    peak = max(instants, key=lambda instant: instant.total)
    shown = _thinned(instants, full_s)
    if limit and is_far(limit, peak.total):
        limit = None
    top = HEADROOM * max(peak.total, limit or 0.0, 1.0)
    begins = [STRETCHED * instant.at_s / full_s for instant in shown]
    edges = list(zip(begins, [*begins[1:], STRETCHED], strict=True))
    shapes, below = [], [0.0] * len(shown)
    for name in CLASSES:
        above = [floor + instant.held.get(name, 0.0) for floor, instant in zip(below, shown, strict=True)]
        if above != below:
            upper = [(x, _y(value, top)) for value, pair in zip(above, edges, strict=True) for x in pair]
            lower = [(x, _y(value, top)) for value, pair in zip(below, edges, strict=True) for x in pair]
            shapes.append(path([*upper, *reversed(lower)], is_closed=True, class_=f"c-{name}"))
        below = above
    unit, factor = unit_for(top)
    lines = {_y(value * factor, top) / 10: f"{value:g} {unit}" for value in ticks(top / factor, 4)[1:]}
    shapes += [element("path", class_="grid", d=f"M0 {10 * at:.1f}H1000") for at in lines]
    if limit:
        shapes.append(element("path", class_="limit", d=f"M0 {_y(limit, top):.1f}H1000"))
    for (left, right), instant in zip(edges, shown, strict=True):
        shapes.append(rect_about(_told(instant), left, 0, max(right - left, 0.1), STRETCHED, class_="hover"))
    share = 100 * peak.at_s / full_s
    side = {"text_anchor": "end", "dx": -8} if share > 50 else {"text_anchor": "start", "dx": 8}
    height = _y(peak.total, top) / 10
    words = f"peak {size(peak.total)}"
    place = {"x": f"{share:.2f}%", "y": f"{height:.2f}%", "dy": 4, **side}
    marker = [
        element("line", class_="peak", x1=f"{share:.2f}%", x2=f"{share:.2f}%", y1=f"{height:.2f}%", y2="100%"),
        element("circle", class_="peak-dot", cx=f"{share:.2f}%", cy=f"{height:.2f}%", r=4.5),
        text(f"{words}, {peak.name}", class_="peak-word on-wide", **place),
        text(words, class_="peak-word on-narrow", **place),
    ]
    label = f"Memory over a step; {_told(peak)}"
    drawing = element("svg", stretched(shapes), *marker, class_="area", role="img", aria_label=label)
    return {"drawing": drawing, "lines": lines, "limit": limit and _y(limit, top) / 10, "peak": peak}


def _told(instant: Instant) -> str:
    parts = ", ".join(f"{CLASSES[name]} {size(value)}" for name, value in instant.held.items())
    return f"{instant.name}, at {seconds(instant.at_s)}: {size(instant.total)}\n{parts}"


def _y(value: float, top: float) -> float:
    return STRETCHED * (1 - value / top) if top else STRETCHED


def _thinned(instants: Sequence[Instant], full_s: float) -> list[Instant]:
    """Keep the instant with the most memory of those that share a column."""
    if len(instants) <= MOST_INSTANTS:
        return list(instants)
    fullest: dict[int, Instant] = {}
    for instant in instants:
        column = int(MOST_INSTANTS * instant.at_s / full_s)
        if column not in fullest or instant.total > fullest[column].total:
            fullest[column] = instant
    return list(fullest.values())


def lanes_of(strategy: Json, full_s: float) -> list[Lane]:
    spans: dict[str, list[Span]] = {}
    for row in rows(strategy.get("timeline")):
        begin, end = amount(row, "begin_s"), amount(row, "end_s")
        if end > begin:
            spans.setdefault(text_of(row.get("lane")), []).append(Span(text_of(row.get("name")), begin, end))
    order = [*LANES, *(name for name in spans if name not in LANES)]
    return [_lane(name, sorted(spans[name], key=lambda span: span.begin_s), full_s) for name in order if name in spans]


def _lane(name: str, spans: list[Span], full_s: float) -> Lane:
    busy_s, until = 0.0, 0.0
    for span in spans:
        busy_s += max(0.0, span.end_s - max(span.begin_s, until))
        until = max(until, span.end_s)
    shapes = []
    for span in _merged(spans, full_s):
        about = f"{span.name}\n{seconds(span.begin_s)} + {seconds(span.end_s - span.begin_s)}"
        left, width = (STRETCHED * value / full_s for value in (span.begin_s, span.end_s - span.begin_s))
        kind = span.name.partition(" ")[0]
        classes = f"l-{name} {kind}" if kind in PASSES else f"l-{name}"
        shapes.append(rect_about(about, left, 0, width * FILLED, STRETCHED, class_=classes))
    label = f"{LANES.get(name, name)}: busy {seconds(busy_s)} of {seconds(full_s)}, {len(spans):,} spans"
    return Lane(
        LANES.get(name, name), busy_s, busy_s / full_s, stretched(shapes, class_="lane", role="img", aria_label=label)
    )


def _merged(spans: list[Span], full_s: float) -> list[Span]:
    """Merge neighbours that are too narrow to be seen."""
    found: list[Span] = []
    for span in spans:
        last = found[-1] if found else None
        if last is not None and span.end_s - last.begin_s < full_s * FINEST:
            name = last.name if last.num > 1 else f"from {last.name} on"
            found[-1] = Span(name, last.begin_s, max(last.end_s, span.end_s), last.num + 1)
        else:
            found.append(span)
    return found


def time_axis(full_s: float) -> str:
    """Return the marks for every zoom level; the page shows those of one."""
    marks = []
    for zoom in ZOOMS:
        for value in ticks(full_s, 5 * zoom):
            share = 100 * value / full_s
            anchor = "start" if share * zoom < 3 else "end" if (100 - share) * zoom < 5 else "middle"
            marks.append(text(_short(value), class_=f"z{zoom}", x=f"{share:.3f}%", y=14, text_anchor=anchor))
    return element("svg", *marks, class_="axis", aria_hidden="true")


def _short(value: float) -> str:
    """Format as seconds, or as milliseconds below one second."""
    return "0" if value == 0 else f"{value:.4g} s" if value >= 1 else f"{value * 1e3:.4g} ms"
