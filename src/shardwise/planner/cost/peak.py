"""Memory of a rank at every instant of a step, by class; its peak; and what the allocator reserves beyond it.

The events of the schedule are visited in the order in which the engine executes them. The peak is the largest sum at
one instant, never a sum of maxima. Offloaded activations are copied to the host while the next unit computes, and back
during the backward of that next unit; those of the last unit stay. Of a checkpointed unit only the input is offloaded.
docs/planner.md lists all terms, and where the constants of the reserve come from.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ...core.schedule import state_bytes, step_schedule
from ...core.schedule.step_schedule import Schedule, UnitPlan
from ..events import Event, Move
from ..training import Training
from ..work.work import Work

# Units whose activations are on the device at once: the one that runs, and one that is being copied.
NUM_ON_DEVICE = 2


def offloaded_activations(schedule: Schedule, works: Mapping[str, Work]) -> dict[str, int]:
    """Bytes of offloadable activations by unit name, in forward order. Those of the last unit are never copied."""
    found = {}
    for unit in (schedule.units[index] for index in schedule.leaves):
        work = works[unit.name]
        # Of a checkpointed unit only the input is offloaded, which has the size of its output.
        num_bytes = min(work.saved_bytes, work.output_bytes) if work.recomputed else work.saved_bytes
        if unit.layout.activations_on == "host" and num_bytes >= state_bytes.MIN_OFFLOADED_ACTIVATION_BYTES:
            found[unit.name] = num_bytes
    return found


def with_activation_copies(events: Sequence[Event], offloaded: Mapping[str, int]) -> Iterator[Event]:
    """Insert the copies of activations into the events of a step."""
    names = list(offloaded)
    # A unit's backward starts the fetch for the unit before it, unless that one's activations are still on the device.
    before = {name: names[index - 1] for index, name in enumerate(names) if 0 < index <= len(names) - NUM_ON_DEVICE}
    for event in events:
        ahead = before.get(event.unit) if event.verb == "backward" else None
        if ahead is not None:
            yield Event("fetch", ahead, moves=(Move("to_device", offloaded[ahead]),))
        yield event
        if event.verb == "forward" and event.unit in names[:-1]:
            yield Event("stow", event.unit, moves=(Move("to_host", offloaded[event.unit]),))


LOSS_NAME = "loss"
CLASSES = ("params", "grads", "optimizer", "activations", "gathered", "reduce", "loss")
PARAMS, GRADS, OPTIMIZER, ACTIVATIONS, GATHERED, REDUCE, LOSS = range(len(CLASSES))

# Workspaces of the library for matrix products: one for the thread of forwards, one for that of backwards.
WORKSPACE_BYTES = 2 * (32 << 20)


class Instant(NamedTuple):
    """Maximum bytes by class (in the order of `CLASSES`) during the event of this name."""

    name: str
    num_bytes: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.num_bytes)

    def by_class(self) -> dict[str, int]:
        return dict(zip(CLASSES, self.num_bytes, strict=True))


@dataclass(frozen=True)
class Memory:
    """Memory of one rank: of its allocator at every instant, of its host and of its disk.

    `activation_bytes`: activations on the host. `pools`: the peak of each stream of FSDP2, each at its own time; empty
    for our engine, which allocates on one stream.
    """

    instants: tuple[Instant, ...]
    off_device: state_bytes.OffDevice  # offloaded state, and the buffers of its transfers
    activation_bytes: int = 0
    pools: tuple[int, ...] = ()

    @property
    def host_bytes(self) -> int:
        return self.off_device.host + self.activation_bytes

    @cached_property
    def peak(self) -> Instant:
        return max(self.instants, key=lambda instant: instant.total)


class MemoryWalk:
    """Tracks memory by class through a step: what is held now, and the instants so far."""

    def __init__(self) -> None:
        self.instants: list[Instant] = []
        self.held = [0] * len(CLASSES)

    def note(self, name: str, kind: int = ACTIVATIONS, extra: int = 0) -> None:
        row = self.held.copy()
        row[kind] += extra
        self.instants.append(Instant(name, tuple(row)))


def memory_of(
    schedule: Schedule,
    events: Sequence[Event],
    works: Mapping[str, Work],
    training: Training,
    workspace_bytes: int = WORKSPACE_BYTES,
    keeps_slots: bool = False,
) -> Memory:
    """Walk through `events`: a step, including the copies of offloaded activations. `keeps_slots`: on a CPU, where
    reduction slots fit the largest unit."""
    walk = _Walk(schedule, works, training, keeps_slots)
    walk.held[ACTIVATIONS] += workspace_bytes
    last_forward = max(index for index, event in enumerate(events) if event.verb == "forward")
    for index, event in enumerate(events):
        if event.verb == "gather":
            walk.gather(event.unit)
        elif event.verb == "forward":
            walk.forward(event.unit)
        elif event.verb == "fetch":
            walk.held[ACTIVATIONS] += walk.offloaded[event.unit]
        elif event.verb == "backward":
            walk.backward(event.unit, is_last=index > last_forward)
        elif event.verb == "agree":
            walk.update()
    away = state_bytes.off_device([unit.flats for unit in schedule.units], training.num_moments)
    return Memory(tuple(walk.instants), away, sum(list(walk.offloaded.values())[:-1]))


class _Walk(MemoryWalk):
    """Tracks the memory of our engine; each method accounts for one kind of event."""

    def __init__(self, schedule: Schedule, works: Mapping[str, Work], training: Training, keeps_slots: bool) -> None:
        super().__init__()
        self.schedule, self.works = schedule, works
        self.slot_bytes = schedule.reduction_slot_bytes if keeps_slots else 0  # 0: the size of each unit
        self.units = {unit.name: unit for unit in schedule.units}
        self.frees_after_backward: set[str] = set()  # units with gathered memory of their own, which is freed after use
        self.writes_directly: set[str] = set()  # units with direct gradients (core/engine/direct_gradients.py)
        for unit, slot in zip(schedule.units, schedule.slot_of, strict=True):
            for flat in unit.flats:
                params, optimizer = state_bytes.device_state(flat, training.num_moments)
                self.held[PARAMS] += params
                self.held[OPTIMIZER] += optimizer
            self.held[GRADS] += state_bytes.saved_error_bytes(unit.flats)
            if slot is None and unit.gathered_until == "forward":
                self.held[GATHERED] += unit.gathered_bytes
            if slot is None and unit.gives_back:
                self.frees_after_backward.add(unit.name)
            # Layers that write gradients directly need the memory for them in their backward, others after it. Blocks
            # write directly unless they are compiled. So does a head, unless the loss computes its gradients itself.
            is_direct = 2 * works[unit.name].grad_bytes < unit.trained_bytes
            if is_direct and unit.backward_reads and not unit.holds_units:
                self.writes_directly.add(unit.name)
        self.held[GATHERED] += sum(schedule.slot_bytes) + step_schedule.NUM_ROW_SLOTS * schedule.row_slot_bytes
        if training.num_micro_batches > 1:
            self.held[REDUCE] += schedule.scratch_bytes
        self.offloaded = offloaded_activations(schedule, works)
        self.on_device: deque[int] = deque()  # offloadable bytes that are still on the device
        self.is_gathered: set[str] = set()
        self.has_grads: set[str] = set()
        self.slots = [0] * step_schedule.NUM_REDUCTIONS  # bytes of the reduction slots
        self.slot = self.num_opened = 0  # the last one that was opened, and the number of units that have had one
        self.was_at_peak = False  # True if the last unit may have been late
        self.num_tokens = training.num_tokens
        self.leaving: deque[int] = deque()  # gradients that are being copied to the host, by unit
        # Bytes of gradients that autograd allocated: since the last reduction began, before that, and for the root.
        self.unfetched = self.fetched = self.of_root = 0
        self.input_bytes = 0
        self.in_backward = False

    def gather(self, name: str) -> None:
        if name in self.frees_after_backward and name not in self.is_gathered:
            self.is_gathered.add(name)
            self.held[GATHERED] += self.units[name].gathered_bytes

    def forward(self, name: str) -> None:
        self._end_backward()
        work = self.works[name]
        kind = LOSS if work.kind == "loss" else ACTIVATIONS
        if name in self.offloaded:
            if len(self.on_device) == NUM_ON_DEVICE:
                self.held[ACTIVATIONS] -= self.on_device.popleft()
            self.on_device.append(self.offloaded[name])
        # The unit's input is the output of the unit before it. Until the forward ends, it is counted in addition.
        self.note(f"forward {name}", kind, self.input_bytes + work.forward_peak_bytes)
        self.held[kind] += work.saved_bytes
        self.input_bytes = work.output_bytes

    def backward(self, name: str, is_last: bool) -> None:
        """Account for one unit's backward. `is_last`: in the last micro-batch."""
        if not self.in_backward:
            self._begin_backward()
        unit, work = self.units[name], self.works[name]
        kind = LOSS if work.kind == "loss" else ACTIVATIONS
        if not unit.holds_units:
            # The reduction of the previous unit begins here: the gradients that autograd made for it are held until
            # the next reduction begins. The root is reduced at the end.
            self.held[GRADS] -= self.fetched
            self.fetched, self.unfetched = self.unfetched, 0
            if self.was_at_peak and self.fetched > step_schedule.MAX_HELD_BYTES:
                self.held[GRADS] -= self.fetched
                self.fetched = 0
        is_direct, is_late, late_bytes, peak_bytes = name in self.writes_directly, False, 0, work.backward_peak_bytes
        self.was_at_peak = not self.slot_bytes and self.num_opened < step_schedule.NUM_LATE
        if self.was_at_peak:
            is_late = unit.is_late(self.num_tokens) if is_direct else work.grad_bytes > step_schedule.MAX_HELD_BYTES
        if is_direct and is_late:
            late_bytes = work.late_bytes or self.num_tokens * unit.late_bytes
            peak_bytes = work.late_peak_bytes or peak_bytes + late_bytes // 4
        elif is_direct:
            self._open(unit, is_late)
        self.note(f"backward {name}", kind, work.output_bytes + peak_bytes)
        self.held[kind] -= work.saved_bytes
        if unit.trainable:
            if is_late or not is_direct:
                self._open(unit, is_late)
                self.note(f"reduce {name}", GRADS, work.grad_bytes + late_bytes)
            self._reduce(unit, is_last)
            self.note(f"reduce {name}", GRADS, work.grad_bytes)
        self.held[GRADS] += work.grad_bytes
        self.unfetched += work.grad_bytes
        if name in self.is_gathered:
            self.is_gathered.discard(name)
            self.held[GATHERED] -= unit.gathered_bytes

    def _begin_backward(self) -> None:
        self.in_backward = True
        # Activations that are still on the device stay until the backward of their unit.
        self.on_device.clear()
        if LOSS_NAME in self.works:
            # In this case the head belongs to the root: it runs after the last unit, and its gradient stays to the end.
            loss = self.works[LOSS_NAME]
            self.note("forward loss", LOSS, self.input_bytes + loss.forward_peak_bytes)
            self.note("backward loss", LOSS, loss.saved_bytes + loss.output_bytes + loss.backward_peak_bytes)
            self.held[GRADS] += loss.grad_bytes
            self.of_root += loss.grad_bytes
        self.input_bytes = 0

    def _open(self, unit: UnitPlan, is_late: bool) -> None:
        """Add the memory that a unit's backward writes: in the reduction slot of the unit before, if it is late, else
        in the other slot; or that of whole gradients."""
        if unit.name not in self.has_grads:
            self.held[GRADS] += state_bytes.resting_grads([flat for flat in unit.flats if not flat.reduces_in_slot])
        if unit.reduced_bytes:
            slot = self.slot = self.slot if is_late else (self.slot + 1) % step_schedule.NUM_REDUCTIONS
            self.num_opened += 1
            self.held[REDUCE] += (self.slot_bytes or unit.reduced_bytes) - self.slots[slot]
            self.slots[slot] = self.slot_bytes or unit.reduced_bytes

    def _reduce(self, unit: UnitPlan, is_last: bool) -> None:
        """Add the memory of a unit's reduced gradients."""
        if unit.name not in self.has_grads:
            self.has_grads.add(unit.name)
            self.held[GRADS] += state_bytes.resting_grads([flat for flat in unit.flats if flat.reduces_in_slot])
        for_host = [flat for flat in unit.flats if flat.host_updates]
        if for_host and is_last:
            self.leaving.append(state_bytes.resting_grads(for_host))
            if len(self.leaving) == step_schedule.NUM_OFFLOADED_GRADS:  # one of them is in a slot only
                self.held[GRADS] -= self.leaving.popleft()

    def _end_backward(self) -> None:
        self.held[GRADS] -= self.unfetched + self.fetched + self.of_root
        self.unfetched = self.fetched = self.of_root = 0
        self.held[REDUCE] -= sum(self.slots)
        self.slots, self.slot, self.num_opened = [0] * step_schedule.NUM_REDUCTIONS, 0, 0
        self.in_backward = False

    def update(self) -> None:
        self._end_backward()
        self.held[GRADS] -= sum(self.leaving)
        updated_here = [flat for flat in self.schedule.trainable_flats if not flat.host_updates]
        self.note("the gradients' norm", GRADS, 0)
        # Gradients are cast to the master's dtype, one part at a time.
        sizes = [flat.num_master * flat.master.itemsize for flat in updated_here if flat.reduce != flat.master]
        self.note("update", OPTIMIZER, min(sum(sizes), max(sizes, default=0) + 4 * step_schedule.PART_ELEMS))


MB = 10**6
# Fragmentation of FSDP2's compute stream in torchtitan's logs (`benchmarks/planner_memory_published.py`).
HOLES = 0.08


@dataclass(frozen=True, slots=True)
class Reserved:
    low: int
    expected: int
    high: int

    @classmethod
    def exactly(cls, num_bytes: int) -> "Reserved":
        return cls(num_bytes, num_bytes, num_bytes)


# If batches differ in length, the caching allocator cannot use this share of what it reserves, on average and at most:
# fine-tuning of eight language models on A100, with recomputation, offload and LoRA (GMLake, ASPLOS 2024,
# arxiv.org/abs/2401.08156). One run on ragged batches: 16.39 GiB, and 10.83 with expandable segments (torchtune #1185).
FRAGMENTED, MOST_FRAGMENTED = 0.15, 0.33


def fragmented(reserved: Reserved) -> Reserved:
    expected, high = reserved.expected / (1 - FRAGMENTED), reserved.expected / (1 - MOST_FRAGMENTED)
    return Reserved(reserved.low, round(expected), max(round(high), reserved.high))


def reserved_of(schedule: Schedule, memory: Memory, training: Training, is_recomputed: bool) -> Reserved:
    active = memory.peak.total
    if memory.pools:
        # FSDP2: a stream cannot reuse memory of another, so the peaks add up, and the compute stream leaves holes.
        # Before it fails, the allocator gives free blocks back, so little more than the peak is enough (`low`).
        computing, together = memory.pools[0], sum(memory.pools)
        return Reserved(active + active // 100, together + round(HOLES * computing), together + computing // 5)
    returned = sum(unit.gathered_bytes for unit in schedule.units if unit.gives_back)
    kept = schedule.reduction_slot_bytes // 2 if training.num_micro_batches > 1 else 0
    holes = returned // (5 if is_recomputed else 30)
    expected = active + min(200 * MB, active // 8) + active // 200 + holes + kept
    # The largest block that is allocated and freed within a step may fit into no hole.
    whole = [state_bytes.resting_grads(unit.flats) for unit in schedule.units if unit.layout.grads == "whole"]
    loss = max(instant.num_bytes[LOSS] for instant in memory.instants)
    largest = max(schedule.reduction_slot_bytes, loss // 4, *whole, 0)
    more = 150 * MB + active // 100 + returned // 4 + largest * 2 // 3
    return Reserved(active + 20 * MB, expected, expected + more)
