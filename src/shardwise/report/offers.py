"""Clusters compared, for a terminal: one row for each, reasons and notes below. Plain ASCII, like `table`."""

import shutil

from .plan_facts import Json, Plan, Strategy, rows, text_of
from .table import PLAIN, WIDTH, _wrapped, columns_of, laid_out

# If a row is too wide, columns are dropped in this order.
LEAST = ("tok/step", "with", "MFU", "tok/s/GPU", "GPU-hours", "fits", "tok/s")
SHOWN = ("cluster", "strategy", "GB per GPU", "days", "dollars", *LEAST)


def show(answer: Json) -> None:
    print(table(answer, shutil.get_terminal_size((PLAIN, 0)).columns))


def table(answer: Json, width: int = PLAIN) -> str:
    found = [Strategy(row, Plan(row)) for row in rows(answer["clusters"])]
    fitting, names = [s for s in found if s.fits], {s: text_of(s.row["cluster"]["name"]) for s in found}
    best = None if answer["recommended"] is None else found[answer["recommended"]]
    words = "; ".join(filter(None, [best.costs, answer["why"]])) if best else answer["why"]
    plan, wide = Plan(answer), min(width, WIDTH)
    lines = [*_wrapped(f"Take {names[best]}: {words}" if best else f"Nothing to take: {words}", "", wide), ""]
    lines += [*_wrapped("; ".join(filter(None, [plan.model_words, plan.training_words])), "  ", wide), ""]
    if fitting:
        columns = {title: cells for title, cells in columns_of(fitting).items() if title in SHOWN}
        lines += laid_out(columns, width, LEAST, None if best is None else fitting.index(best))
    for strategy in found:
        why = text_of(strategy.row.get("why_not"))
        lines += [] if strategy.fits else _wrapped(why, f"  {names[strategy]}: ", wide, 4)
    return "\n".join([*lines, *noted(answer["notes"], wide)])


def noted(notes: list[str], width: int = WIDTH) -> list[str]:
    """Return lines with notes, after an empty line."""
    lines = [line for note in notes for line in _wrapped(text_of(note), "  note: ", min(width, WIDTH), 4)]
    return ["", *lines] if lines else []
