"""Every term of a plan with the formula behind it and where that comes from."""

from collections.abc import Iterator
from typing import Any

from ..core.layout import Place, Split
from ..core.schedule.state_bytes import kept_losses
from ..core.schedule.step_schedule import NUM_REDUCTIONS, NUM_ROW_SLOTS
from .assess import Assessment
from .cost.peak import CLASSES

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
    """In one line: where the peak is, and what lies there, the largest first."""
    peak = entry.memory.peak
    parts = sorted(peak.by_class().items(), key=lambda part: -part[1])
    named = ", ".join(f"{_WORDS[name]} {size / 1e9:,.1f}" for name, size in parts if size >= 5e7)
    return f"peak {peak.total / 1e9:,.1f} GB at {at(peak.name)}: {named}"


def at(name: str) -> str:
    """An instant in words."""
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
            "plan/cost/reserve.py, measured on one H200",
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
            rows.append({"term": term, "bytes": size, "formula": formula, "source": "plan/offload.py; of a node"})
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
        "plan/work/tape.py, equal to torch's own on the meta device",
    )
    yield (
        "gathered",
        f"{len(entry.schedule.slot_bytes)} slots of the largest unit; units kept until the backward"
        + (f"; {NUM_ROW_SLOTS} of its parameters encoded" if entry.schedule.row_slot_bytes else ""),
        "plan/schedule.py",
    )
    yield "reduce", _slot_words(entry), "plan/schedule.py"
    yield (
        "loss",
        {
            "chunked": "one chunk of logits, and the gradient of the head's weight",
            "plain": "14 B x tokens x vocabulary",
            "fused": "no logits",
        }[training.loss],
        "train/loss.py" if training.loss == "chunked" else "torch's cross-entropy",
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
