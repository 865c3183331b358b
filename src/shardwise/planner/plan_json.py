"""A plan as JSON: what `shardwise plan --json` prints, run folders keep, and pages are made from."""

import dataclasses
from typing import Any

from ..core.layout import Layout, Strategy
from ..core.schedule.traffic import Moved
from ..version import VERSION
from .assess import Assessment, Machine
from .cost.lanes import Span
from .cost.peak import CLASSES, Instant
from .cost.step_time import days_for, mfu
from .explain import explain, peak_text
from .planning import Plan
from .search import strategy_of
from .states import States, StatesRow
from .training import Training

Json = dict[str, Any]


def plan_as_json(plan: Plan | States, num_tokens: float | None = None) -> Json:
    """`num_tokens`: those of a whole training, for how many days it takes."""
    if isinstance(plan, States):
        return _states(plan)
    best = plan.recommended
    return {
        "version": VERSION,
        "model": dict(plan.subject.facts),
        "cluster": _cluster(plan.machine),
        "training": _asked(plan),
        "strategies": [
            assessment_as_json(entry, plan, num_tokens, in_full=entry is (best or plan.found[0]))
            for entry in plan.found
        ],
        "recommended": None if best is None else best.name,
        "why": plan.why,
        "explain": [] if best is None else explain(best),
    }


def assessment_as_json(entry: Assessment, plan: Plan, num_tokens: float | None, in_full: bool) -> Json:
    """`in_full`: with memory at every instant, and everything that happens when."""
    timing, reserved, peak = entry.timing, entry.reserved, entry.memory.peak
    found: Json = {
        "name": entry.name,
        "layout": _layout_words(entry),
        "strategy": _strategy(strategy_of(entry)),
        "exact": entry.is_exact,
        "fits": entry.fits,
        "tight": entry.fits and entry.is_tight,
        "why_not": entry.why_not,
        "nearest": plan.refusals.get(entry.name, ""),
        "micro_batch": entry.training.micro_batch,
        "num_micro_batches": entry.training.num_micro_batches,
        "checkpointing": entry.training.checkpointing,
        "per_gpu_bytes": {
            **{
                name: max(instant.num_bytes[at] for instant in entry.memory.instants) for at, name in enumerate(CLASSES)
            },
            "context": entry.machine.context_bytes,
            "peak_active": peak.total,
            "peak_reserved": reserved.expected,
            "peak_reserved_low": reserved.low,
            "peak_reserved_high": reserved.high,
        },
        "peak": {"instant": peak.name, "text": peak_text(entry), "bytes": peak.by_class()},
        "host_bytes": entry.host_bytes,
        "disk_bytes": entry.disk_bytes,
        "optimizer_part_on_device": entry.part_on_device,
        **_traffic(entry.moved),
        "step_seconds": timing.step_s,
        "compute_seconds": timing.compute_s,
        "tokens_per_second_per_gpu": entry.tokens_per_s,
        "mfu": mfu(plan.subject.flops_per_token, entry.tokens_per_s, plan.machine.cluster.gpu.flops),
        "instants": [
            {"name": instant.name, "at_s": at_s, "bytes": instant.by_class()}
            for instant, at_s in (_begins(entry) if in_full else ())
        ],
        "timeline": [
            dataclasses.asdict(span) for span in (timing.spans if in_full else ()) if span.end_s > span.begin_s
        ],
    }
    if num_tokens is not None:
        found["days"] = days_for(num_tokens, entry.tokens_per_s * plan.machine.cluster.world_size)
    return found


def _begins(entry: Assessment) -> list[tuple[Instant, float]]:
    """Instants with their times: each begins with the next computation of its name, or where the one before it ends."""
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


def _layout_words(entry: Assessment) -> str:
    kinds = list(dict.fromkeys(entry.layouts))
    if len(kinds) == 1:
        return str(kinds[0])
    return "; ".join(f"{entry.layouts.count(kind)} units {kind}" for kind in kinds)


def _strategy(strategy: Strategy) -> Any:
    if isinstance(strategy, Layout):
        return dataclasses.asdict(strategy)
    return strategy if isinstance(strategy, str) else dict(strategy)


def _traffic(moved: Moved) -> Json:
    return {
        "traffic_bytes": {
            "intra_node": round(moved.intra_node),
            "inter_node": round(moved.inter_node),
            "pcie": moved.pcie,
            "disk": moved.disk,
        },
        "traffic": [dataclasses.asdict(row) for row in moved.by_call.rows],
    }


def _cluster(machine: Machine) -> Json:
    cluster = machine.cluster
    return {
        "name": str(cluster),
        "gpu": {"name": cluster.gpu.name, "memory_bytes": machine.memory_bytes, "flops": cluster.gpu.flops},
        "node_size": cluster.node_size,
        "num_nodes": cluster.num_nodes,
        "world_size": cluster.world_size,
        "intra": dataclasses.asdict(cluster.intra),
        "inter": dataclasses.asdict(cluster.inter),
        "pcie": dataclasses.asdict(cluster.pcie),
        "network": cluster.network,
        "host_bytes": cluster.host_bytes,
        "disk_bytes": cluster.disk_bytes,
    }


def _training(training: Training) -> Json:
    return dataclasses.asdict(training)


def _asked(plan: Plan) -> Json:
    """What was left open is said to be."""
    found = _training(plan.training)
    if any(len(trainings) > 1 for trainings in plan.choice.trainings):
        found["checkpointing"] = "auto"
    if len(plan.choice.trainings) > 1:
        found |= {"micro_batch": None, "num_micro_batches": None}
    return found


def _states(states: States) -> Json:
    best = states.recommended
    note = states.shape.note
    return {
        "version": VERSION,
        "model": {"name": states.shape.name, "num_params": states.shape.num_params, **({"note": note} if note else {})},
        "cluster": _cluster(states.machine),
        "training": _training(states.training),
        "strategies": [_states_row(states, row) for row in states.rows],
        "recommended": None if best is None else best.name,
        "why": "the states alone, as the papers count them: activations, buffers and time need a real shape"
        + ("" if best else "; they fit nowhere")
        + (f"; {note}" if note else ""),
        "explain": [],
    }


def _states_row(states: States, row: StatesRow) -> Json:
    zeros = dict.fromkeys(("activations", "gathered", "reduce", "loss"), 0)
    held = {"params": row.params, "grads": row.grads, "optimizer": row.optimizer}
    why_not = states.why_not(row)
    return {
        "name": row.name,
        "layout": str(row.layout),
        "strategy": row.name,
        "exact": row.layout.is_exact,
        "fits": not why_not,
        "tight": False,
        "why_not": why_not,
        "nearest": "",
        "micro_batch": states.training.micro_batch,
        "num_micro_batches": states.training.num_micro_batches,
        "checkpointing": states.training.checkpointing,
        "per_gpu_bytes": {
            **held,
            **zeros,
            "context": states.machine.context_bytes,
            **dict.fromkeys(("peak_active", "peak_reserved", "peak_reserved_low", "peak_reserved_high"), row.total),
        },
        "peak": {"instant": "between backward and step", "text": _states_text(row), "bytes": {**held, **zeros}},
        "host_bytes": row.host_bytes,
        "disk_bytes": row.disk_bytes,
        "optimizer_part_on_device": row.layout.kept if row.layout.optimizer_on != "device" else 1.0,
        **_traffic(row.moved),
        "step_seconds": None,
        "compute_seconds": None,
        "tokens_per_second_per_gpu": None,
        "mfu": None,
        "instants": [],
        "timeline": [],
    }


def _states_text(row: StatesRow) -> str:
    parts = (
        f"parameters {row.params / 1e9:,.1f}, gradients {row.grads / 1e9:,.1f}, optimizer {row.optimizer / 1e9:,.1f}"
    )
    return f"{row.total / 1e9:,.1f} GB: {parts}"
