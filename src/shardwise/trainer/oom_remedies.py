"""What would help a run that does not fit: every change is planned, and told with what it saves and what it costs.

Those that fit come first, the least costly of them before the others; then those that save most. What moves to the host
has to fit there, too.
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

# What `shardwise train` calls the fields of a training.
FLAGS = {
    "checkpointing": "--gradient-checkpointing",
    "micro_batch": "--per-device-train-batch-size",
    "num_micro_batches": "--gradient-accumulation-steps",
    "reduce": "--reduce-dtype",
    "optimizer": "--optimizer",
}
# A change that saves less is none.
LEAST_SHARE = 0.005


@dataclass(frozen=True, slots=True)
class Fix:
    """`times` is how many times as long a token takes."""

    words: str
    saved_bytes: int
    times: float | None
    fits: bool | None  # None: nobody can tell

    def __str__(self) -> str:
        words = [f"{size(self.saved_bytes)} less"] if self.saved_bytes else []
        if self.times is not None:
            about = f"{self.times:.2f}x"
            words.append("the same time" if about == "1.00x" else f"{about} the time")
        verdict = {True: "fits", False: "not enough alone", None: ""}[self.fits]
        told = "; ".join(part for part in (", ".join(words), verdict) if part)
        return f"{self.words}: {told}" if told else self.words


def fixes(planned: RunPlan, room: int | None = None) -> list[Fix]:
    """`room` is what a changed run may need; unless given, what was free before this one."""
    entry = planned.entry
    room = entry.machine.memory_bytes if room is None else room
    found = []
    for words, changed in _changes(planned):
        saved = entry.needed_bytes - changed.needed_bytes
        if saved > LEAST_SHARE * entry.needed_bytes and not _lacks_host(changed):
            # Without activations neither time nor what is needed is known.
            times = None if planned.note else entry.tokens_per_s / changed.tokens_per_s
            found.append(Fix(words, saved, times, None if planned.note else changed.needed_bytes <= room))
    found.sort(key=lambda fix: (not fix.fits, round(fix.times or 1.0, 2) if fix.fits else 0, -fix.saved_bytes))
    hopeless = not planned.note and not entry.fits and not any(fix.fits for fix in found)
    if hopeless and (together := nearest_change(planned.assess, entry, FLAGS, "--nnodes", offload_flag)):
        found.insert(0, Fix(f"together: {together}", 0, None, None))
    return [*found, *_more_ranks(planned, room)]


def _more_ranks(planned: RunPlan, room: int) -> Iterator[Fix]:
    """It costs what nothing else does, and comes last."""
    entry, assess = planned.entry, planned.assess
    changed = assess.on(_twice(assess.machine))(entry.name, entry.layouts, entry.training)
    saved = entry.needed_bytes - changed.needed_bytes
    if saved > LEAST_SHARE * entry.needed_bytes:
        words = f"twice the ranks ({2 * assess.machine.cluster.world_size})"
        yield Fix(words, saved, None, None if planned.note else changed.needed_bytes <= room)


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
    """The same strategy with more and more on the host. A part of the optimizer is for the planner to find."""
    layout = entry.layouts[0]
    if len(set(entry.layouts)) > 1 or layout.uses_disk:
        return
    more = list(on_host(layout))
    more += [replace(other, activations_on="host") for other in (layout, more[-1])]
    for moved in dict.fromkeys(more):
        if moved != layout:
            instead = "" if entry.is_on_device else " in place of what is moved now"
            found = assess(moved.name, [moved] * len(entry.layouts), entry.training)
            yield f"{offload_flag(moved)}{instead}", found


def offload_flag(layout: Layout) -> str:
    """Beside the strategy and the wire as they were asked for."""
    return f"--offload {','.join(layout.moves)}"


def _lacks_host(entry: Assessment) -> bool:
    return bool(entry.machine.lacks(0, entry.host_bytes, entry.disk_bytes))


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
    """The fastest that fits; if none does, the one that needs least."""
    entry, assess = planned.entry, planned.assess
    choice = Choice(((entry.training,),))
    found = plan_for(assess.subject, assess.machine, entry.training, choice, only_exact=True)
    best = found.recommended or min(found.found, key=lambda other: other.needed_bytes)
    return best if best.layouts != entry.layouts else None


def _twice(machine: Machine) -> Machine:
    cluster = machine.cluster
    if cluster.num_nodes > 1:
        return replace(machine, cluster=replace(cluster, num_nodes=2 * cluster.num_nodes))
    return replace(machine, cluster=replace(cluster, node_size=2 * cluster.node_size))
