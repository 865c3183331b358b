"""Clusters compared, for a terminal: one row for each, reasons and notes below. Plain ASCII, like `table`."""

import shutil

from ..base.text import count
from .plan_facts import Json, Plan, Strategy, decimal, gigabytes, number, percent, rows, text_of, whole
from .table import PLAIN, WIDTH, _laid_out, _over, _width, _wrapped

# If a row is too wide, columns are dropped in this order.
LEAST = ("tok/step", "with", "MFU", "tok/s/GPU", "GPU-hours", "fits", "tok/s", "strategy")


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
    columns = _columns(fitting, names)
    for least in LEAST:
        if columns and _over(columns, width - 2) > 0:
            columns.pop(least, None)
    widths = {title: _width(title, cells) for title, cells in columns.items()}
    lines += [f"  {_laid_out({title: title for title in columns}, widths)}"] if columns else []
    for index, strategy in enumerate(fitting):
        text = _laid_out({title: cells[index] for title, cells in columns.items()}, widths)
        lines.append(f"{'>' if strategy is best else ' '} {text}"[:width])
    for strategy in found:
        why = text_of(strategy.row.get("why_not"))
        lines += [] if strategy.fits else _wrapped(why, f"  {names[strategy]}: ", wide, 4)
    return "\n".join([*lines, *noted(answer["notes"], wide)])


def noted(notes: list[str], width: int = WIDTH) -> list[str]:
    """Return lines with notes, after an empty line."""
    lines = [line for note in notes for line in _wrapped(text_of(note), "  note: ", min(width, WIDTH), 4)]
    return ["", *lines] if lines else []


def _columns(found: list[Strategy], names: dict[Strategy, str]) -> dict[str, list[str]]:
    of = [f" of {s.amount('cluster', 'gpu', 'memory_bytes') / 1e9:.0f}" for s in found]
    columns = {
        "cluster": [names[s] for s in found],
        "strategy": [s.name for s in found],
        "with": [", ".join(filter(None, (s.micro, s.checkpointing))) for s in found],
        "fits": ["tight" if s.is_tight else "yes" for s in found],
        "GB per GPU": [f"{gigabytes(s.needed)}{words}" for s, words in zip(found, of, strict=True)],
        "tok/s": [whole(s.amount("tokens_per_second")) for s in found],
        "tok/s/GPU": [whole(s.speed) for s in found],
        "MFU": [percent(s.mfu) for s in found],
        "tok/step": [count(s.amount("tokens_per_step")) for s in found],
        "days": [decimal(number(s.row.get("days"))) for s in found],
        "GPU-hours": [decimal(number(s.row.get("gpu_hours"))) for s in found],
        "dollars": [decimal(number(s.row.get("dollars"))) for s in found],
    }
    return {title: cells for title, cells in columns.items() if set(cells) - {"-"}}
