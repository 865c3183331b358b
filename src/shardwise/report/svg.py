"""SVG as text: elements with everything escaped, scales, and ticks that people count in.

A chart has no fixed width. Shapes lie in an inner drawing of 1000 x 1000 that is stretched to whatever there is; words
lie in the outer one, placed in percent, so that they are as large on a phone as on a desk.
"""

import math
from collections.abc import Iterable
from html import escape

STRETCHED = 1000


def element(name: str, *content: str, **attributes: object) -> str:
    """`content` is SVG already; attributes are escaped. `class_` and `font_size` lose their underscores."""
    words = "".join(f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"' for key, value in attributes.items())
    return f"<{name}{words}>{''.join(content)}</{name}>" if content else f"<{name}{words}/>"


def _value(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else escape(str(value))


def title(text: str) -> str:
    """What is shown when a pointer rests on an element, and read aloud for it."""
    return element("title", escape(text))


def text(words: str, **attributes: object) -> str:
    return element("text", escape(words), **attributes)


def stretched(shapes: Iterable[str], **attributes: object) -> str:
    """Shapes in a drawing of 1000 x 1000 that fills its place."""
    box = f"0 0 {STRETCHED} {STRETCHED}"
    return element("svg", "".join(shapes), viewBox=box, preserveAspectRatio="none", **attributes)


def rect(left: float, top: float, width: float, height: float, **attributes: object) -> str:
    return element("rect", x=left, y=top, width=width, height=height, **attributes)


def rect_about(about: str, left: float, top: float, width: float, height: float, **attributes: object) -> str:
    """A rectangle that tells what it is."""
    return element("rect", title(about), x=left, y=top, width=width, height=height, **attributes)


def path(points: Iterable[tuple[float, float]], is_closed: bool = False, **attributes: object) -> str:
    words = "L".join(f"{x:.2f} {y:.2f}" for x, y in points)
    return element("path", d=f"M{words}{'Z' if is_closed else ''}", **attributes)


def unit_for(num_bytes: float) -> tuple[str, float]:
    """In which unit an axis up to there is labelled."""
    return next(
        ((unit, factor) for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)) if num_bytes >= factor),
        ("kB", 1e3),
    )


def ticks(most: float, about: int = 5) -> list[float]:
    """0 and further round numbers up to `most`, about as many as asked for."""
    if not most > 0:
        return [0.0]
    exact = most / about
    power = 10.0 ** math.floor(math.log10(exact))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= exact * 0.999)
    return [at * step for at in range(math.floor(most / step * 1.000001) + 1)]
