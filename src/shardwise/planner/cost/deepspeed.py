"""Memory of a rank under DeepSpeed's ZeRO at every instant of a step, and its step as our events, to compare with ours.

Read from DeepSpeed 0.19.8 (`stage_1_and_2.py`, `stage3.py` and `partitioned_param_coordinator.py` in `runtime/zero`,
and for stage 0 `runtime/fp16/unfused_optimizer.py`). All weights have a copy in the compute dtype, and trained ones a
master besides, in stages 1 to 3 also in fp32. A gradient is copied into a bucket as soon as autograd has made it. A
full bucket is reduced: in stage 3 by a reduce-scatter, in stages 1 and 2 by an all-reduce, although a rank needs only
its own part (`use_multi_rank_bucket_allreduce`). Sums are in the compute dtype, and cast to the master's for the
update. In stages 1 and 2 a blocking all-gather follows the update. Stage 3 gathers parameters ahead until `max_live`
are there, and keeps those that it will need soon; so the last ones of the forward are still there in the backward.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ...core.layout import Layout
from ...core.schedule.state_bytes import OffDevice
from ...core.schedule.step_schedule import Schedule
from ...core.wire.ledger import Call
from ..events import Event
from ..training import Training
from ..work.work import Work
from .compute import Copies
from .peak import ACTIVATIONS, GATHERED, GRADS, LOSS, OPTIMIZER, PARAMS, REDUCE, WORKSPACE_BYTES, Memory, MemoryWalk

# Stage 0 reduces gradients in pieces of this many elements (`MEMORY_OPT_ALLREDUCE_SIZE` in `runtime/engine.py`).
STAGE_0_BUCKET = 500_000_000
# Bytes per element that the host reads and writes in an update, relative to ours. Theirs: Adam on fp32 gradients (28),
# their clipping (8), and the copy in 16 bits (6). Ours: one pass on 16-bit gradients (30).
HOST_PASSES = 42 / 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero:
    """Settings of `zero_optimization`, in elements. Defaults are DeepSpeed's own (`runtime/zero/config.py`).

    `overlaps`: `overlap_comm`; None: in stage 3 alone. `is_foreach`: as in `fsdp.Wrapping`.
    """

    overlaps: bool | None = None
    reduce_bucket: int = 500_000_000
    sub_group: int = 1_000_000_000
    prefetch_bucket: int = 50_000_000
    max_live: int = 1_000_000_000
    persistence: int = 100_000
    is_foreach: bool = False

    def overlaps_in(self, stage: int) -> bool:
        return stage == 3 if self.overlaps is None else self.overlaps and stage > 0


def stage_of(layout: Layout) -> int:
    return 3 if layout.params != "whole" else 2 if layout.grads != "whole" else 1 if layout.optimizer != "whole" else 0


def deepspeed_memory_of(
    schedule: Schedule, works: Mapping[str, Work], training: Training, zero: Zero | None = None
) -> Memory:
    step = _Step(schedule, works, training, zero or Zero())
    last = min(training.num_micro_batches, 2) - 1
    for index in range(last + 1):
        step.forward(index == 0)
        step.backward(index == 0, index == last)
    step.update()
    memory = Memory(tuple(step.instants), step.off_device())
    if not step.zero.overlaps_in(step.stage):
        return replace(memory, pools=(memory.peak.total,))
    # Gathers and reductions allocate on streams of their own.
    apart = [max(instant.num_bytes[kind] for instant in memory.instants) for kind in (GATHERED, REDUCE)]
    rest = max(i.total - i.num_bytes[GATHERED] - i.num_bytes[REDUCE] for i in memory.instants)
    return replace(memory, pools=(rest, *apart))


class _Step(MemoryWalk):
    """Tracks memory by class through a step."""

    def __init__(self, schedule: Schedule, works: Mapping[str, Work], training: Training, zero: Zero) -> None:
        super().__init__()
        self.works, self.zero, self.layout = works, zero, layout_in(schedule)
        self.stage, self.on_host = stage_of(self.layout), self.layout.optimizer_on != "device"
        self.accumulates, self.num_moments = training.num_micro_batches > 1, training.num_moments
        formats = training.formats
        self.compute, self.master = formats.compute.itemsize, formats.master.itemsize
        # Bytes of a gradient in its own buffer, if it is reduced in another dtype than it has.
        self.reduce = formats.reduce.itemsize
        self.cast = self.reduce if formats.reduce != formats.compute else 0
        self.backward_reads = {unit.name: unit.backward_reads for unit in schedule.units}
        self.elems: dict[str, int] = {}  # trained elements, by unit
        self.largest: dict[str, int] = {}  # elements of the largest trained parameter
        self.moving: dict[str, int] = {}  # elements that stage 3 gathers
        num_ranks = schedule.num_ranks if self.stage else 1
        self.num_trained = self.num_frozen = self.shard = self.frozen_shard = 0
        for unit in schedule.units:
            sizes = [(param.num_elems, flat.trainable) for flat in unit.flats for param in flat.params]
            trained, frozen = ([num for num, is_trained in sizes if is_trained == kind] for kind in (True, False))
            self.elems[unit.name], self.largest[unit.name] = sum(trained), max(trained, default=0)
            self.moving[unit.name] = sum(num for num, _ in sizes if num > zero.persistence)
            self.num_trained += sum(trained)
            self.num_frozen += sum(frozen)
            self.shard += sum(-(-num // num_ranks) for num in trained)
            self.frozen_shard += sum(-(-num // num_ranks) for num in frozen)
        sizes_of_nodes = [flat.axis_sizes[0] for flat in schedule.trainable_flats if "node" in flat.layout.chain]
        whole = self.num_trained + self.num_frozen
        self.second = self.compute * (-(-whole // sizes_of_nodes[0])) if sizes_of_nodes else 0
        self.filled, self.has_part = 0, False  # elements in the bucket; True once this rank's gradients have memory
        self._hold_state(whole)

    def _hold_state(self, whole: int) -> None:
        held = self.held
        held[ACTIVATIONS] = WORKSPACE_BYTES
        if not self.on_host:
            num_copies = self.num_moments + (self.stage > 0 or self.compute != self.master)
            held[OPTIMIZER] = round(self.master * num_copies * self.shard)
        if self.stage < 3:
            held[PARAMS] = self.compute * whole
            held[REDUCE] = self.compute * max(self.largest.values()) if self.on_host else 0
            return
        shard = self.shard + self.frozen_shard if self.layout.params_on == "device" else 0
        held[PARAMS] = self.compute * (shard + whole - sum(self.moving.values()))
        held[GRADS] = 0 if self.on_host else self.compute * self.shard
        held[REDUCE] = self.reduce * self.zero.reduce_bucket

    def off_device(self) -> OffDevice:
        """The host has master, moments and an fp32 gradient, weights in the compute dtype, and in stage 3 and with
        several micro-batches sums of gradients."""
        if not self.on_host:
            return OffDevice(0, 0, 0, 0)
        each = round(self.master * (2 + self.num_moments)) + self.compute
        each += self.compute if self.stage == 3 or self.accumulates else 0
        frozen = self.compute * self.frozen_shard if self.layout.params_on != "device" else 0
        return OffDevice(each * self.shard + frozen, 0, 0, 0)

    def _gathered_bytes(self, trace: Sequence[str]) -> int:
        """Bytes of parameters that are there while the first unit of `trace` runs: its own, and those that follow."""
        if self.stage < 3:
            return 0
        ahead = sum(self.moving.get(name, 0) for name in dict.fromkeys(trace))
        live = min(ahead, max(self.zero.max_live, self.largest.get(trace[0], 0)))
        # Several parameters come in one buffer, out of which they are copied.
        return self.compute * (live + min(live, self.zero.prefetch_bucket))

    def _reversed(self, names: Sequence[str]) -> list[str]:
        return [name for name in reversed(names) if self.backward_reads.get(name, True)]

    def forward(self, is_first: bool) -> None:
        self.held[PARAMS] += self.second if is_first else 0
        names, input_bytes = list(self.works), 0
        for position, name in enumerate(names):
            work = self.works[name]
            kind = LOSS if work.kind == "loss" else ACTIVATIONS
            self.held[GATHERED] = self._gathered_bytes(names[position:] + self._reversed(names))
            self.note(f"forward {name}", kind, input_bytes + work.forward_peak_bytes)
            self.held[kind] += work.saved_bytes
            input_bytes = work.output_bytes

    def backward(self, is_first: bool, is_last: bool) -> None:
        stage, overlaps, names = self.stage, self.zero.overlaps_in(self.stage), list(self.works)
        # Stages 0 and 1 reduce in the last micro-batch alone; without overlap, they begin after its backward.
        waits = stage == 0 or (stage == 1 and not (is_last and overlaps))
        buckets = self.compute * self.zero.reduce_bucket * (1 + overlaps) if stage in (1, 2) else 0
        self.held[REDUCE] += buckets
        self.has_part = stage in (0, 3) or self.on_host
        for position, name in reversed(list(enumerate(names))):
            work = self.works[name]
            kind = LOSS if work.kind == "loss" else ACTIVATIONS
            self.held[GATHERED] = self._gathered_bytes([name, *self._reversed(names[:position])])
            # The tape leaves out gradients that our engine's layers write to its own buffers.
            largest = self.compute * self.largest.get(name, 0)
            made = 0 if work.grad_bytes else largest
            self.note(f"backward {name}", kind, work.output_bytes + work.backward_peak_bytes + made)
            self.filled += self.elems.get(name, 0)
            if waits:
                self.held[GRADS] += self.compute * self.elems.get(name, 0) if is_first else 0
            elif self.filled > self.zero.reduce_bucket:
                self._reduce(name, largest)
            self.held[kind] -= work.saved_bytes
        self.held[GATHERED] = 0
        if stage == 1 and waits and is_last:
            # The first bucket has the gradients themselves.
            self.held[GRADS] -= self.compute * min(self.filled, self.zero.reduce_bucket)
        if stage and (is_last or not waits):
            self._reduce("at the end", 0)
        self.filled = 0
        if (stage == 1 and is_last) or (stage == 2 and not is_first):
            # The first stage drops whole gradients; the second adds its part to that of earlier micro-batches.
            self.held[GRADS] = 0 if self.on_host else self.compute * self.shard
        self.held[REDUCE] -= buckets

    def _reduce(self, name: str, more: int) -> None:
        """Reduce the bucket. Stage 3 sorts it by rank first; the others copy what several ranks share."""
        num = min(self.filled, self.zero.reduce_bucket)
        if not self.has_part:
            self.has_part = True
            self.held[GRADS] += self.compute * self.shard
        own = self.reduce if self.stage == 3 else self.compute
        self.note(f"reduce {name}", REDUCE, num * (own + self.cast) + more)
        self.filled = 0

    def update(self) -> None:
        self.held[PARAMS] -= self.second
        if self.on_host:
            self.note("update")
            return
        if self.stage == 0:
            num = min(STAGE_0_BUCKET, self.num_trained)
            self.note("reduce at the end", REDUCE, num * (self.compute + self.cast))
        num = min(self.zero.sub_group, self.shard) if self.stage == 3 else self.shard
        cast = self.master if self.master != self.compute else 0
        if self.stage:
            self.note("the gradients' cast", GRADS, num * (self.compute + cast))
        if self.stage in (1, 2):
            self.held[GRADS] = 0
        grad = self.master if self.stage else cast
        self.note("update", OPTIMIZER, num * (grad + (self.master if self.zero.is_foreach else 0)))


def layout_in(schedule: Schedule) -> Layout:
    """Return the layout of all units; what is never split has another one."""
    return max((unit.layout for unit in schedule.units), key=lambda layout: (stage_of(layout), layout.optimizer_on))


def deepspeed_events(events: Sequence[Event], schedule: Schedule, training: Training, zero: Zero) -> list[Event]:
    """Return our events of a step as DeepSpeed executes them."""
    layout = layout_in(schedule)
    found = list(_in_buckets(events, schedule, training, zero))
    gathers: list[Event] = []
    if stage_of(layout) == 3:
        found = list(_gathered_once(found, schedule, zero))[::-1]
    else:
        gathers = [event for event in found if event.verb == "gather"]
        found = [event for event in found if event.verb != "gather"]
    if gathers or layout.optimizer_on != "device":
        # This follows the update of all weights, and everything waits for it.
        moves = tuple(move for event in gathers for move in event.moves)
        calls = _merged(call for event in gathers for call in event.calls)
        found.insert(0, Event("gather", schedule.units[schedule.reduce_order[0]].name, calls, moves, blocks=True))
    return found


def _merged(calls: Iterable[Call]) -> tuple[Call, ...]:
    sizes: Counter[Call] = Counter()
    for call in calls:
        sizes[replace(call, num_bytes=0)] += call.num_bytes
    return tuple(replace(call, num_bytes=num_bytes) for call, num_bytes in sizes.items())


def _in_buckets(events: Sequence[Event], schedule: Schedule, training: Training, zero: Zero) -> Iterator[Event]:
    """Move the reductions of a bucket to its last unit; in the first stages they are all-reduces."""
    stage, formats = stage_of(layout_in(schedule)), training.formats
    elems = {unit.name: unit.trained_bytes // formats.compute.itemsize for unit in schedule.units}
    overlaps, wider = zero.overlaps_in(stage), formats.master.itemsize / formats.reduce.itemsize
    others = [at for at, event in enumerate(events) if event.verb != "gather"]
    ends = {at for at, after in pairwise(others) if events[after].verb in ("forward", "agree")}
    calls: list[Call] = []
    filled = 0
    for at, event in enumerate(events):
        if event.verb == "reduce":
            calls += event.calls if stage == 3 else [replace(call, kind="all_reduce") for call in event.calls]
            filled += elems[event.unit]
            is_full = at in ends or (filled > zero.reduce_bucket and overlaps)
            moves = tuple(replace(move, num_bytes=round(move.num_bytes * wider)) for move in event.moves)
            yield replace(event, calls=_merged(calls) if is_full else (), moves=moves, blocks=not overlaps)
            calls, filled = ([], 0) if is_full else (calls, filled)
        else:
            yield replace(event, host_elems=round(event.host_elems * HOST_PASSES)) if event.host_elems else event


def _gathered_once(events: Sequence[Event], schedule: Schedule, zero: Zero) -> Iterator[Event]:
    """Yield the events from the last to the first, without gathers for the backward of what the forward has left."""
    room, kept, following = zero.max_live, set(), ""
    for unit in (schedule.units[at] for at in reversed(schedule.leaves)):
        room -= sum(flat.num_elems for flat in unit.flats)
        kept |= {unit.name} if room >= 0 else set()
    for event in reversed(events):
        following = following if event.verb == "gather" else event.verb
        if not (event.verb == "gather" and following == "backward" and event.unit in kept):
            yield event


def deepspeed_copies(schedule: Schedule, training: Training) -> Copies:
    stage, formats = stage_of(layout_in(schedule)), training.formats
    compute, master, reduce = formats.compute.itemsize, formats.master.itemsize, formats.reduce.itemsize
    cast = compute + reduce if formats.compute != formats.reduce else 0
    # A gradient is copied into the bucket, and there it is divided; the rest are copies around the collective. Those of
    # this rank are flattened, cast and clipped, and the weights rounded.
    grad = 2 * compute + cast + 4 * reduce if stage == 3 else 6 * compute + 2 * cast
    return Copies(2 * compute if stage == 3 else 0, grad, 3 * compute + 4 * master)
