"""Strategies that come to the same, told together. On one node, those that differ between nodes alone do."""

import re

from .descriptions import batch_words
from .plan_facts import CLASSES, WIRES, Json, amount, at_peak, interval, is_tight, needed, text_of


def grouped(plan: Json, shown: list[Json]) -> list[tuple[Json, str]]:
    """Strategies with what they are called: those that come to the same as an earlier one stand behind its name."""
    found: dict[object, list[Json]] = {}
    for row in shown:
        found.setdefault(_numbers(plan, row), []).append(row)
    return [(first, _called(first, others)) for first, *others in found.values()]


def _called(first: Json, others: list[Json]) -> str:
    names = ", ".join(text_of(row.get("name")) for row in others)
    return text_of(first.get("name")) + (f" ({names})" if names else "")


def _numbers(plan: Json, row: Json) -> object:
    """All that is shown of a strategy, but for its name."""
    figures = [
        *(at_peak(row).get(name, 0.0) for name in CLASSES),
        *(interval(row) or (0, 0)),
        *(amount(row, "traffic_bytes", name) for name in WIRES),
        *(amount(row, name) for name in ("host_bytes", "disk_bytes", "step_seconds", "tokens_per_second_per_gpu")),
    ]
    words = [text_of(row.get(name)) for name in ("fits", "exact", "why_not", "nearest")]
    return (*(f"{figure:.4g}" for figure in [*figures, needed(row)]), *words, is_tight(plan, row), batch_words(row))


# "needs 98.1 GB on each H100-80GB, which has 84.9 GB", with its number apart.
_NEEDS = re.compile(r"(needs )([\d,.]+)( GB .*)")


def refusals(shown: list[Json]) -> list[tuple[str, str, str]]:
    """Names, why not, and the nearest change; those whose sentence differs in its number alone, together."""
    found: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for row in shown:
        if not row.get("fits"):
            why = text_of(row.get("why_not"))
            begin, amount_of, end = parts.groups() if (parts := _NEEDS.fullmatch(why)) else (why, "", "")
            key = begin, end, text_of(row.get("nearest"))
            found.setdefault(key, []).append((text_of(row.get("name")), amount_of))
    return [
        (", ".join(name for name, _ in each), f"{begin}{_span(each)}{end}", nearest)
        for (begin, end, nearest), each in found.items()
    ]


def _span(each: list[tuple[str, str]]) -> str:
    """They are in the order of what they need."""
    first, last = each[0][1], each[-1][1]
    return first if first == last else f"{first} to {last}"
