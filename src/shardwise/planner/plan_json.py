"""A plan as JSON, with the formula behind every term and its source.

`shardwise plan --json` prints it, run folders contain it, and HTML reports are made from it.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from ..core.layout import Layout, Place, Split, Strategy
from ..core.schedule.state_bytes import kept_losses
from ..core.schedule.step_schedule import NUM_REDUCTIONS, NUM_ROW_SLOTS
from ..version import VERSION
from .assess import Assessment, Machine
from .cost.lanes import Span
from .cost.peak import CLASSES, Instant
from .cost.step_time import days_for, mfu
from .events import StepTraffic
from .planning import Plan
from .search import strategy_of
from .states import States, StatesRow
from .training import Training

_WORDS = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "gathered": "gathered units",
    "reduce": "reduction slots",
    "loss": "loss",
}

Row = dict[str, Any]


def peak_text(entry: Assessment) -> str:
    """Describe the peak in one line: its instant, and the memory classes there, the largest first."""
    peak = entry.memory.peak
    parts = sorted(peak.by_class().items(), key=lambda part: -part[1])
    named = ", ".join(f"{_WORDS[name]} {size / 1e9:,.1f}" for name, size in parts if size >= 5e7)
    return f"peak {peak.total / 1e9:,.1f} GB at {at(peak.name)}: {named}"


def at(name: str) -> str:
    """Describe an instant in words."""
    verb, _, unit = name.partition(" ")
    if name.startswith("the "):
        return name
    if "loss" in name:
        return "the loss"
    return (
        f"the {name}"
        if verb in ("forward", "backward", "update") and not unit
        else f"the {verb} of {unit}"
        if unit
        else name
    )


def explain(entry: Assessment) -> list[Row]:
    at_most = {name: max(i.num_bytes[index] for i in entry.memory.instants) for index, name in enumerate(CLASSES)}
    rows = [
        {"term": term, "bytes": at_most[term], "formula": formula, "source": source}
        for term, formula, source in _terms(entry)
    ]
    moved = entry.moved
    for term, size, formula, source in (
        (
            "context",
            entry.machine.context_bytes,
            "driver + buffers of the collectives",
            "measured on one H200; NCCL from others' logs",
        ),
        (
            "reserve",
            entry.reserved.expected - entry.memory.peak.total,
            _reserve_words(entry),
            "planner/cost/peak.py, measured on one H200",
        ),
        (
            "traffic",
            round(moved.by_call.wire_bytes),
            "(N-1)/N of each gathered or scattered buffer, twice for an all-reduce",
            "the schedule; equal to the ledger",
        ),
    ):
        rows.append({"term": term, "bytes": size, "formula": formula, "source": source})
    for term, size, formula in (
        ("host", entry.host_bytes, _host_words(entry)),
        ("disk", entry.disk_bytes, _disk_words(entry)),
    ):
        if size:
            rows.append(
                {"term": term, "bytes": size, "formula": formula, "source": "core/schedule/offload.py; per node"}
            )
    return rows


def _host_words(entry: Assessment) -> str:
    away, stowed, gb = entry.memory.away, entry.memory.stowed, entry.machine.cluster.node_size / 1e9
    state = away.host - away.windows - away.staged
    parts = {
        "master, moments, gradients and weights in the compute dtype of what the host updates, and parameters": state,
        "windows that an optimizer on disk comes through": away.windows,
        "parameters read ahead from disk": away.staged,
        "activations": stowed,
    }
    words = "; ".join(f"{size * gb:,.1f} GB {name}" for name, size in parts.items() if size)
    spare = f"{entry.machine.host_bytes / 1e9:,.1f} of {entry.machine.cluster.host_bytes / 1e9:,.1f} GB"
    return f"{words}; there may be {spare}"


def _disk_words(entry: Assessment) -> str:
    training = entry.training
    each = training.formats.master.itemsize * (1 + training.num_moments)
    return (
        f"{each:g} B of master and moments for each parameter whose optimizer is there, and "
        f"{training.formats.compute.itemsize} B for each that is there itself"
    )


def _terms(entry: Assessment) -> Iterator[tuple[str, str, str]]:
    training, layout = entry.training, max(dict.fromkeys(entry.layouts), key=entry.layouts.count)
    formats = training.formats
    master = "" if formats.master == formats.compute else f"{formats.master.itemsize} B master + "
    yield (
        "params",
        _split_words(_copy_words(entry), layout.params, layout.params_on, entry),
        "copies that stay between steps; none where parameters are split as far as the optimizer",
    )
    yield (
        "grads",
        _split_words(f"{formats.reduce.itemsize} B a trained parameter", layout.grads, layout.grads_on, entry)
        + _loss_words(entry),
        "reduce dtype; from the unit's backward to the step, or until they are on the host",
    )
    yield (
        "optimizer",
        _split_words(
            f"{master}{training.num_moments:g} x {formats.master.itemsize} B of moments",
            layout.optimizer,
            layout.optimizer_on,
            entry,
        ),
        f"{training.optimizer}; ZeRO paper, table 1",
    )
    yield (
        "activations",
        f"saved for the backward of {training.num_tokens} tokens, checkpointing {training.checkpointing}"
        f"{', of two units at a time' if layout.activations_on == 'host' else ''}; what the running unit needs; 64 MiB "
        "of libraries' workspaces",
        "planner/work/tape.py, equal to torch's own on the meta device",
    )
    yield (
        "gathered",
        f"{len(entry.schedule.slot_bytes)} slots of the largest unit; units kept until the backward"
        + (f"; {NUM_ROW_SLOTS} of its parameters encoded" if entry.schedule.row_slot_bytes else ""),
        "core/schedule/step_schedule.py",
    )
    yield "reduce", _slot_words(entry), "core/schedule/step_schedule.py"
    yield (
        "loss",
        {
            "chunked": "one chunk of logits, and the gradient of the head's weight",
            "plain": "14 B x tokens x vocabulary",
            "fused": "no logits",
        }[training.loss],
        "trainer/loss.py" if training.loss == "chunked" else "torch's cross-entropy",
    )


def _copy_words(entry: Assessment) -> str:
    flats = [flat for unit in entry.schedule.units for flat in unit.flats if flat.copy_is_encoded]
    num_bytes, num_elems = sum(flat.rest_bytes for flat in flats), sum(flat.num_rest for flat in flats)
    encoded = f", {num_bytes / num_elems:.3g} B of one that is kept encoded" if flats else ""
    return f"{entry.training.formats.compute.itemsize} B a parameter{encoded}"


def _loss_words(entry: Assessment) -> str:
    lost = kept_losses(entry.schedule.trainable_flats)
    return f"; {lost / 1e9:,.2g} GB of what encoding lost, which stay for the next" if lost else ""


def _slot_words(entry: Assessment) -> str:
    flats = entry.schedule.trainable_flats
    parts = ["in the reduce dtype"] if any(flat.reduces_in_slot for flat in flats) else []
    parts += ["as it is sent and received, encoded"] if any(flat.exchanged_bytes for flat in flats) else []
    return f"{NUM_REDUCTIONS} slots of the largest unit {', and '.join(parts)}" if parts else "none: they rest whole"


def _split_words(each: str, split: Split, place: Place, entry: Assessment) -> str:
    cluster = entry.machine.cluster
    ranks = {"whole": 1, "node": cluster.node_size, "world": cluster.world_size}[split]
    part, kinds = entry.part_on_device, len(set(entry.layouts))
    there = "" if place == "device" else f"; on the {place}" + (f" but for {part:.0%}" if part else "")
    mixed = f"; {kinds} layouts are mixed, this is the most frequent" if kinds > 1 else ""
    return f"{each} / {ranks}{there}{mixed}"


def _reserve_words(entry: Assessment) -> str:
    low, high = entry.reserved.low, entry.reserved.high
    return f"what the allocator cannot use; in all {low / 1e9:,.1f} to {high / 1e9:,.1f} GB"


Json = dict[str, Any]


def plan_as_json(plan: Plan | States, num_tokens: float | None = None) -> Json:
    """Convert a plan. `num_tokens`: length of the whole training, for the number of days it takes."""
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
    """Convert one strategy. `in_full`: with the memory at every instant and the timeline of the step."""
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
    """Pair instants with start times: the next computation of that name, or the end of the instant before."""
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


def _traffic(moved: StepTraffic) -> Json:
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
    """Return the request; settings that the user left open are marked."""
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
