"""What lies in a rank's memory at every instant of a step, by class, and where the most of it does.

The events of the schedule are walked through as the engine executes them. Some memory stays: masters, moments, copies
at rest, the ring of gather slots. Some comes and goes: units gathered until their backward, gradients (from the
backward of their unit to the step), reduction slots (from the first reduction of a backward to its end), activations
(from a unit's forward to its backward) and what a forward or a backward needs while it runs. The peak is the largest
sum at one instant, never a sum of the largest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..events import Event
from ..memory import device_state, resting_grads
from ..offload import off_device
from ..schedule import NORM_ELEMS, NUM_REDUCTIONS, PART_ELEMS, Schedule, UnitPlan
from ..training import Training
from ..work.work import Work

LOSS_NAME = "loss"
CLASSES = ("params", "grads", "optimizer", "activations", "gathered", "reduce", "loss")
PARAMS, GRADS, OPTIMIZER, ACTIVATIONS, GATHERED, REDUCE, LOSS = range(len(CLASSES))

# What libraries take from the allocator for matrix products: forwards and backwards run in a thread each.
WORKSPACE_BYTES = 2 * (32 << 20)


@dataclass(frozen=True, slots=True)
class Instant:
    """Bytes by class, in the order of `CLASSES`, at most during the event of this name."""

    name: str
    num_bytes: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.num_bytes)

    def by_class(self) -> dict[str, int]:
        return dict(zip(CLASSES, self.num_bytes, strict=True))


@dataclass(frozen=True)
class Memory:
    """Of one rank: what its allocator lends out, and what rests on its host and its disk."""

    instants: tuple[Instant, ...]
    host_bytes: int
    disk_bytes: int

    @cached_property
    def peak(self) -> Instant:
        return max(self.instants, key=lambda instant: instant.total)


def memory_of(
    schedule: Schedule,
    events: Sequence[Event],
    works: Mapping[str, Work],
    training: Training,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> Memory:
    num_moments = training.num_moments
    units = {unit.name: unit for unit in schedule.units}
    held = [0] * len(CLASSES)
    held[ACTIVATIONS] = workspace_bytes
    clips = any(event.verb == "norm" for event in events)
    for unit in schedule.units:
        for flat in unit.flats:
            params, optimizer = device_state(flat, num_moments)
            held[PARAMS] += params
            held[OPTIMIZER] += optimizer
    held[GATHERED] += sum(schedule.slot_bytes)
    comes_and_goes = set()
    for unit, slot in zip(schedule.units, schedule.slot_of, strict=True):
        if slot is None and unit.layout.gathered_until == "backward":
            comes_and_goes.add(unit.name)
        elif slot is None and unit.layout.gathered_until == "forward":
            held[GATHERED] += unit.gathered_bytes
    found: list[Instant] = []
    is_gathered: set[str] = set()
    has_grads: set[str] = set()
    slot_bytes, num_slots = schedule.reduction_slot_bytes, 0
    unfetched = fetched = of_root = input_bytes = 0
    in_backward = False

    # Layers that write where the collective reads need the place before their backward, others after it.
    writes_directly = {unit.name: _writes_directly(unit, works[unit.name]) for unit in schedule.units}

    def open_for(unit: UnitPlan) -> None:
        nonlocal num_slots
        if unit.reduced_bytes and num_slots < NUM_REDUCTIONS:
            num_slots += 1
            held[REDUCE] += slot_bytes
        if unit.name not in has_grads:
            has_grads.add(unit.name)
            held[GRADS] += resting_grads(unit.flats)

    def note(name: str, kind: int = ACTIVATIONS, extra: int = 0) -> None:
        row = held.copy()
        row[kind] += extra
        found.append(Instant(name, tuple(row)))

    for event in events:
        verb, name = event.verb, event.unit
        if verb == "gather":
            if name in comes_and_goes and name not in is_gathered:
                is_gathered.add(name)
                held[GATHERED] += units[name].gathered_bytes
        elif verb == "forward":
            if num_slots:
                held[REDUCE] -= num_slots * slot_bytes
                num_slots = 0
            held[GRADS] -= unfetched + fetched + of_root
            unfetched = fetched = of_root = 0
            in_backward = False
            work = works[name]
            kind = LOSS if work.kind == "loss" else ACTIVATIONS
            # Its input is the output of the unit before, and lives until that is saved or let go.
            note(f"forward {name}", kind, input_bytes + work.forward_peak_bytes)
            held[kind] += work.saved_bytes
            input_bytes = work.output_bytes
        elif verb == "backward":
            if not in_backward and LOSS_NAME in works:
                # The head belongs to the root: it comes after the last unit, and its gradient stays until the end.
                loss = works[LOSS_NAME]
                note("forward loss", LOSS, input_bytes + loss.forward_peak_bytes)
                note("backward loss", LOSS, loss.saved_bytes + loss.output_bytes + loss.backward_peak_bytes)
                held[GRADS] += loss.grad_bytes
                of_root += loss.grad_bytes
            in_backward = True
            input_bytes = 0
            unit, work = units[name], works[name]
            kind = LOSS if work.kind == "loss" else ACTIVATIONS
            if not unit.holds_units:
                # Here the reduction of the unit before begins: what autograd made for it is held until that of the next
                # one does. The root's turn is at the end.
                held[GRADS] -= fetched
                fetched, unfetched = unfetched, 0
            if writes_directly[name]:
                open_for(unit)
            note(f"backward {name}", kind, work.output_bytes + work.backward_peak_bytes)
            held[kind] -= work.saved_bytes
            if unit.trainable and not writes_directly[name]:
                open_for(unit)
                note(f"reduce {name}", GRADS, work.grad_bytes)
            held[GRADS] += work.grad_bytes
            unfetched += work.grad_bytes
            if name in is_gathered:
                is_gathered.discard(name)
                held[GATHERED] -= unit.gathered_bytes
        elif verb == "agree":
            held[GRADS] -= unfetched + fetched + of_root
            unfetched = fetched = of_root = 0
            held[REDUCE] -= num_slots * slot_bytes
            num_slots = 0
            note("the gradients' norm", GRADS, _cast_for_norm(schedule) if clips else 0)
            note("update", OPTIMIZER, _cast_for_update(schedule))
    away = off_device([unit.flats for unit in schedule.units], num_moments)
    return Memory(tuple(found), away.host, away.disk)


def _writes_directly(unit: UnitPlan, work: Work) -> bool:
    """Blocks do; an embedding does not, nor what holds other units; a head only if its loss leaves that to it."""
    if unit.holds_units or not unit.backward_reads:
        return False
    return work.kind == "activations" or 2 * work.grad_bytes < unit.trained_bytes


def _cast_for_update(schedule: Schedule) -> int:
    """Gradients are cast to the master's dtype where theirs differs, a part at a time."""
    flats = [flat for flat in schedule.trainable_flats if flat.reduce != flat.master]
    sizes = [flat.spans[flat.depth_of_master].num_elems * flat.master.itemsize for flat in flats]
    return min(sum(sizes), max(sizes, default=0) + 4 * PART_ELEMS)


def _cast_for_norm(schedule: Schedule) -> int:
    """torch takes norms of a copy in fp64, which has the bytes of its pieces' results too."""
    longest = max((flat.spans[flat.depth_of_master].num_elems for flat in schedule.trainable_flats), default=0)
    return 8 * min(longest, NORM_ELEMS)
