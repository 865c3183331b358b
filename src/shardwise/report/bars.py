"""Horizontal bars: what a GPU holds under each strategy, against its size; one number beside the largest of its kind.

A bar is a drawing of its own, so that names and numbers stay text of the page and wrap like it.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..base.text import size
from .plan_facts import CLASSES, RESERVE, Json, at_peak, interval, needed, reserve, text_of
from .svg import STRETCHED, element, rect, rect_about, stretched, text, ticks, title, unit_for

# Bars that are longer than this many GPUs are cut, so that those near the limit can be told apart.
MOST_GPUS = 1.5
# A GPU that is this many times larger than the longest bar is not drawn: everything else would be too small to see.
FAR = 4


class Scale(NamedTuple):
    """Bytes from the left to the right edge, and where the GPU ends."""

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
        # Torn off: the bar goes on.
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
    """Ticks under the bars; the GPU's size has its own word above them."""
    marks = []
    unit, factor = unit_for(scale.full)
    for value in ticks(scale.full / factor, 4):
        share = 100 * value * factor / scale.full
        words = f"{value:g}{f' {unit}' if value == 0 else ''}"
        marks.append(text(words, x=f"{share:.2f}%", y=13, text_anchor=_anchor(share)))
    return element("svg", *marks, class_="axis", aria_hidden="true")


def limit_word(scale: Scale, words: str) -> str:
    """Where the GPU ends; at the edge, with an arrow, if that is further to the right."""
    share = min(scale.at(scale.limit or 0) / 10, 100.0)
    words += " \u2192" if share == 100 else ""
    return element(
        "svg",
        text(words, class_="limit-word", x=f"{share:.2f}%", y=13, text_anchor="end" if share > 50 else "start"),
        class_="axis",
        aria_hidden="true",
    )


def plain_bar(value: float, most: float, class_: str, about: str) -> str:
    """One number: as long as its share of the largest one."""
    width = STRETCHED * value / most if most > 0 else 0.0
    shapes = [rect(0, 0, STRETCHED, STRETCHED, class_="track"), rect(0, 0, width, STRETCHED, class_=class_)]
    return stretched(shapes, class_="bar thin", role="img", aria_label=about)


def _anchor(share: float) -> str:
    return "start" if share < 3 else "end" if share > 97 else "middle"
