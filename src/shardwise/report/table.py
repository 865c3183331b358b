"""A plan for a terminal: one table that is read in five seconds, and where its numbers come from.

The first line names the recommended strategy and the reason. The text is plain ASCII, so that it looks the same in a
log file; on a terminal the recommended line is bold and strategies that do not fit are dim.
"""

import shutil
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from ..base.text import size
from .descriptions import (
    batch_words,
    cluster_words,
    days_words,
    differences,
    grouped,
    layout_words,
    machine_words,
    model_words,
    peak_words,
    reason,
    refusals,
    training_words,
)
from .plan_facts import (
    Json,
    amount,
    device_word,
    gigabytes,
    gpu_bytes,
    interval,
    is_exact,
    is_tight,
    mfu,
    needed,
    number,
    percent,
    recommended,
    rows,
    seconds,
    strategies,
    text_of,
    uses,
    whole,
)

WIDTH = 100  # maximum width of sentences
NARROWEST = 40
SHORTEST = 12  # minimum length of names that are cut
PLAIN = 120  # width of rows without a terminal
BAR = 12  # characters for the whole GPU
ROUNDS = "*"  # after the name of a strategy that is not exact
INTERVALS = " ("
LEFT = ("strategy", "with", "fits", "of ")
# If a row is too wide, columns are dropped in this order, and in between the intervals of memory. Host and disk are
# dropped first, unless the recommended strategy needs them.
AWAY = ("disk GB", "host GB")
LEAST = ("GB in node", "between", INTERVALS, "of ", "MFU", "days", "tok/s/", "with")


class Line(NamedTuple):
    text: str
    style: str = ""


def table(plan: Json, width: int = PLAIN) -> str:
    return "\n".join(line.text for line in _lines(plan, width))


def show(plan: Json) -> None:
    """Print the table: with styles on a terminal, plain elsewhere."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for line in _lines(plan, shutil.get_terminal_size((PLAIN, 0)).columns):
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
    peak = peak_words(best or {})
    return "\n".join([*head, *lines, *(["", *_wrapped(f"At once: {peak}", "")] if peak else [])])


def verdict(plan: Json) -> str:
    """The recommended strategy and the reason, in a sentence."""
    best, why = recommended(plan), reason(plan)
    if best is not None:
        days = f"; {days_words(best)} days in all" if days_words(best) else ""
        return f"Take {text_of(best['name'])}" + (f": {why}{days}" if why else f"{days}.")
    nearest = next(iter(strategies(plan)), None)
    if nearest is None:
        return "Nothing was planned."
    # A plan of a single strategy may recommend none although it fits.
    says = "fits" if nearest.get("fits") else "does not fit"
    return why or (f"{text_of(nearest.get('name'))} {says}." if _is_alone(plan) else "Nothing fits.")


def _is_alone(plan: Json) -> bool:
    return len(rows(plan.get("strategies"))) == 1


def _lines(plan: Json, width: int) -> Iterator[Line]:
    wide = max(min(width, WIDTH), NARROWEST)
    yield from (Line(text, "bold") for text in _wrapped(verdict(plan), "", wide))
    conditions = [model_words(plan), cluster_words(plan), machine_words(plan), training_words(plan)]
    if any(conditions):
        yield Line("")
        yield from (Line(text) for text in _wrapped("; ".join(word for word in conditions if word), "  ", wide))
    shown = strategies(plan)
    if not shown:
        return
    yield Line("")
    columns = _narrowed(_columns(plan, grouped(plan, shown)), width - 2, _least(plan))
    widths = {title: _width(title, cells) for title, cells in columns.items()}
    yield Line(f"  {_laid_out({title: title for title in columns}, widths)}"[:width], "dim")
    best = recommended(plan)
    for at, (strategy, _) in enumerate(grouped(plan, shown)):
        text = _laid_out({title: cells[at] for title, cells in columns.items()}, widths)
        style = "bold green" if strategy is best else "" if strategy.get("fits") else "dim"
        yield Line(f"{'>' if strategy is best else ' '} {text}"[:width], style)
    if not all(map(is_exact, shown)):
        yield Line(f"  {ROUNDS} rounds what travels: taken only if it is asked for", "dim")
    if any(is_tight(plan, strategy) for strategy in shown):
        yield Line("  tight: the upper end of what the allocator may reserve does not fit", "dim")
    if best is not None:
        name, layout = text_of(best["name"]), layout_words(best)
        if words := "; ".join(word for word in (layout if layout != name else "", batch_words(best)) if word):
            yield Line("")
            yield from (Line(text) for text in _wrapped(words, f"  {name}: ", wide))
    if refused := refusals(shown):
        yield Line("")
        yield Line("  does not fit")
        longest = min(max(len(names) for names, _, _ in refused), wide // 3)
        for names, why, nearest in refused:
            text = (why or "it needs more") + (f" -> {nearest}" if nearest else "")
            yield from (Line(line) for line in _wrapped(text, f"    {names:<{longest}}  ", wide, 6 + longest))


def _least(plan: Json) -> tuple[str, ...]:
    best = recommended(plan)
    return (*LEAST[:-2], *AWAY, *LEAST[-2:]) if best is not None and amount(best, "host_bytes") else (*AWAY, *LEAST)


def _narrowed(columns: dict[str, list[str]], width: int, order: tuple[str, ...]) -> dict[str, list[str]]:
    """Drop the least important columns until the row fits; then cut names."""
    for least in order:
        if _over(columns, width) <= 0:
            return columns
        columns = {
            title: [cell.partition(INTERVALS)[0] for cell in cells]
            if (title[:3], least) == ("GB ", INTERVALS)
            else cells
            for title, cells in columns.items()
            if not title.startswith(least)
        }
    names = columns["strategy"]
    room = max(_width("strategy", names) - max(_over(columns, width), 0), SHORTEST)
    return columns | {"strategy": [name if len(name) <= room else f"{name[: room - 2]}.." for name in names]}


def _over(columns: dict[str, list[str]], width: int) -> int:
    return sum(_width(title, cells) + 2 for title, cells in columns.items()) - 2 - width


def _width(title: str, cells: list[str]) -> int:
    return max(len(title), *map(len, cells))


def _columns(plan: Json, groups: list[tuple[Json, str]]) -> dict[str, list[str]]:
    limit, device, shown = gpu_bytes(plan), device_word(plan), [strategy for strategy, _ in groups]
    batches = differences(shown)
    columns = {
        "strategy": [name if is_exact(s) else f"{name}{ROUNDS}" for s, name in groups],
        **({"with": batches} if batches else {}),
        "fits": ["tight" if is_tight(plan, s) else "yes" if s.get("fits") else "no" for s in shown],
        f"GB per {device}": [_gigabytes_needed(s) for s in shown],
    }
    if limit:
        columns[f"of {limit / 1e9:.0f} GB"] = [_bar(needed(s) / limit) for s in shown]
    columns |= {
        "step": [seconds(number(s.get("step_seconds"))) for s in shown],
        f"tok/s/{device}": [whole(number(s.get("tokens_per_second_per_gpu"))) for s in shown],
        "MFU": [percent(mfu(plan, s)) for s in shown],
        **({"days": [days_words(s) or "-" for s in shown]} if any(days_words(s) for s in shown) else {}),
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


def _bar(share: float) -> str:
    """Draw a bar: the whole GPU is BAR characters, and an excess is marked."""
    if share > 1:
        return "#" * BAR + "!"
    num = max(1, int(share * BAR))
    return "#" * num + "." * (BAR - num)


def _wrapped(text: str, first: str, width: int = WIDTH, indent: int | None = None) -> list[str]:
    below = " " * (len(first) if indent is None else indent)
    wrapped = textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=below, break_long_words=False, break_on_hyphens=False
    )
    return wrapped or [first.rstrip()]
