"""One page for a plan, a run, or a run with its plan. It needs nothing but itself: style and drawings are inside, there
is no script, and its policy forbids the network. Everything that comes from files is escaped.
"""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..base.text import count, size
from ..version import VERSION
from . import charts, plan_facts, step
from .comparison import page_parts
from .descriptions import (
    away_words,
    batch_words,
    cluster_words,
    conditions,
    days_words,
    grouped,
    layout_words,
    model_words,
    peak_words,
    reason,
    refusals,
)
from .plan_facts import CLASSES, RESERVE, WIRES, Json, amount, gigabytes, number, rows, seconds, text_of
from .table import verdict

HERE = Path(__file__).parent
DAY_S = 86_400


def render(plan: Json | None, run: Json | None = None) -> str:
    """Return the page as the text of one file."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"size": size, "gb": gigabytes, "seconds": seconds}
    page = environment.get_template("page.html.j2")
    css = Markup((HERE / "page.css").read_text())
    return page.render(
        css=css,
        version=VERSION,
        title=_title(plan, run),
        plan=None if plan is None else _plan(plan, is_choice=run is None),
        run=None if run is None else page_parts(run),
    )


def _title(plan: Json | None, run: Json | None) -> str:
    if run is not None:
        return ": ".join(word for word in (text_of(run.get("name")), text_of(run.get("model"))) if word)
    words = [model_words(plan or {}), cluster_words(plan or {})]
    return " on ".join(word for word in words if word) or "Plan"


def _plan(plan: Json, is_choice: bool) -> dict[str, Any]:
    shown, best, limit = plan_facts.strategies(plan), plan_facts.recommended(plan), plan_facts.gpu_bytes(plan)
    chosen = best or (shown[0] if len(shown) == 1 else None)
    scale = charts.scale_of(shown, limit)
    used = {name for row in shown for name in plan_facts.at_peak(row)}
    used |= {RESERVE} if any(plan_facts.reserve(row) for row in shown) else set()
    batches = {batch_words(row) for row in shown}
    groups = grouped(plan, shown)
    return {
        "is_choice": is_choice,
        "device": plan_facts.device_word(plan),
        "recommended": None if best is None else text_of(best["name"]),
        "verdict": verdict(plan),
        "why": _sentence(reason(plan)),
        "batches": batches.pop() if len(batches) == 1 else "",
        "tiles": [] if chosen is None else _tiles(plan, chosen),
        "layout": "" if chosen is None else layout_words(chosen),
        "batch": "" if chosen is None else batch_words(chosen),
        "legend": [(name, label) for name, label in _legend() if name in used],
        "strategies": [_strategy(plan, row, name, scale) for row, name in groups],
        "has_days": any(days_words(row) for row in shown),
        "axis": Markup(charts.memory_axis(scale)),
        "is_tight": any(plan_facts.is_tight(plan, row) for row in shown),
        "limit_word": Markup(charts.limit_word(scale, f"{plan_facts.device_word(plan)} {gigabytes(limit)} GB"))
        if limit
        else "",
        "step": None if chosen is None else _step(chosen, limit, plan_facts.device_word(plan)),
        "wires": _wires(plan, groups),
        "traffic": [] if chosen is None else _collectives(chosen),
        "refusals": refusals(shown),
        "conditions": conditions(plan),
        "explain": [
            {
                **{key: text_of(term.get(key)) for key in ("term", "formula", "source")},
                "bytes": number(term.get("bytes")),
            }
            for term in rows(plan.get("explain"))
        ],
    }


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _legend() -> list[tuple[str, str]]:
    return [*CLASSES.items(), (RESERVE, "held by the allocator")]


def _tiles(plan: Json, chosen: Json) -> list[tuple[str, str, str]]:
    """Return the tiles of the page: name, figure, and a note below it."""
    limit, between, device = plan_facts.gpu_bytes(plan), plan_facts.interval(chosen), plan_facts.device_word(plan)
    speed, world, mfu = (
        number(chosen.get("tokens_per_second_per_gpu")),
        plan_facts.world_size(plan),
        plan_facts.mfu(plan, chosen),
    )
    of = f"of {gigabytes(limit)} GB" if limit else ""
    of += f"; between {gigabytes(between[0])} and {gigabytes(between[1])}" if between else ""
    found = [(f"memory of a {device}", size(plan_facts.needed(chosen)), of.strip("; "))]
    for place, words in plan_facts.PLACES.items():
        held, there = amount(chosen, f"{place}_bytes"), amount(plan, "cluster", f"{place}_bytes")
        if held:
            found.append((f"of a node, {words}", size(held), f"of {gigabytes(there)} GB" if there else ""))
    if number(chosen.get("step_seconds")) is not None:
        found.append(("step", seconds(number(chosen["step_seconds"])), "" if mfu is None else f"MFU {mfu:.1%}"))
    if speed is not None:
        found.append(("speed", f"{speed:,.0f}", f"tokens/s on each {device}"))
        if world:
            found.append(("in a day", count(speed * world * DAY_S), f"tokens on {world:,} {device}s"))
    if days_words(chosen):
        found.append(("whole training", f"{days_words(chosen)} days", ""))
    return found


def _strategy(plan: Json, row: Json, name: str, scale: charts.Scale) -> dict[str, Any]:
    need, limit = plan_facts.needed(row), plan_facts.gpu_bytes(plan)
    held = plan_facts.at_peak(row)
    between = plan_facts.interval(row)
    return {
        "name": name,
        "is_best": row is plan_facts.recommended(plan),
        "fits": bool(row.get("fits")),
        "verdict": "\u2713 tight"
        if plan_facts.is_tight(plan, row)
        else "\u2713 fits"
        if row.get("fits")
        else "\u2717 does not fit",
        "exact": plan_facts.is_exact(row),
        "batch": batch_words(row),
        "bar": Markup(charts.memory_bar(row, scale)),
        "needed": need,
        "interval": "" if between is None else f"{gigabytes(between[0])}\u2013{gigabytes(between[1])}",
        "times": f"{need / limit:.1f} times what there is" if limit and need > scale.full else "",
        "bytes": {name: held.get(name, 0.0) for name in CLASSES} | {RESERVE: plan_facts.reserve(row)},
        "step_s": number(row.get("step_seconds")),
        "speed": number(row.get("tokens_per_second_per_gpu")),
        "mfu": plan_facts.mfu(plan, row),
        "days": days_words(row),
        "away": away_words(row),
        "host_bytes": amount(row, "host_bytes"),
        "disk_bytes": amount(row, "disk_bytes"),
    }


def _step(chosen: Json, limit: float | None, device: str) -> dict[str, Any] | None:
    full_s, instants = step.duration_of(chosen), step.instants_of(chosen)
    lanes = step.lanes_of(chosen, full_s) if full_s else []
    if not full_s or not (instants or lanes):
        return None
    # Instants describe the allocator, without the context.
    context = amount(chosen, "per_gpu_bytes", plan_facts.CONTEXT)
    room = max(limit - context, 0.0) if limit else None
    memory = step.memory_over_time(instants, full_s, room) if instants else None
    if memory is not None:
        memory = {**memory, "drawing": Markup(memory["drawing"])}
    return {
        "name": text_of(chosen.get("name")),
        "seconds": max(full_s, number(chosen.get("step_seconds")) or 0.0),
        "is_all": full_s >= amount(chosen, "step_seconds"),
        "memory": memory,
        "peak": peak_words(chosen),
        "parts": [(name, CLASSES[name], value) for name, value in memory["peak"].held.items()] if memory else [],
        "lanes": [lane._replace(drawing=Markup(lane.drawing)) for lane in lanes],
        "axis": Markup(step.time_axis(full_s)),
        "zooms": step.ZOOMS,
        "limit_word": f"{device}, without {CLASSES[plan_facts.CONTEXT]}" if context else device,
    }


def _wires(plan: Json, groups: list[tuple[Json, str]]) -> dict[str, Any]:
    used = {name: label for name, label in WIRES.items() if plan_facts.uses(plan, "traffic_bytes", name)}
    most = {name: max(amount(row, "traffic_bytes", name) for row, _ in groups) for name in used}
    table = []
    for row, called in groups:
        cells = []
        for name, label in used.items():
            value = amount(row, "traffic_bytes", name)
            about = f"{called}, {label}: {size(value)}"
            cells.append((value, Markup(charts.plain_bar(value, most[name], f"w-{name}", about))))
        table.append((called, cells))
    return {"labels": list(used.values()), "rows": table}


def _collectives(chosen: Json) -> list[dict[str, Any]]:
    found = rows(chosen.get("traffic"))
    most = max((amount(row, "wire_bytes") for row in found), default=0.0)
    return [
        {
            **{name: text_of(row.get(name)) for name in ("axis", "kind", "dtype")},
            "num_calls": int(amount(row, "num_calls")),
            "bytes": amount(row, "wire_bytes"),
            "bar": Markup(
                charts.plain_bar(amount(row, "wire_bytes"), most, "w-intra_node", size(amount(row, "wire_bytes")))
            ),
        }
        for row in found
    ]
