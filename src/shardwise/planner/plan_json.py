"""A plan as JSON, with the formula behind every term and its source (`formulas.json`).

`shardwise plan --json` prints it, run folders contain it, and HTML reports are made from it.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from ..base.text import size
from ..core.layout import Layout
from ..core.schedule.state_bytes import saved_error_bytes
from ..core.schedule.step_schedule import NUM_REDUCTIONS, NUM_ROW_SLOTS
from ..version import VERSION
from .assess import Assessment, Machine
from .changes import Alternative, much_faster
from .cost.peak import CLASSES, Instant
from .cost.step_time import Span
from .planning import Plan
from .search import label_of, strategy_of
from .states import STATE_FIELDS, States, StatesRow
from .training import OURS, TITLES

Json = dict[str, Any]

SECONDS_PER_DAY = 86400.0
_WORDS = {"params": "parameters", "grads": "gradients", "gathered": "gathered units", "reduce": "reduction"}
_LOSSES = {
    "chunked": "one chunk of logits, and the gradient of the head's weight",
    "plain": "14 B x tokens x vocabulary",
    "compiled": "4 B x tokens x vocabulary",
    "fused": "no logits",
}
_OURS = {"fits": "fits", "needed_bytes": "needed_bytes", "step_seconds": "step_s"}
_FORMULAS: dict[str, list[str]] = json.loads(Path(__file__).with_name("formulas.json").read_text(encoding="utf-8"))


def plan_as_json(plan: Plan | States, num_tokens: float | None = None) -> Json:
    """Convert a plan. `num_tokens`: length of the whole training, for the number of days it takes."""
    best, training = plan.recommended, dataclasses.asdict(plan.training)
    ours = plan.ours if isinstance(plan, Plan) else None
    others: list[Json] = []
    if isinstance(plan, States):
        rows, training = [_row(row) for row in plan.rows], {name: training[name] for name in STATE_FIELDS}
    else:
        # Settings that the planner had to choose are shown as "auto" or null.
        if any(len(trainings) > 1 for trainings in plan.choice):
            training["checkpointing"] = "auto"
        if len(plan.choice) > 1:
            training |= {"micro_batch": None, "num_micro_batches": None}
        in_full = best or plan.found[0]
        rows = [strategy_as_json(entry, plan, num_tokens, entry is in_full) for entry in plan.found]
        much = much_faster(plan.alternatives, best if isinstance(best, Assessment) else None)
        others = [_alternative(tried, plan, tried is much) for tried in plan.alternatives]
    return {
        "version": VERSION,
        "model": dict(plan.facts),
        "cluster": cluster_as_json(plan.machine),
        "training": training,
        "strategies": rows,
        "recommended": None if best is None else best.name,
        "why": plan.why,
        "alternatives": others,
        "explain": explain(best) if isinstance(best, Assessment) and plan.training.engine == OURS else [],
        "engine": TITLES.get(plan.training.engine, ""),
        # The same strategy under our engine, if another one is planned.
        "ours": {key: getattr(ours, name) for key, name in _OURS.items()} if ours else None,
    }


def _alternative(tried: Alternative, plan: Plan, is_much_faster: bool) -> Json:
    entry, best, settings = tried.entry, plan.recommended, dict(tried.settings)
    if "lora" in settings:
        settings["lora"] = settings["lora"].r
    return {
        "kind": tried.kind,
        "flags": tried.flags,
        "settings": settings,
        "cost": tried.cost,
        "label": label_of(entry),
        "checkpointing": entry.training.checkpointing,
        "tight": entry.is_tight,
        "needed_bytes": entry.needed_bytes,
        "room_bytes": entry.room_bytes,
        "host_bytes": entry.host_bytes,
        "step_seconds": entry.step_s,
        "tokens_per_second_per_gpu": entry.tokens_per_s,
        "times_as_fast": None if best is None else entry.tokens_per_s / best.tokens_per_s,
        "much_faster": is_much_faster,
    }


def strategy_as_json(entry: Assessment, plan: Plan, num_tokens: float | None, in_full: bool = False) -> Json:
    """Convert one strategy. `in_full`: with the memory at every instant and the timeline of the step."""
    timing, gpu, strategy = entry.timing, plan.machine.cluster.gpu, strategy_of(entry)
    found = {
        **_row(entry),
        "spare_bytes": entry.spare_bytes,
        "strategy": dataclasses.asdict(strategy) if isinstance(strategy, Layout) else strategy,
        "label": label_of(entry),
        "tight": entry.fits and entry.is_tight,
        "room_bytes": entry.room_bytes,
        "error_bytes": entry.error_bytes,
        "nearest": "" if entry.fits else plan.refusals.get(entry.name, ""),
        "step_seconds": timing.step_s,
        "unclipped_step_seconds": entry.unclipped_s,
        "compute_seconds": timing.compute_s,
        "tokens_per_second_per_gpu": entry.tokens_per_s,
        # Model FLOP utilisation: FLOP as `hardware.gpus.flops_per_token` counts them.
        "mfu": plan.subject.flops_per_token * entry.tokens_per_s / gpu.flops,
    }
    if in_full:
        found["instants"] = [
            {"name": instant.name, "at_s": at_s, "bytes": instant.by_class()} for instant, at_s in _begins(entry)
        ]
        found["timeline"] = [span._asdict() for span in timing.spans if span.end_s > span.begin_s]
    if num_tokens is not None:
        found["days"] = days_of(num_tokens, entry)
    return found


def days_of(num_tokens: float, entry: Assessment) -> float:
    return num_tokens / (entry.tokens_per_s * entry.machine.cluster.world_size) / SECONDS_PER_DAY


def _row(entry: Assessment | StatesRow) -> Json:
    """Convert memory and traffic of a strategy. Fields for its time are empty."""
    instants, peak, moved = entry.memory.instants, entry.memory.peak, entry.moved
    kinds = list(dict.fromkeys(entry.layouts))
    layout = "; ".join(f"{entry.layouts.count(kind)} units {kind}" for kind in kinds)
    return {
        "name": entry.name,
        "layout": str(kinds[0]) if len(kinds) == 1 else layout,
        "strategy": entry.name,
        "exact": all(layout.is_exact for layout in kinds),
        "fits": not entry.why_not,
        "label": entry.name,
        "tight": False,
        "room_bytes": None,
        "error_bytes": None,
        "why_not": entry.why_not,
        "nearest": "",
        "micro_batch": entry.training.micro_batch,
        "num_micro_batches": entry.training.num_micro_batches,
        "checkpointing": entry.training.checkpointing,
        "per_gpu_bytes": {
            **{name: max(instant.num_bytes[at] for instant in instants) for at, name in enumerate(CLASSES)},
            "context": entry.machine.context_bytes,
            "peak_active": peak.total,
            "peak_reserved": entry.reserved.expected,
            "peak_reserved_low": entry.reserved.low,
            "peak_reserved_high": entry.reserved.high,
        },
        "peak": _peak(peak),
        "host_bytes": entry.host_bytes,
        "spare_bytes": 0,  # of those of host and disk
        "disk_bytes": entry.disk_bytes,
        "optimizer_part_on_device": entry.part_on_device,
        "traffic_bytes": {
            "intra_node": round(moved.intra_node),
            "inter_node": round(moved.inter_node),
            "pcie": moved.pcie,
            "disk": moved.disk,
        },
        "traffic": [dataclasses.asdict(row) for row in moved.by_call.rows],
        "unclipped_step_seconds": None,
        **dict.fromkeys(("step_seconds", "compute_seconds", "tokens_per_second_per_gpu", "mfu")),
        "instants": [],
        "timeline": [],
    }


def _peak(peak: Instant) -> Json:
    """Describe the peak: its instant, and the memory classes there, the largest first, without small ones."""
    parts = sorted(peak.by_class().items(), key=lambda part: -part[1])
    parts = [(name, held) for name, held in parts if held >= max(peak.total / 200, 1)]
    named = ", ".join(f"{_WORDS.get(name, name)} {size(held)}" for name, held in parts)
    text = f"peak {size(peak.total)} at {at(peak.name)}: {named}"
    return {"instant": peak.name, "text": text, "bytes": peak.by_class()}


def at(name: str) -> str:
    """Describe an instant in words: `forward blocks.0` is "the forward of blocks.0"."""
    verb, _, unit = name.partition(" ")
    if name.startswith("the "):
        return name
    if "loss" in name:
        return "the loss"
    if unit:
        return f"the {verb} of {unit}"
    return f"the {name}" if verb in ("forward", "backward", "update") else name


def _begins(entry: Assessment) -> list[tuple[Instant, float]]:
    """Pair instants with start times: that of the next computation of this name, else the end of the instant before."""
    spans: dict[str, list[Span]] = {}
    for span in reversed(entry.timing.spans):
        if span.lane == "compute":
            verb = span.name.partition(" ")[0]
            spans.setdefault({"norm": "the gradients' norm", "update": "update"}.get(verb, span.name), []).append(span)
    found = []
    end_s = 0.0
    for instant in entry.memory.instants:
        begin_s = end_s
        if spans.get(instant.name):
            span = spans[instant.name].pop()
            begin_s, end_s = max(begin_s, span.begin_s), max(end_s, span.end_s)
        found.append((instant, begin_s))
    return found


def cluster_as_json(machine: Machine) -> Json:
    cluster = machine.cluster
    return {
        "name": str(cluster),
        "gpu": {"name": cluster.gpu.name, "memory_bytes": machine.memory_bytes, "flops": cluster.gpu.flops},
        **{name: getattr(cluster, name) for name in ("node_size", "num_nodes", "world_size")},
        **{name: dataclasses.asdict(getattr(cluster, name)) for name in ("intra", "inter", "pcie")},
        **{name: getattr(cluster, name) for name in ("network", "host_bytes", "disk_bytes")},
    }


def explain(entry: Assessment) -> list[Json]:
    """Return every term with its bytes, its formula with the numbers of this plan, and its source."""
    sizes = {name: max(i.num_bytes[index] for i in entry.memory.instants) for index, name in enumerate(CLASSES)}
    sizes |= {
        "context": entry.machine.context_bytes,
        "reserve": entry.reserved.expected - entry.memory.peak.total,
        "traffic": round(entry.moved.by_call.wire_bytes),
    }
    sizes |= {place: size for place, size in (("host", entry.host_bytes), ("disk", entry.disk_bytes)) if size}
    values = _values(entry)
    return [
        {"term": term, "bytes": size, "formula": formula.format(**values), "source": source.format(**values)}
        for (term, size), (formula, source) in ((item, _FORMULAS[item[0]]) for item in sizes.items())
    ]


def _values(entry: Assessment) -> Json:
    """Return the numbers and words to put into the formulas. Of mixed layouts, the most frequent one is described."""
    training, machine, schedule = entry.training, entry.machine, entry.schedule
    layout, num_kinds = max(dict.fromkeys(entry.layouts), key=entry.layouts.count), len(set(entry.layouts))
    formats, cluster = training.formats, machine.cluster
    ranks = {"whole": 1, "node": cluster.node_size, "world": cluster.world_size}
    but = f" but for {entry.part_on_device:.0%}" if entry.part_on_device else ""
    values: Json = {}
    for name in ("params", "grads", "optimizer"):
        place = getattr(layout, f"{name}_on")
        values[f"{name}_ranks"] = ranks[getattr(layout, name)]
        values[f"{name}_place"] = "" if place == "device" else f"; on the {place}{but}"
    encoded = [flat for unit in schedule.units for flat in unit.flats if flat.copy_is_encoded]
    each = sum(flat.rest_bytes for flat in encoded) / max(sum(flat.num_rest for flat in encoded), 1)
    stored = [flat for unit in schedule.units for flat in unit.flats if flat.stored_codec]
    num_stored = sum(param.num_elems for flat in stored for param in flat.params)
    lost = saved_error_bytes(schedule.trainable_flats)
    flats = schedule.trainable_flats
    sent = ["in the reduce dtype"] if any(flat.reduces_in_slot for flat in flats) else []
    sent += ["as it is sent and received, encoded"] if any(flat.exchanged_bytes for flat in flats) else []
    slots = f"{NUM_REDUCTIONS} slots of the largest unit {', and '.join(sent)}"
    return values | {
        "mixed": f"; {num_kinds} layouts are mixed, this is the most frequent" if num_kinds > 1 else "",
        "copies": f"{formats.compute.itemsize} B a parameter"
        + (f", {each:.3g} B of one that is kept encoded" if encoded else "")
        + (
            f", {sum(flat.num_elems for flat in stored) / num_stored:.3g} B of a frozen one in blocks" if stored else ""
        ),
        "losses": f"; {lost / 1e9:,.2g} GB of what encoding lost, which stay for the next" if lost else "",
        "training": training,
        "formats": formats,
        "master": "" if formats.master == formats.compute else f"{formats.master.itemsize} B master + ",
        "two_units": ", of two units at a time" if layout.activations_on == "host" else "",
        "num_slots": len(schedule.slot_bytes),
        "row_slots": f"; {NUM_ROW_SLOTS} of its parameters encoded" if schedule.row_slot_bytes else "",
        "reduce_slots": slots if sent else "none: they stay whole",
        "loss": _LOSSES[training.loss],
        "loss_source": "trainer/loss.py" if training.loss == "chunked" else "torch's cross-entropy",
        "low": entry.reserved.low / 1e9,
        "high": entry.reserved.high / 1e9,
        "on_host": _on_host(entry),
        "spare": machine.host_bytes / 1e9,
        "host": cluster.host_bytes / 1e9,
        "each": formats.master.itemsize * (1 + training.num_moments),
    }


def _on_host(entry: Assessment) -> str:
    away, gb = entry.memory.off_device, entry.machine.cluster.node_size / 1e9
    parts = {
        "master, moments, gradients and weights in the compute dtype of what the host updates, and parameters": (
            away.host - away.windows - away.staged
        ),
        "windows that an optimizer on disk comes through": away.windows,
        "parameters read ahead from disk": away.staged,
        "activations": entry.memory.activation_bytes,
        "for updates before the gradients' norm is known": entry.spares.host_bytes,
    }
    return "; ".join(f"{size * gb:,.1f} GB {name}" for name, size in parts.items() if size)
