"""Numbers and lines as people read them: three digits with a fitting unit, labelled lines that wrap, `key=value` words.

All printed text is plain ASCII and at most 100 columns wide, so that a log file reads like the terminal.
"""

import shutil
import textwrap
from collections.abc import Callable, Collection, Iterable

from .errors import did_you_mean

WIDTH = 100
LABEL_WIDTH = 12


def size(num_bytes: float) -> str:
    """Return a number of bytes in decimal units, as data sheets do: 1.35 GB."""
    return _scaled(num_bytes, [("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)], "B")


def count(number: float) -> str:
    """Return a short count: 8.03B, 1.71M, 512."""
    return _scaled(number, [("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)], "").replace(" ", "")


def _scaled(number: float, units: list[tuple[str, float]], smallest: str) -> str:
    for unit, factor in units:
        # A number that rounds to 1000 of a unit is written as 1 of the next one.
        if number >= 0.9995 * factor:
            scaled = number / factor
            return f"{scaled:,.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {unit}"
    return f"{number:.0f} {smallest}".strip()


def duration(seconds: float) -> str:
    """Return a time as 0:42, 12:05, 3:12:05 or 2 d 3:12:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if not (hours or days):
        return f"{minutes}:{rest:02}"
    return f"{f'{days} d ' if days else ''}{hours}:{minutes:02}:{rest:02}"


def seconds(value: float | None) -> str:
    """Return a time with three digits: 343 ms, 1.15 s, 374,407 s; "-" if it is unknown."""
    if value is None:
        return "-"
    return f"{value * 1e3:.3g} ms" if value < 0.9995 else f"{value:.2f} s" if value < 99.95 else f"{value:,.0f} s"


def plural(number: int, word: str) -> str:
    """Return a number and its noun: 1 rank, 1,200 steps, 2 batches."""
    ending = "" if number == 1 else "es" if word.endswith("ch") else "s"
    return f"{number:,} {word}{ending}"


def terminal_width() -> int:
    """Width of the terminal in columns, from 40 to 100. The variable COLUMNS overrides the terminal."""
    return max(40, min(WIDTH, shutil.get_terminal_size((WIDTH, 1)).columns))


def non_breaking(text: str) -> str:
    """Make the spaces of a text non-breaking, so that `labelled_lines` keeps it on one line (a path, for example)."""
    return text.replace(" ", "\xa0")


def labelled_lines(lines: dict[str, str]) -> list[str]:
    """Return lines of a label and its text. Empty texts are left out. Long texts continue on indented lines."""
    wrapper = textwrap.TextWrapper(terminal_width(), break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = " " * (LABEL_WIDTH + 2)
    found = []
    for label, text in lines.items():
        if text:
            wrapper.initial_indent = f"  {label:{LABEL_WIDTH}}"
            found += wrapper.wrap(text)
    return [line.replace("\xa0", " ") for line in found]


def column_table(rows: dict[str, list[str]]) -> list[str]:
    """Return labelled rows of right-aligned cells. Columns that do not fit on a line continue below."""
    widths = [max(map(len, column)) for column in zip(*rows.values(), strict=True)]
    lines, first, limit = [], 0, terminal_width()
    while first < len(widths):
        last = first + 1
        while last < len(widths) and LABEL_WIDTH + sum(widths[first : last + 1]) + 2 * (last - first) + 2 <= limit:
            last += 1
        for label, cells in rows.items():
            numbers = (f"{cell:>{width}}" for cell, width in zip(cells[first:last], widths[first:last], strict=True))
            lines.append(f"  {label:{LABEL_WIDTH}}" + "  ".join(numbers))
        first = last
    return lines


def key_values(words: Iterable[str], known: Collection[str], refused: Callable[[str], Exception]) -> dict[str, str]:
    """Parse words like `intra=400GB/s`, each key at most once. `refused` turns a reason into the exception to raise."""
    given: dict[str, str] = {}
    for word in words:
        key, _, value = (part.strip() for part in word.partition("="))
        key = key.lower().replace("_", "-")
        if key not in known:
            raise refused(f"unknown part {word!r}; {did_you_mean(key, known)}")
        if not value:
            raise refused(f"{word!r} has no value")
        if key in given:
            raise refused(f"{key} is given twice, as {given[key]!r} and {value!r}")
        given[key] = value
    return given
