"""Clusters compared, for a terminal: one row for each, reasons and notes below. Plain ASCII, like `table`."""

import shutil

from ..base.text import count
from .plan_facts import Json, Plan, Strategy, amount, gigabytes, mapping, number, percent, rows, text_of, whole
from .table import PLAIN, _laid_out, _over, _width, _wrapped

# If a row is too wide, columns are dropped in this order.
LEAST = ("tok/step", "with", "MFU", "tok/s/GPU", "GPU-hours")


def show(answer: Json) -> None:
    print(table(answer, shutil.get_terminal_size((PLAIN, 0)).columns))


def table(answer: Json, width: int = PLAIN) -> str:
    found, why, at = rows(answer.get("clusters")), text_of(answer.get("why")), answer.get("recommended")
    best = found[at] if isinstance(at, int) else None
    verdict = f"{why[:1].upper()}{why[1:]}"
    if best is not None:
        verdict = f"Take {_name(best)}: " + "; ".join(filter(None, [costs(best), why]))
    lines = [*_wrapped(verdict, ""), "", f"  {Plan(answer).model_words}", ""]
    fitting = [row for row in found if row.get("fits")]
    columns = _columns(fitting) if fitting else {}
    for least in LEAST:
        if columns and _over(columns, width - 2) > 0:
            columns.pop(least, None)
    widths = {title: _width(title, cells) for title, cells in columns.items()}
    lines += [f"  {_laid_out({title: title for title in columns}, widths)}"] if fitting else []
    for index, row in enumerate(fitting):
        text = _laid_out({title: cells[index] for title, cells in columns.items()}, widths)
        lines.append(f"{'>' if row is best else ' '} {text}"[:width])
    for row in found:
        lines += [] if row.get("fits") else _wrapped(text_of(row.get("why_not")), f"  {_name(row)}: ", indent=4)
    return "\n".join([*lines, *noted(answer.get("notes"))])


def noted(notes: object) -> list[str]:
    """Return lines with notes, after an empty line."""
    found = [_wrapped(text_of(note), "  note: ") for note in notes] if isinstance(notes, list) else []
    return [line for index, lines in enumerate(found) for line in [""][index:] + lines]


def costs(row: Json) -> str:
    """Return days, GPU-hours and dollars of a training in words; empty if they are not known."""
    words = {"days": "{} days", "gpu_hours": "{} GPU-hours", "dollars": "${}"}
    return ", ".join(text.format(_number(row[name])) for name, text in words.items() if row.get(name) is not None)


def _name(row: Json) -> str:
    return text_of(mapping(row.get("cluster")).get("name"))


def _columns(found: list[Json]) -> dict[str, list[str]]:
    strategies = [Strategy(row, Plan({"cluster": row.get("cluster")})) for row in found]
    num_gpus = [amount(row, "cluster", "world_size") for row in found]
    memory = [f" of {amount(row, 'cluster', 'gpu', 'memory_bytes') / 1e9:.0f}" for row in found]
    costs = {"days": "days", "GPU-hours": "gpu_hours", "dollars": "dollars"}
    columns = {
        "cluster": [_name(row) for row in found],
        "strategy": [s.name for s in strategies],
        "with": [", ".join(filter(None, (s.micro, s.checkpointing))) for s in strategies],
        "fits": ["tight" if s.is_tight else "yes" for s in strategies],
        "GB per GPU": [f"{gigabytes(s.needed)}{of}" for s, of in zip(strategies, memory, strict=True)],
        "tok/s": [whole((s.speed or 0) * num) for s, num in zip(strategies, num_gpus, strict=True)],
        "tok/s/GPU": [whole(s.speed) for s in strategies],
        "MFU": [percent(s.mfu) for s in strategies],
        "tok/step": [count(amount(row, "tokens_per_step")) for row in found],
    } | {title: [_number(row.get(name)) for row in found] for title, name in costs.items()}
    return {title: cells for title, cells in columns.items() if set(cells) != {"-"}}


def _number(value: object) -> str:
    known = number(value)
    if known is None:
        return "-"
    return f"{known:,.0f}" if known >= 9.95 else f"{known:.1f}" if known >= 0.095 else f"{known:.1g}"
