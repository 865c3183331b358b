"""SVG charts as text: memory bars, plain bars, and the loss curve, with everything escaped.

A chart has no fixed width. Shapes are in an inner drawing of 1000 x 1000 that is stretched to the available size; text
is in the outer one, positioned in percent, so that its size is the same on a phone and on a desk. Each bar is a drawing
of its own, so that names and numbers are text of the page and wrap like it.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from ..base.text import size
from .plan_facts import CLASSES, RESERVE, Json, at_peak, interval, needed, reserve, text_of

STRETCHED = 1000


def element(name: str, *content: str, **attributes: object) -> str:
    """`content` is SVG already; attributes are escaped. `class_` and `font_size` lose their underscores."""
    words = "".join(f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"' for key, value in attributes.items())
    return f"<{name}{words}>{''.join(content)}</{name}>" if content else f"<{name}{words}/>"


def _value(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else escape(str(value))


def title(text: str) -> str:
    """Return a tooltip, which screen readers also read aloud."""
    return element("title", escape(text))


def text(words: str, **attributes: object) -> str:
    return element("text", escape(words), **attributes)


def stretched(shapes: Iterable[str], **attributes: object) -> str:
    """Put shapes into a drawing of 1000 x 1000 that is stretched to the available size."""
    box = f"0 0 {STRETCHED} {STRETCHED}"
    return element("svg", "".join(shapes), viewBox=box, preserveAspectRatio="none", **attributes)


def rect(left: float, top: float, width: float, height: float, **attributes: object) -> str:
    return element("rect", x=left, y=top, width=width, height=height, **attributes)


def rect_about(about: str, left: float, top: float, width: float, height: float, **attributes: object) -> str:
    """Draw a rectangle with a tooltip."""
    return element("rect", title(about), x=left, y=top, width=width, height=height, **attributes)


def path(points: Iterable[tuple[float, float]], is_closed: bool = False, **attributes: object) -> str:
    words = "L".join(f"{x:.2f} {y:.2f}" for x, y in points)
    return element("path", d=f"M{words}{'Z' if is_closed else ''}", **attributes)


def unit_for(num_bytes: float) -> tuple[str, float]:
    """Return the unit for the labels of an axis up to `num_bytes`, and its size."""
    return next(
        ((unit, factor) for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)) if num_bytes >= factor),
        ("kB", 1e3),
    )


def ticks(most: float, about: int = 5) -> list[float]:
    """Return 0 and further round numbers up to `most`, approximately `about` of them."""
    if not most > 0:
        return [0.0]
    exact = most / about
    power = 10.0 ** math.floor(math.log10(exact))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= exact * 0.999)
    return [at * step for at in range(math.floor(most / step * 1.000001) + 1)]


# Bars that are longer than this many GPUs are cut, so that those near the limit can be distinguished.
MOST_GPUS = 1.5
# A GPU that is this many times larger than the longest bar is not drawn: everything else would be too small to see.
FAR = 4


class Scale(NamedTuple):
    """Bytes from the left to the right edge, and the memory of the GPU."""

    full: float
    limit: float | None

    def at(self, num_bytes: float) -> float:
        return STRETCHED * num_bytes / self.full


def scale_of(strategies: Iterable[Json], limit: float | None) -> Scale:
    longest = max([*(max(needed(row), (interval(row) or (0, 0))[1]) for row in strategies), 1.0])
    if limit is None:
        return Scale(longest * 1.02, None)
    return Scale(
        longest * 1.25 if is_far(limit, longest) else min(max(longest, limit), MOST_GPUS * limit) * 1.02, limit
    )


def is_far(limit: float, longest: float) -> bool:
    return limit > FAR * longest


def memory_bar(strategy: Json, scale: Scale) -> str:
    shapes = list(_segments(strategy, scale))
    between = interval(strategy)
    if between and needed(strategy) <= scale.full:
        low, high = (min(scale.at(edge), STRETCHED) for edge in between)
        about = title(f"needed: between {size(between[0])} and {size(between[1])}")
        whisker = f"M{low:.1f} 500H{high:.1f}M{low:.1f} 330V670M{high:.1f} 330V670"
        shapes.append(element("g", about, element("path", class_="halo", d=whisker), element("path", d=whisker)))
    if scale.limit and scale.limit <= scale.full:
        edge = scale.at(scale.limit)
        shapes.append(element("path", title(f"GPU: {size(scale.limit)}"), class_="limit", d=f"M{edge:.1f} -180V1180"))
    if needed(strategy) > scale.full:
        # A torn edge shows that the bar continues.
        shapes.append(element("path", class_="torn", d="M984 -10L994 250L984 500L994 750L984 1010H1001V-10Z"))
    parts = ", ".join(f"{CLASSES[name]} {size(value)}" for name, value in at_peak(strategy).items())
    label = f"{text_of(strategy.get('name'))}: {size(needed(strategy))}: {parts}"
    return stretched(shapes, class_="bar", role="img", aria_label=label)


def _segments(strategy: Json, scale: Scale) -> Iterator[str]:
    parts = at_peak(strategy) | {RESERVE: reserve(strategy)}
    below = 0.0
    for name, num_bytes in parts.items():
        left, right = scale.at(below), min(scale.at(below + num_bytes), STRETCHED)
        if right > left:
            about = f"{CLASSES.get(name, 'held by the allocator')}: {size(num_bytes)}"
            yield rect_about(about, left, 0, right - left, STRETCHED, class_=f"c-{name}", data_bytes=int(num_bytes))
        below += num_bytes


def memory_axis(scale: Scale) -> str:
    """Draw ticks under the bars; the GPU's size has a label of its own above them."""
    marks = []
    unit, factor = unit_for(scale.full)
    for value in ticks(scale.full / factor, 4):
        share = 100 * value * factor / scale.full
        words = f"{value:g}{f' {unit}' if value == 0 else ''}"
        marks.append(text(words, x=f"{share:.2f}%", y=13, text_anchor=_anchor(share)))
    return element("svg", *marks, class_="axis", aria_hidden="true")


def limit_word(scale: Scale, words: str) -> str:
    """Label the GPU's size; at the edge, with an arrow, if it is further to the right."""
    share = min(scale.at(scale.limit or 0) / 10, 100.0)
    words += " \u2192" if share == 100 else ""
    return element(
        "svg",
        text(words, class_="limit-word", x=f"{share:.2f}%", y=13, text_anchor="end" if share > 50 else "start"),
        class_="axis",
        aria_hidden="true",
    )


def plain_bar(value: float, most: float, class_: str, about: str) -> str:
    """Draw a bar for one number; its length is relative to the largest one."""
    width = STRETCHED * value / most if most > 0 else 0.0
    shapes = [rect(0, 0, STRETCHED, STRETCHED, class_="track"), rect(0, 0, width, STRETCHED, class_=class_)]
    return stretched(shapes, class_="bar thin", role="img", aria_label=about)


def _anchor(share: float) -> str:
    return "start" if share < 3 else "end" if share > 97 else "middle"


MOST_POINTS = 800


class Point(NamedTuple):
    step: int
    loss: float


class Curve(NamedTuple):
    train: Sequence[Point]
    evaluation: Sequence[Point]
    left: Sequence[Sequence[Point]]  # abandoned branches: the run continued from an earlier step


def draw(curve: Curve) -> dict[str, object]:
    """Return the drawing, and the positions of its horizontal lines."""
    points = [*curve.train, *curve.evaluation, *(point for given_up in curve.left for point in given_up)]
    most_steps = max([point.step for point in points], default=0) or 1
    low, high = min(point.loss for point in points), max(point.loss for point in points)
    margin = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    bottom, top = (0.0 if low >= 0 and low - margin < 0 else low - margin), high + margin

    def place(point: Point) -> tuple[float, float]:
        return STRETCHED * point.step / most_steps, STRETCHED * (top - point.loss) / (top - bottom)

    first = ticks(top - bottom, 4)
    step = first[1] - first[0] if len(first) > 1 else 1.0
    values = [at * step for at in range(math.ceil(bottom / step), math.ceil(top / step))]
    lines = {place(Point(0, value))[1] / 10: f"{value:.4g}" for value in values}
    shapes = [element("path", class_="grid", d=f"M0 {10 * at:.1f}H1000") for at in lines]
    shapes += [path(map(place, thinned(given_up)), class_="left") for given_up in curve.left if given_up]
    if len(curve.train) > 1:
        shapes.append(path(map(place, thinned(curve.train)), class_="train"))
    rings = []
    for point in curve.train if len(curve.train) == 1 else ():
        rings.append(_mark(place(point), "dot", f"step {point.step:,}: loss {point.loss:.4f}"))
    for point in thinned(curve.evaluation):
        rings.append(_mark(place(point), "ring", f"step {point.step:,}: evaluation loss {point.loss:.4f}"))
    marks = []
    for value in ticks(most_steps, 4):
        share = 100 * value / most_steps
        anchor = "start" if share < 2 else "end" if share > 96 else "middle"
        words = "step 0" if value == 0 else f"{value:,.0f}"
        if value == int(value):
            marks.append(text(words, x=f"{share:.2f}%", y=14, text_anchor=anchor))
    about = _about(curve)
    return {
        "drawing": element("svg", stretched(shapes), *rings, class_="curve", role="img", aria_label=about),
        "axis": element("svg", *marks, class_="axis", aria_hidden="true"),
        "lines": lines,
    }


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Average neighbours if there are more points than can be distinguished."""
    if len(points) <= MOST_POINTS:
        return points
    found = []
    for at in range(MOST_POINTS):
        part = points[len(points) * at // MOST_POINTS : len(points) * (at + 1) // MOST_POINTS]
        found.append(Point(part[-1].step, sum(point.loss for point in part) / len(part)))
    return found


def _mark(place: tuple[float, float], class_: str, about: str) -> str:
    x, y = (f"{value / 10:.2f}%" for value in place)
    return element("circle", title(about), class_=class_, cx=x, cy=y, r=5)


def _about(curve: Curve) -> str:
    words = "Loss over steps"
    if curve.train:
        first, last = curve.train[0], curve.train[-1]
        words += f": {first.loss:.4f} at step {first.step:,}, {last.loss:.4f} at step {last.step:,}"
    if curve.evaluation:
        words += f"; evaluation {curve.evaluation[-1].loss:.4f} at step {curve.evaluation[-1].step:,}"
    return words
