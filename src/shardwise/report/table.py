"""A plan, or clusters compared, for a terminal: one table that is read in five seconds, and its sources.

The first line names the recommended strategy and the reason. The text is plain ASCII, so that it looks the same in a
log file; on a terminal the recommended line is bold and strategies that do not fit are dim.
"""

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..base.text import count, seconds, terminal_width
from .plan_facts import Json, Plan, Strategy, decimal, gigabytes, mapping, number, percent, rows, text_of, whole

WIDTH = 100  # maximum width of sentences
NARROWEST = 40
SHORTEST = 12  # minimum length of names that are cut
PLAIN = 120  # width of rows without a terminal
BAR = 12  # characters for the whole GPU
ROUNDS = "*"  # after the name of a strategy that is not exact
INTERVALS = " ("  # begins the interval of memory in a cell: 61 (58-66)
LEFT = ("cluster", "strategy", "with", "fits", "of ")  # columns that are aligned to the left
# If a row is too wide, columns are dropped in this order; at INTERVALS the intervals of memory are dropped. Columns of
# host and disk are the first ones, unless the recommended strategy needs them.
OFFLOADED = ("disk GB", "host GB")
LEAST = ("GB in node", "between", INTERVALS, "of ", "free", "MFU", "days", "unclipped", "tok/s/", "with")
LEAST_OF_CLUSTERS = ("tok/step", "with", "MFU", "tok/s/GPU", "GPU-hours", "fits", "tok/s")
OF_CLUSTERS = ("cluster", "strategy", "GB per GPU", "days", "dollars", *LEAST_OF_CLUSTERS)
COSTS = ("GPU-hours", "dollars")  # those of the recommended strategy are in the first line


class Line(NamedTuple):
    text: str
    style: str = ""


def show(plan: Json) -> None:
    """Print the table of a plan, or of clusters compared: with styles on a terminal, plain elsewhere."""
    from rich.console import Console
    from rich.text import Text

    console, width = Console(highlight=False), shutil.get_terminal_size((PLAIN, 0)).columns
    lines = list(lines_of(Plan(plan), width)) if "strategies" in plan else [Line(offers_table(plan, width))]
    for line in [*lines, *map(Line, noted(plan.get("notes", []), terminal_width()))]:
        if console.is_terminal:
            console.print(Text(line.text, style=line.style), soft_wrap=True)
        else:
            print(line.text)


def offers_table(answer: Json, width: int = PLAIN) -> str:
    """Clusters compared: one row for each, reasons and notes below."""
    found = [Strategy(row, Plan(row)) for row in rows(answer["clusters"])]
    fitting, names = [s for s in found if s.fits], {s: text_of(s.row["cluster"]["name"]) for s in found}
    best = None if answer["recommended"] is None else found[answer["recommended"]]
    words = "; ".join(filter(None, [best.costs, answer["why"]])) if best else answer["why"]
    plan, wide = Plan(answer), min(width, WIDTH)
    lines = [*_wrapped(f"Take {names[best]}: {words}" if best else f"Nothing to take: {words}", "", wide), ""]
    lines += [*_wrapped("; ".join(filter(None, [plan.model_words, plan.training_words])), "  ", wide), ""]
    if fitting:
        columns = {title: cells for title, cells in columns_of(fitting).items() if title in OF_CLUSTERS}
        lines += laid_out(columns, width, LEAST_OF_CLUSTERS, None if best is None else fitting.index(best))
    for strategy in found:
        why = text_of(strategy.row.get("why_not"))
        lines += [] if strategy.fits else _wrapped(why, f"  {names[strategy]}: ", wide, 4)
    return "\n".join(lines)


def noted(notes: list[str], width: int = WIDTH) -> list[str]:
    """Return lines with notes, after an empty line."""
    lines = [line for note in notes for line in _wrapped(text_of(note), "  note: ", min(width, WIDTH), 4)]
    return ["", *lines] if lines else []


def explain(plan: Json, width: int = WIDTH) -> str:
    """The terms of the recommended strategy's memory: bytes, formula and source of each."""
    terms, best = Plan(plan).terms, Plan(plan).best
    if not terms:
        return "This plan explains no terms."
    lines = [f"Memory of {best.name}, term by term:", ""] if best is not None else []
    wide, longest = max(min(width, WIDTH), NARROWEST), max(len(term["term"]) for term in terms)
    for term in terms:
        first = f"  {term['term']:<{longest}}  {term['size']:>8}  "
        lines += _wrapped(term["formula"] or "-", first, wide)
        lines += _wrapped(term["source"], " " * (len(first) + 2), wide) if term["source"] else []
    lines += ["", *_wrapped(f"At once: {best.peak}", "", wide)] if best is not None and best.peak else []
    return "\n".join(lines)


def lines_of(plan: Plan, width: int) -> Iterator[Line]:
    wide = max(min(width, WIDTH), NARROWEST)
    yield from (Line(text, "bold") for text in _wrapped(plan.verdict, "", wide))
    conditions = [plan.model_words, plan.cluster_words, plan.machine_words, plan.training_words]
    if any(conditions):
        yield Line("")
        yield from (Line(text) for text in _wrapped("; ".join(word for word in conditions if word), "  ", wide))
    if not plan.strategies:
        return
    yield Line("")
    best = plan.best
    needs_host = best is not None and best.amount("host_bytes")
    order = (*LEAST[:-2], *OFFLOADED, *LEAST[-2:]) if needs_host else (*OFFLOADED, *LEAST)
    columns = {
        title: cells for title, cells in columns_of(plan.shown, plan.device, plan.limit).items() if title not in COSTS
    }
    header, *texts = laid_out(columns, width, order, None if best is None else plan.shown.index(best))
    yield Line(header, "dim")
    for strategy, text in zip(plan.shown, texts, strict=True):
        yield Line(text, "bold green" if strategy is best else "" if strategy.fits else "dim")
    if not all(strategy.is_exact for strategy in plan.strategies):
        yield Line(f"  {ROUNDS} rounds what is sent: chosen only on request", "dim")
    if any(strategy.is_tight for strategy in plan.strategies):
        yield Line("  tight: less stays free than the plan may be wrong by", "dim")
    if best is not None and (words := "; ".join(word for word in (best.option, best.batch, best.spare) if word)):
        yield Line("")
        yield from (Line(text) for text in _wrapped(words, "  ", wide))
    if others := plan.alternative_words:
        yield Line("")
        yield Line("  fits, with changes" if best is None else "  faster, with changes")
        for flags, words in others:
            yield from (Line(text) for text in _wrapped(flags, "    ", wide))
            yield from (Line(text) for text in _wrapped(words, "      ", wide))
    if refused := plan.refusals:
        yield Line("")
        yield Line("  does not fit")
        longest = min(max(len(names) for names, _, _ in refused), wide // 3)
        for names, why, nearest in refused:
            text = (why or "it needs more") + (f" -> {nearest}" if nearest else "")
            *above, last = textwrap.wrap(names, longest, break_long_words=False) or [""]
            yield from (Line(f"    {line}") for line in above)
            yield from (Line(line) for line in _wrapped(text, f"    {last:<{longest}}  ", wide, 6 + longest))


def _narrowed(columns: dict[str, list[str]], width: int, order: Sequence[str]) -> dict[str, list[str]]:
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


def columns_of(shown: list[Strategy], device: str = "GPU", limit: float | None = None) -> dict[str, list[str]]:
    """Return the columns that have a value in some row: of the strategies of a plan, or of clusters compared."""
    clusters = [text_of(mapping(s.row.get("cluster")).get("name")) for s in shown]
    after = [
        f" of {s.amount('cluster', 'gpu', 'memory_bytes') / 1e9:.0f}"
        if cluster
        else f" ({gigabytes(s.interval[0])}-{gigabytes(s.interval[1])})"
        if s.fits and s.interval
        else ""
        for s, cluster in zip(shown, clusters, strict=True)
    ]
    # Settings in short: mb 4 x 2, full. Of a plan, those in which its strategies differ.
    settings = [[s.micro for s in shown], [s.checkpointing for s in shown]]
    settings = [column for column in settings if any(clusters) or len(set(column)) > 1]
    columns = {
        "cluster": clusters,
        "strategy": [s.title if s.is_exact else f"{s.title}{ROUNDS}" for s in shown],
        "with": [", ".join(filter(None, words)) or "-" for words in zip(*settings, strict=True)],
        "fits": ["tight" if s.is_tight else "yes" if s.fits else "no" for s in shown],
        f"GB per {device}": [f"{gigabytes(s.needed)}{words}" for s, words in zip(shown, after, strict=True)],
        "free": [gigabytes(s.room) if s.fits and s.room is not None else "-" for s in shown],
        f"of {(limit or 0) / 1e9:.0f} GB": [_bar(s.needed / limit) for s in shown if limit],
        "step": [seconds(s.step_s) for s in shown],
        "unclipped": [seconds(s.unclipped_s) for s in shown],
        "tok/s": [whole(number(s.row.get("tokens_per_second"))) for s in shown],
        f"tok/s/{device}": [whole(s.speed) for s in shown],
        "MFU": [percent(s.mfu) for s in shown],
        "tok/step": [count(s.amount("tokens_per_step")) for s in shown],
    }
    for title, cost in (("days", "days"), ("GPU-hours", "gpu_hours"), ("dollars", "dollars")):
        columns[title] = [decimal(number(s.row.get(cost))) for s in shown]
    for title, names in {
        "GB in node": ("traffic_bytes", "intra_node"),
        "between": ("traffic_bytes", "inter_node"),
        "host GB": ("host_bytes",),
        "disk GB": ("disk_bytes",),
    }.items():
        columns[title] = [gigabytes(s.amount(*names)) if s.amount(*names) else "-" for s in shown]
    return {title: cells for title, cells in columns.items() if set(cells) - {"-", "0", ""}}


def laid_out(columns: dict[str, list[str]], width: int, order: Sequence[str], best: int | None) -> list[str]:
    """Return the titles and a line for each row; ">" marks the row with the index `best`."""
    columns = _narrowed(columns, width - 2, order)
    pads = {title: (str.ljust if title.startswith(LEFT) else str.rjust) for title in columns}
    padded = [[pads[title](cell, _width(title, cells)) for cell in (title, *cells)] for title, cells in columns.items()]
    rows = enumerate(zip(*padded, strict=True), -1)
    return [f"{'>' if index == best else ' '} {'  '.join(cells).rstrip()}"[:width] for index, cells in rows]


def _bar(share: float) -> str:
    """Draw a bar: the memory of the whole GPU is BAR characters, and "!" follows if more is needed."""
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
