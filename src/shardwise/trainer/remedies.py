"""Changes that would help a run that does not fit, each planned: what it saves, and what it costs.

Changes after which the run fits come first, the cheapest of them before the others; then those that save most. State
that moves to host memory has to fit there, too.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..base.text import size
from ..core.layout import Layout
from ..planner.assess import Assessment, Assessor, Machine
from ..planner.planning import plan_for
from ..planner.remedies import (
    can_reduce_in_bf16,
    flags_for,
    nearest_change,
    on_host,
    with_eight_bits,
    with_single_sequences,
)
from ..planner.search import MODES, Choice
from ..planner.training import Training
from .run_plan import RunPlan

# Flags of `shardwise train` for the fields of a training.
FLAGS = {
    "checkpointing": "--gradient-checkpointing",
    "micro_batch": "--per-device-train-batch-size",
    "num_micro_batches": "--gradient-accumulation-steps",
    "reduce": "--reduce-dtype",
    "optimizer": "--optimizer",
}
MIN_SAVED_SHARE = 0.005  # changes that save less are left out


@dataclass(frozen=True, slots=True)
class Remedy:
    words: str
    saved_bytes: int
    times: float | None  # time per token, relative to the run as it is
    fits: bool | None  # None: unknown

    def __str__(self) -> str:
        words = [f"{size(self.saved_bytes)} less"] if self.saved_bytes else []
        if self.times is not None:
            about = f"{self.times:.2f}x"
            words.append("the same time" if about == "1.00x" else f"{about} the time")
        verdict = {True: "fits", False: "not enough alone", None: ""}[self.fits]
        effect = "; ".join(part for part in (", ".join(words), verdict) if part)
        return f"{self.words}: {effect}" if effect else self.words


def remedies(planned: RunPlan, room: int | None = None) -> list[Remedy]:
    """Return the changes that help. `room`: memory that the run may use; default: the free memory before the run."""
    entry = planned.entry
    room = entry.machine.memory_bytes if room is None else room
    found = [
        _remedy(words, planned, changed, room)
        for words, changed in _changes(planned)
        if _saves(entry, changed) and not changed.machine.lacks(0, changed.host_bytes, changed.disk_bytes)
    ]
    found.sort(key=_order)
    is_hopeless = not planned.note and not entry.fits and not any(remedy.fits for remedy in found)
    if is_hopeless and (together := nearest_change(planned.assess, entry, FLAGS, "--nnodes", offload_flag)):
        found.insert(0, Remedy(f"together: {together}", 0, None, None))
    # More ranks cost more than any other change, so they come last.
    doubled = planned.assess.on(_twice(planned.assess.machine))(entry.name, entry.layouts, entry.training)
    if _saves(entry, doubled):
        words = f"twice the ranks ({2 * planned.assess.machine.cluster.world_size})"
        found.append(replace(_remedy(words, planned, doubled, room), times=None))
    return found


def _order(remedy: Remedy) -> tuple[bool, float, int]:
    return not remedy.fits, round(remedy.times or 1.0, 2) if remedy.fits else 0, -remedy.saved_bytes


def _saves(entry: Assessment, changed: Assessment) -> bool:
    return entry.needed_bytes - changed.needed_bytes > MIN_SAVED_SHARE * entry.needed_bytes


def _remedy(words: str, planned: RunPlan, changed: Assessment, room: int) -> Remedy:
    """Make a remedy; without planned activations, its time and needed memory are unknown."""
    entry = planned.entry
    saved = entry.needed_bytes - changed.needed_bytes
    if planned.note:
        return Remedy(words, saved, None, None)
    return Remedy(words, saved, entry.tokens_per_s / changed.tokens_per_s, changed.needed_bytes <= room)


def _changes(planned: RunPlan) -> Iterator[tuple[str, Assessment]]:
    entry, assess = planned.entry, planned.assess
    for training in _other_trainings(entry.training):
        try:
            yield flags_for(entry.training, training, FLAGS), assess(entry.name, entry.layouts, training)
        except Exception:  # noqa: BLE001  the model's own code runs there, or it has no blocks to checkpoint
            continue
    yield from _offloads(entry, assess)
    if (other := _other_strategy(planned)) is not None:
        is_preset = len(set(other.layouts)) == 1
        words = f"--strategy {other.name}" if is_preset else f"--strategy auto, which is then {other.name}"
        words += "" if entry.is_on_device else " --offload none"
        yield words if entry.is_exact else f"{words} --wire none", other


def _offloads(entry: Assessment, assess: Assessor) -> Iterator[tuple[str, Assessment]]:
    """Yield the same strategy with more and more state in host memory. Only the planner splits the optimizer state."""
    layout = entry.layouts[0]
    if len(set(entry.layouts)) > 1 or layout.uses_disk:
        return
    more = list(on_host(layout))
    more += [replace(other, activations_on="host") for other in (layout, more[-1])]
    for moved in dict.fromkeys(more):
        if moved != layout:
            instead = "" if entry.is_on_device else " in place of what is moved now"
            yield f"{offload_flag(moved)}{instead}", assess(moved.name, [moved] * len(entry.layouts), entry.training)


def offload_flag(layout: Layout) -> str:
    """Return the flag of `shardwise train` for this offload; strategy and wire stay as they were given."""
    return f"--offload {','.join(layout.moves)}"


def _other_trainings(training: Training) -> Iterator[Training]:
    for mode in MODES[MODES.index(training.checkpointing) + 1 :]:
        yield replace(training, checkpointing=mode)
    if training.micro_batch % 2 == 0:
        num = 2 * training.num_micro_batches
        yield replace(training, micro_batch=training.micro_batch // 2, num_micro_batches=num)
    elif training.micro_batch > 1:
        yield with_single_sequences(training)
    if can_reduce_in_bf16(training):
        yield replace(training, reduce="bf16")
    if training.optimizer == "adamw":
        yield with_eight_bits(training)


def _other_strategy(planned: RunPlan) -> Assessment | None:
    """Return the fastest strategy that fits; if none does, the one that needs least."""
    entry, assess = planned.entry, planned.assess
    choice = Choice(((entry.training,),))
    found = plan_for(Assessor(assess.subject, assess.machine), entry.training, choice, only_exact=True)
    best = found.recommended or min(found.found, key=lambda other: other.needed_bytes)
    return best if best.layouts != entry.layouts else None


def _twice(machine: Machine) -> Machine:
    cluster = machine.cluster
    if cluster.num_nodes > 1:
        return replace(machine, cluster=replace(cluster, num_nodes=2 * cluster.num_nodes))
    return replace(machine, cluster=replace(cluster, node_size=2 * cluster.node_size))
