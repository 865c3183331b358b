"""What was to blame for a lack of memory, and the whole of it in words."""

from textwrap import wrap
from typing import Any

from ..base.text import labelled_lines, plural, size, terminal_width, unbroken
from ..core.engine.memory_report import Memory
from ..planner.plan_json import at
from .largest_blocks import Pool
from .oom_remedies import Fix
from .run_plan import RunPlan

# Shares of the memory from which on they are to blame.
FRAGMENTS, ONE_UNIT = 0.1, 0.5


def blame_of(
    seen: Memory | None, expected: dict[str, int], pool: Pool | None, asked_bytes: int, planned: RunPlan | None
) -> str:
    if pool is not None and asked_bytes and pool.unused >= asked_bytes and pool.unused > FRAGMENTS * pool.limit:
        return (
            f"fragmentation: {size(pool.unused)} are reserved and unused, none of it {size(asked_bytes)} in one piece"
        )
    held = {} if seen is None else {name: num for name, num in seen.by_class().items() if num}
    held = {**expected, **held}
    if not held:
        return "not known: nothing was set up yet"
    if planned is not None and (words := _one_unit(planned, held)):
        return words
    activations = held.get("activations", 0)
    state = sum(held.get(name, 0) for name in ("params", "grads", "optimizer"))
    total = max(sum(held.values()), 1)
    if activations >= state:
        is_seen = seen is not None and seen.activations is not None
        more = _beyond(activations, expected.get("activations")) if is_seen else ""
        return f"activations: {size(activations)} of {size(total)}{more}"
    return f"the state: parameters, gradients and optimizer are {size(state)} of {size(total)}"


def _one_unit(planned: RunPlan, held: dict[str, int]) -> str:
    """Wrapping: where one unit holds most of the model, gathering it is gathering everything."""
    units = planned.entry.schedule.units
    sizes = {unit.name: sum(flat.num_elems for flat in unit.flats) for unit in units}
    largest = max(sizes, key=lambda name: sizes[name])
    share = sizes[largest] / max(sum(sizes.values()), 1)
    if share < ONE_UNIT or held.get("buffers", 0) < ONE_UNIT * max(held.values()):
        return ""
    return (
        f"wrapping: unit {largest!r} holds {share:.0%} of the parameters ({plural(len(units), 'unit')} in all), and "
        "all of it is gathered at once; give the model smaller blocks that repeat"
    )


def _beyond(seen: int, planned: int | None) -> str:
    if not planned:
        return ""
    return f", {size(seen - planned)} more than planned" if seen > 1.05 * planned else ", as planned"


def text_of(report: dict[str, Any], planned: RunPlan | None, helps: list[Fix]) -> str:
    error, asked_bytes = str(report["error"]).partition(". ")[0], report["asked_bytes"]
    more = f", {size(asked_bytes)} more were asked for" if asked_bytes else ""
    where = f"rank {report['rank']}, {at(report['instant'])}"
    if report["step"] is not None:
        where += f", step {report['step']:,}"
    if report["planned_peak"] is not None and planned is not None:
        most, limit = at(planned.entry.memory.peak.name), size(planned.entry.machine.memory_bytes)
        where += f"; planned at most {size(report['planned_peak'])} of {limit}, at {most}"
    shown = ", ".join(
        unbroken(f"{block['count']} x " * (block["count"] > 1) + f"{size(block['bytes'])} {block['name']}")
        for block in report["largest"]
    )
    lines = [
        f"does not fit: {error}{more}",
        *labelled_lines({"where": where}),
        *_memory(report),
        *labelled_lines({"largest": shown, "to blame": report["blame"]}),
    ]
    if not helps:
        return "\n".join([*lines, "  what would help: split more, a smaller micro-batch, or more ranks"])
    told = [
        line
        for fix in helps
        for line in wrap(
            str(fix), terminal_width(), initial_indent=4 * " ", subsequent_indent=6 * " ", break_on_hyphens=False
        )
    ]
    return "\n".join([*lines, "  what would help, as planned:", *told])


def _memory(report: dict[str, Any]) -> list[str]:
    names = list(dict.fromkeys([*report["planned"], *report["seen"]]))
    if not names:
        return []
    rows = [("memory", [*names, "together"])]
    for label in ("planned", "seen"):
        held = report[label]
        cells = [size(held[name]) if name in held else "-" for name in names]
        rows.append((f"  {label}", [*cells, size(sum(held.values())) if held else "-"]))
    widths = [max(len(cells[place]) for _, cells in rows) for place in range(len(names) + 1)]
    lines = [
        f"  {label:<12}" + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for label, cells in rows
    ]
    pool = report["pool"]
    if pool is not None:
        unused = size(pool["reserved"] - pool["allocated"])
        lines.append(f"    allocator {size(pool['reserved'])} reserved of {size(pool['limit'])}, {unused} of it unused")
    return lines
