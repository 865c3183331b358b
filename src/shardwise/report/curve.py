"""The loss of a run over its steps: the training loss as a line, evaluations as rings, what a resume gave up dashed."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from .svg import STRETCHED, element, path, stretched, text, ticks, title

MOST_POINTS = 800


class Point(NamedTuple):
    step: int
    loss: float


class Curve(NamedTuple):
    train: Sequence[Point]
    evaluation: Sequence[Point]
    left: Sequence[Sequence[Point]]  # each: what was trained and given up when the run went on from before it


def draw(curve: Curve) -> dict[str, object]:
    """The drawing, and where its horizontal lines are."""
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
    """Means of neighbours where there are more points than can be told apart."""
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
