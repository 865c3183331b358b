"""A plan for a terminal: one table that is read in five seconds, and where its numbers come from.

The first line says what to take and why. Plain ASCII, so that a log file reads like the terminal; on a terminal the
recommended line is bold and what does not fit is dim.
"""

import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from ..train.figures import size
from .facts import (
    Json,
    amount,
    batch_words,
    cluster_words,
    device_word,
    gpu_bytes,
    interval,
    is_tight,
    layout_words,
    mapping,
    model_words,
    needed,
    number,
    reason,
    recommended,
    rows,
    strategies,
    text_of,
    training_words,
    uses,
)

WIDTH = 100
BAR = 12  # characters that stand for the whole GPU
NO_RUN = "*"
LEFT = ("strategy", "fits", "of ")


class Line(NamedTuple):
    text: str
    style: str = ""


def table(plan: Json) -> str:
    return "\n".join(line.text for line in _lines(plan))


def show(plan: Json) -> None:
    """Print the table: with styles on a terminal, plain elsewhere."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for line in _lines(plan):
        if console.is_terminal:
            console.print(Text(line.text, style=line.style), soft_wrap=True)
        else:
            print(line.text)


def explain(plan: Json) -> str:
    """The terms of the recommended strategy's memory: bytes, formula and source of each."""
    terms, best = rows(plan.get("explain")), recommended(plan)
    if not terms:
        return "This plan explains no terms."
    head = [f"Memory of {text_of(best['name'])}, term by term:", ""] if best is not None else []
    width = max(len(text_of(term.get("term"))) for term in terms)
    lines = []
    for term in terms:
        num_bytes = number(term.get("bytes"))
        first = f"  {text_of(term.get('term')):<{width}}  {'-' if num_bytes is None else size(num_bytes):>8}  "
        lines += _wrapped(text_of(term.get("formula")) or "-", first)
        if source := text_of(term.get("source")):
            lines += _wrapped(source, " " * (len(first) + 2))
    peak = text_of(mapping((best or {}).get("peak")).get("text"))
    return "\n".join([*head, *lines, *(["", *_wrapped(f"At once: {peak}", "")] if peak else [])])


def verdict(plan: Json) -> str:
    """What to take and why, in a sentence."""
    best, why = recommended(plan), reason(plan)
    if best is not None:
        return f"Take {text_of(best['name'])}: {why}" if why else f"Take {text_of(best['name'])}."
    nearest = next(iter(strategies(plan)), None)
    if nearest is None:
        return "Nothing was planned."
    # A plan that one strategy was asked of recommends none, but it may fit.
    says = "fits" if nearest.get("fits") else "does not fit"
    return why or (f"{text_of(nearest.get('name'))} {says}." if _is_alone(plan) else "Nothing fits.")


def _is_alone(plan: Json) -> bool:
    return len(rows(plan.get("strategies"))) == 1


def _lines(plan: Json) -> Iterator[Line]:
    yield from (Line(text, "bold") for text in _wrapped(verdict(plan), ""))
    conditions = [model_words(plan), cluster_words(plan), training_words(plan)]
    if any(conditions):
        yield Line("")
        yield from (Line(text) for text in _wrapped("; ".join(word for word in conditions if word), "  "))
    shown = strategies(plan)
    if not shown:
        return
    yield Line("")
    columns = _columns(plan, shown)
    widths = {title: max(len(title), *map(len, cells)) for title, cells in columns.items()}
    yield Line("  " + _laid_out({title: title for title in columns}, widths), "dim")
    best = recommended(plan)
    for at, strategy in enumerate(shown):
        text = _laid_out({title: cells[at] for title, cells in columns.items()}, widths)
        style = "bold green" if strategy is best else "" if strategy.get("fits") else "dim"
        yield Line(f"{'>' if strategy is best else ' '} {text}", style)
    if any(strategy.get("runs") is False for strategy in shown):
        yield Line(f"  {NO_RUN} planned, but not run by this version yet", "dim")
    if any(is_tight(plan, strategy) for strategy in shown):
        yield Line("  tight: the upper end of what the allocator may reserve does not fit", "dim")
    if best is not None and (words := "; ".join(w for w in (layout_words(best), batch_words(best)) if w)):
        yield Line("")
        yield from (Line(text) for text in _wrapped(words, f"  {text_of(best['name'])}: "))
    refused = [strategy for strategy in shown if not strategy.get("fits")]
    if refused:
        yield Line("")
        yield Line("  does not fit")
        width = max(len(text_of(strategy.get("name"))) for strategy in refused)
        for strategy in refused:
            first = f"    {text_of(strategy.get('name')):<{width}}  "
            why, nearest = text_of(strategy.get("why_not")) or "it needs more", text_of(strategy.get("nearest"))
            yield from (Line(text) for text in _wrapped(f"{why} -> {nearest}" if nearest else why, first))


def _columns(plan: Json, shown: list[Json]) -> dict[str, list[str]]:
    limit, device = gpu_bytes(plan), device_word(plan)
    columns = {
        "strategy": [f"{text_of(s.get('name'))}{NO_RUN if s.get('runs') is False else ''}" for s in shown],
        "fits": ["tight" if is_tight(plan, s) else "yes" if s.get("fits") else "no" for s in shown],
        f"GB per {device}": [_gigabytes_needed(s) for s in shown],
    }
    if limit:
        columns[f"of {limit / 1e9:.0f} GB"] = [_bar(needed(s) / limit) for s in shown]
    columns |= {
        "step": [seconds(number(s.get("step_seconds"))) for s in shown],
        f"tok/s/{device}": [_whole(number(s.get("tokens_per_second_per_gpu"))) for s in shown],
        "MFU": [_percent(number(s.get("mfu"))) for s in shown],
    }
    for title, names in {
        "GB in node": ("traffic_bytes", "intra_node"),
        "between": ("traffic_bytes", "inter_node"),
        "host GB": ("host_bytes",),
        "disk GB": ("disk_bytes",),
    }.items():
        if uses(plan, *names):
            columns[title] = [gigabytes(amount(s, *names)) if amount(s, *names) else "-" for s in shown]
    return columns


def _laid_out(cells: dict[str, str], widths: dict[str, int]) -> str:
    laid = [
        f"{cell:<{widths[title]}}" if title.startswith(LEFT) else f"{cell:>{widths[title]}}"
        for title, cell in cells.items()
    ]
    return "  ".join(laid).rstrip()


def _gigabytes_needed(strategy: Json) -> str:
    between = interval(strategy) if strategy.get("fits") else None
    shown = gigabytes(needed(strategy))
    return shown if between is None else f"{shown} ({gigabytes(between[0])}-{gigabytes(between[1])})"


def gigabytes(num_bytes: float) -> str:
    value = num_bytes / 1e9
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 0.05 else f"{value:.2g}"


def _bar(share: float) -> str:
    """The whole GPU is BAR characters; what is beyond it is marked."""
    if share > 1:
        return "#" * BAR + "!"
    num = max(1, int(share * BAR))
    return "#" * num + "." * (BAR - num)


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.3g} ms" if value < 0.9995 else f"{value:.2f} s" if value < 99.95 else f"{value:,.0f} s"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _wrapped(text: str, first: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first)) or [first.rstrip()]
