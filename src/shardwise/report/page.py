"""One page for a plan, a run, or a run with its plan. It needs no other file: styles and drawings are inside, there is
no script, and its content security policy forbids network access. Everything that comes from files is escaped.
"""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..base.text import count, seconds, size
from ..version import VERSION
from . import charts
from .plan_facts import (
    PLACES,
    SEGMENTS,
    WIRES,
    Json,
    Plan,
    Strategy,
    amount,
    gigabytes,
    listed,
    percent,
    rows,
    text_of,
    whole,
)
from .run import page_parts

HERE = Path(__file__).parent
DAY_S = 86_400
FILTERS = {
    "size": size, "gb": gigabytes, "seconds": seconds, "whole": whole, "percent": percent, "listed": listed,
    "text": text_of, "amount": amount,
}  # fmt: skip


def render(plan: Json | None, run: Json | None = None) -> str:
    """Return the page as the text of one file."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {**FILTERS, "num": lambda value: f"{value:.5g}"}
    planned = Plan(plan or {})
    if run is None:
        title = " on ".join(filter(None, (planned.model_words, planned.cluster_words))) or "Plan"
    else:
        title = ": ".join(filter(None, (text_of(run.get("name")), text_of(run.get("model")))))
    return environment.get_template("page.html.j2").render(
        css=Markup((HERE / "page.css").read_text()),
        version=VERSION,
        title=title,
        is_choice=run is None,
        run=None if run is None else page_parts(run),
        plan=None if plan is None else planned,
        **_parts(planned),
    )


def _parts(plan: Plan) -> dict[str, Any]:
    """Return the values that the template needs in addition to the plan."""
    chosen, batches = plan.chosen, {strategy.batch for strategy in plan.strategies}
    used = {name for strategy in plan.strategies for name, value in strategy.segments.items() if value}
    wires = {name: label for name, label in WIRES.items() if plan.uses("traffic_bytes", name)}
    return {
        "chosen": chosen,
        "reason": plan.reason[:1].upper() + plan.reason[1:],
        "batches": batches.pop() if len(batches) == 1 else "",
        "tiles_of_plan": [] if chosen is None else _tiles(plan, chosen),
        "legend": {name: label for name, label in SEGMENTS.items() if name in used},
        "scale": charts.scale_of(plan),
        "step": None if chosen is None else charts.draw_step(plan, chosen),
        "wires": wires,
        "most": {name: max(strategy.amount("traffic_bytes", name) for strategy in plan.shown) for name in wires},
        "traffic": [] if chosen is None else rows(chosen.row.get("traffic")),
        "explain": plan.terms,
    }


def _tiles(plan: Plan, chosen: Strategy) -> list[tuple[str, str, str]]:
    """Return the tiles of the page. A tile has a name, a number, and a note below it."""
    limit, between, device, speed = plan.limit, chosen.interval, plan.device, chosen.speed
    of = f"of {gigabytes(limit)} GB" if limit else ""
    of += f"; between {gigabytes(between[0])} and {gigabytes(between[1])}" if between else ""
    found = [(f"memory of a {device}", size(chosen.needed), of.strip("; "))]
    for place, words in PLACES.items():
        held, there = chosen.amount(f"{place}_bytes"), amount(plan.cluster, f"{place}_bytes")
        if held:
            found.append((f"of a node, {words}", size(held), f"of {gigabytes(there)} GB" if there else ""))
    if chosen.step_s is not None:
        found.append(("step", seconds(chosen.step_s), "" if chosen.mfu is None else f"MFU {chosen.mfu:.1%}"))
    if speed is not None:
        found.append(("speed", f"{speed:,.0f}", f"tokens/s on each {device}"))
        if plan.world_size:
            per_day = count(speed * plan.world_size * DAY_S)
            found.append(("in a day", per_day, f"tokens on {plan.world_size:,} {device}s"))
    if chosen.days:
        found.append(("whole training", f"{chosen.days} days", chosen.costs.partition(" days, ")[2]))
    return found
