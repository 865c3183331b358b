"""Predicted time of a step: a simulation of the list of events that the engine executes.

A gather begins when all computation before it in the list has ended, and the computation of its unit waits for it.
There are two reduction slots, so a backward waits for the reduction of the unit two before it. Updates wait for the
gradients of their unit (with clipping: of all units, except for updates on the host ahead of the norm). The host
updates one unit at a time: among those whose gradients have arrived, the one that the next forward needs first. The
host launches all kernels in order, and a kernel cannot run before its launch. Two steps are simulated; the second is
reported, because it starts like one in the middle of a run.

Every transfer is an operation. It waits for its queue (a communicator, one direction of PCIe, the host, the disk) and
for the previous operation of its chain. Then it occupies one or more wires. A wire is modelled by the time at which it
is free again, as in the emulated network (`bench/fabric.py`). PCIe has a wire for each direction and one for both. An
update of state on disk is one operation on host and disk, since the engine reads, updates and writes in a pipeline.
"""

from collections import defaultdict, deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ...core.schedule.step_schedule import NUM_OFFLOADED_GRADS, NUM_REDUCTIONS, Schedule
from ...core.wire.ledger import Call
from ..events import Event, Move
from ..hardware.cluster import Cluster
from ..hardware.gpus import IDEAL, Overheads
from ..hardware.links import plan_transfer
from .compute import UnitSeconds
from .peak import NUM_ON_DEVICE

Queue = tuple[str, str]  # a lane, and the name of one of its queues
Cost = tuple[tuple[tuple[str, float], ...], float]  # pairs (wire, seconds that it is occupied); the latency after them

COLLECTIVES = ("gather", "reduce")
# A thread block of a collective moves so many bytes a second (about the rate of a channel of NCCL). What passes through
# a rank is read once and written once; a reduction reads its own part in addition.
BYTES_PER_S_OF_A_BLOCK = 25e9
MEMORY_PASSES = {"all_gather": 2, "broadcast": 2}
MEMORY_PASSES_OF_SUMS = 3
MOST_LOST = 0.9  # the computation never stands still
SHORTEST_S = 1e-9  # of a collective on a link without limits
COPY, DISK, HOST = "copy", "disk", "host"
_LANES = {"to_device": COPY, "to_host": COPY, "read": DISK, "write": DISK}
# Bandwidth of PCIe in both directions together, relative to one direction: 54 and 38 GB/s, measured on an H200.
BOTH_WAYS = 1.4


class Span(NamedTuple):
    """A named time interval on a lane."""

    lane: str
    name: str
    begin_s: float
    end_s: float


@dataclass(slots=True, eq=False)
class Op:
    """A queued operation, which waits for `before`. `taken_s`: the seconds of the whole device that it takes from the
    computation. `end_s` is negative until the operation has begun."""

    queue: Queue
    name: str
    ready_s: float
    before: "Op | None"
    cost: Cost
    taken_s: float = 0.0
    end_s: float = -1.0


class Lanes:
    """Simulates the operations of one rank in the order in which they begin."""

    def __init__(self, cluster: Cluster, overheads: Overheads) -> None:
        self._cluster, self.overheads = cluster, overheads
        self._queues: defaultdict[Queue, deque[Op]] = defaultdict(deque)
        self._queue_free: defaultdict[Queue, float] = defaultdict(float)
        self._next: tuple[Op | None, float] | None = None  # the answer of `_first_of_queues`, if it is known
        self._wire_free: defaultdict[str, float] = defaultdict(float)
        self._costs: dict[Call, tuple[Cost, float]] = {}
        # (begin, end, share of the computation that is lost) of collectives.
        self._busy: list[tuple[float, float, float]] = []
        self.busy_s: defaultdict[str, float] = defaultdict(float)
        self.spans: list[Span] = []

    def start_calls(self, lane: str, name: str, calls: Iterable[Call], ready_s: float, after: Op | None) -> Op | None:
        """Queue collectives one after the other; return the last operation of the chain."""
        for call in calls:
            if (cost := self._costs.get(call)) is None:
                cost = self._costs[call] = self._cost_of(call)
            after = self._queue(Op((lane, call.axis), name, ready_s, after, *cost))
        return after

    def _cost_of(self, call: Call) -> tuple[Cost, float]:
        """Return the cost of a collective, and the seconds that it takes from the computation. `cluster.switch`: the
        link of all-reduces in a node, if the switch sums."""
        fabric, world = self._cluster.fabric, self._cluster.world_size
        ranks = range(0, world, max(1, world // call.num_ranks)) if call.axis == "replicate" else range(call.num_ranks)
        num_hops = ranks[-1] // fabric.node_size
        if call.kind == "all_reduce" and self._cluster.switch is not None and not num_hops:
            fabric = replace(fabric, intra=self._cluster.switch)
        transfer = plan_transfer(fabric, call.kind, call.num_bytes, ranks, 0)
        wires = tuple((wire, wire_s) for wire, wire_s in transfer.occupied_s.items() if wire_s)
        gpu, moved = self._cluster.gpu, max(transfer.moved_bytes.values())
        passes = MEMORY_PASSES.get(call.kind, MEMORY_PASSES_OF_SUMS)
        device_s = moved / (BYTES_PER_S_OF_A_BLOCK * gpu.multiprocessors) + passes * moved / gpu.hbm_bytes_per_s
        latency_s = transfer.latency_s + num_hops * self.overheads.hop_us * 1e-6
        return (wires, latency_s), self.overheads.contention * device_s

    def coding_s(self, num_bytes: int) -> float:
        """Return the seconds in which the device reads and writes these bytes to encode or decode them."""
        return num_bytes / (self.overheads.coding * self._cluster.gpu.hbm_bytes_per_s)

    def start_coding(self, queue: Queue, name: str, num_bytes: int, ready_s: float, after: Op | None) -> Op | None:
        """Queue encoding or decoding on the device, which occupies no wire. 0 bytes need no operation."""
        if not num_bytes:
            return after
        return self._queue(Op(queue, name, ready_s, after, ((), self.coding_s(num_bytes))))

    def start_move(self, name: str, move: Move, ready_s: float, after: Op | None, stream: str = "") -> Op:
        """Queue a copy. Copies of different streams share the wires, but do not wait for each other."""
        lane = _LANES[move.way]
        latency_s = self._cluster.pcie.latency_us * 1e-6 if lane == COPY else 0.0
        return self._queue(Op((lane, f"{stream} {move.way}"), name, ready_s, after, (self._wires(move), latency_s)))

    def _wires(self, move: Move) -> tuple[tuple[str, float], ...]:
        cluster = self._cluster
        if _LANES[move.way] == COPY:
            wire_s = cluster.pcie.seconds(move.num_bytes)
            return (move.way, wire_s), ("bus", wire_s / BOTH_WAYS)
        rate = cluster.disk_read_bytes_per_s if move.way == "read" else cluster.disk_write_bytes_per_s
        wire_s = move.num_bytes * cluster.node_size / rate
        return (move.way, wire_s), (DISK, wire_s)

    def _queue(self, op: Op) -> Op:
        ops = self._queues[op.queue]
        if not ops:
            self._next = None
        ops.append(op)
        return op

    def end_of(self, op: Op | None) -> float:
        if op is None:
            return 0.0
        while op.end_s < 0.0:
            self._begin_next(float("inf"))
        return op.end_s

    def run_until(self, instant_s: float) -> bool:
        """Begin all operations that can begin before `instant_s`; return False if there were none."""
        any_began = False
        while self._begin_next(instant_s):
            any_began = True
        return any_began

    def _begin_next(self, before_s: float) -> bool:
        if self._next is None:
            self._next = self._first_of_queues()
        first, begin_s = self._next
        if first is None or begin_s >= before_s:
            return False
        self._next = None
        self._begin(first, begin_s)
        return True

    def _first_of_queues(self) -> tuple[Op | None, float]:
        """Return the operation that can begin first, and when."""
        first: Op | None = None
        begin_s = float("inf")
        for queue, ops in self._queues.items():
            if ops:
                op = ops[0]
                op_begin_s, before = op.ready_s, op.before
                if before is not None:
                    if before.end_s < 0.0:
                        continue
                    if before.end_s > op_begin_s:
                        op_begin_s = before.end_s
                if op_begin_s > begin_s:
                    continue
                if (free_s := self._queue_free[queue]) > op_begin_s:
                    op_begin_s = free_s
                # Of two that can begin at the same time, a gather is first, because the engine queues it first.
                if op_begin_s < begin_s or (op_begin_s == begin_s and queue[0] == "gather" and first is not None):
                    first, begin_s = op, op_begin_s
        return first, begin_s

    def _begin(self, first: Op, begin_s: float) -> None:
        begun_s = done_s = begin_s
        lane = first.queue[0]
        wires, latency_s = first.cost
        for wire, wire_s in wires:
            wire_begin_s = max(begin_s, self._wire_free[wire])
            free_s = self._wire_free[wire] = wire_begin_s + wire_s
            self.busy_s[wire] += wire_s
            if free_s > done_s:
                begun_s, done_s = wire_begin_s, free_s
            if wire == DISK != lane:
                self.spans.append(Span(DISK, first.name, wire_begin_s, free_s))
        first.end_s = self._queue_free[first.queue] = done_s + latency_s
        self._queues[first.queue].popleft()
        if lane in COLLECTIVES and wires and (first.taken_s or self.overheads.lost):
            lost = min(self.overheads.lost + first.taken_s / max(first.end_s - begun_s, SHORTEST_S), MOST_LOST)
            self._busy.append((begun_s, first.end_s, lost))
            self._busy.sort()
        self.spans.append(Span(lane, first.name, begun_s, first.end_s))

    def computed(self, begin_s: float, work_s: float) -> float:
        """Return when computation that starts at `begin_s` ends. It is slower while collectives run."""
        if not self.overheads.contention and not self.overheads.lost:
            return begin_s + work_s
        end_s = self._slowed_end_s(begin_s, work_s)
        while self.run_until(end_s):
            end_s = self._slowed_end_s(begin_s, work_s)
        self._busy = [span for span in self._busy if span[1] > end_s]
        return end_s

    def _slowed_end_s(self, begin_s: float, work_s: float) -> float:
        now_s, left_s = begin_s, work_s
        for begun_s, ended_s, lost in self._busy:
            if ended_s <= now_s:
                continue
            if begun_s > now_s:
                if now_s + left_s <= begun_s:
                    break
                left_s -= begun_s - now_s
                now_s = begun_s
            if left_s <= (ended_s - now_s) * (1 - lost):
                return now_s + left_s / (1 - lost)
            left_s -= (ended_s - now_s) * (1 - lost)
            now_s = ended_s
        return now_s + left_s


# Queues in which the device encodes and decodes. Gathers have one for both; reductions have one for each.
_CODING = {"gather": ("coding", "coding"), "reduce": ("start", "finish")}


class StepSimulator(Lanes):
    """Simulates a step: the computation, the host that launches its kernels, and the transfers."""

    def __init__(
        self,
        schedule: Schedule,
        seconds: Mapping[str, UnitSeconds],
        cluster: Cluster,
        overheads: Overheads,
        ahead: Container[str],
    ) -> None:
        super().__init__(cluster, overheads)
        self._seconds, self._ahead = seconds, ahead
        self._has_slot = {unit.name for unit in schedule.units if unit.reduced_bytes}
        leaving = [unit for unit in schedule.units if any(f.host_updates and not f.grads_on_host for f in unit.flats)]
        self._has_leaving_grads = {unit.name for unit in leaving}
        self._position_of = {schedule.units[unit].name: position for position, unit in enumerate(schedule.order)}
        self._compute_s = self._host_s = self._extra_s = 0.0  # end of computation, end of launches, delay to add
        self._host_updates: dict[str, Op] = {}
        self._host_updates_end_s = 0.0

    def play(self, events: Sequence[Event]) -> float:
        """Simulate one step; return the time at which its computation ends. Spans are those of this step."""
        self.spans.clear()
        self.busy_s.clear()
        self.work_s = self.updates_s = self._norm_end_s = self._updates_end_s = 0.0
        self._gathers: dict[str, Op | None] = {}
        # By unit: the end of its reduction, and the end of the copy of its gradients to the host.
        self._reductions: dict[str, Op | None] = {}
        self._arrivals: dict[str, Op | None] = {}
        self._slots: deque[Op | None] = deque([None] * NUM_REDUCTIONS, NUM_REDUCTIONS)
        self._leaving_grads: deque[Op | None] = deque([None] * NUM_OFFLOADED_GRADS, NUM_OFFLOADED_GRADS)
        # Copies of activations, by verb and unit: "stow" (to the host; the last ones are in `_offloads`) and "fetch".
        self._copies: dict[tuple[str, str], Op] = {}
        self._offloads: deque[Op | None] = deque([None] * NUM_ON_DEVICE, NUM_ON_DEVICE)
        last_forward = max(index for index, event in enumerate(events) if event.verb == "forward")
        for index, event in enumerate(events):
            if event.verb == "gather":
                self._gather(event)
            elif event.verb in ("forward", "backward"):
                self._compute(event)
            elif event.verb in ("stow", "fetch"):
                self._copy_activations(event)
            elif event.verb == "reduce":
                self._reduce(event, is_last=index > last_forward)
            elif event.verb == "update":
                self._update(event)
            else:
                self._exchange(event)
        self._update_on_host([event for event in events if event.host_elems])
        arrived_s = max(map(self.end_of, self._arrivals.values()), default=0.0)
        self._compute_s = max(self._compute_s, self._updates_end_s, self._host_s, arrived_s)
        self.run_until(self._compute_s)
        return self._compute_s

    def _gather(self, event: Event) -> None:
        self._host_s += self.overheads.event_s
        name = f"gather {event.unit}"
        ready_s = max(self._compute_s, self._host_s)
        last = self._host_updates.get(event.unit)
        for move in event.moves:
            if move.way in ("read", "to_device"):
                last = self.start_move(name, move, ready_s, last, "gather")
        # Casts run next to the computation, and delay it by their own duration.
        cast_s = self._seconds[event.unit].cast
        self._extra_s += cast_s
        last = self._start_collectives(event, ready_s + cast_s, last)
        self._gathers[event.unit] = last
        for move in event.moves:
            if move.way in ("to_host", "write"):
                last = self.start_move(name, move, ready_s, last, "gather")
        if event.blocks:
            self._compute_s = max(self._compute_s, self.end_of(last))

    def _start_collectives(self, event: Event, ready_s: float, last: Op | None) -> Op | None:
        """Queue encoding, collectives and decoding. The computation is delayed by the time of encoding and decoding."""
        lane, name, (before, after) = event.verb, f"{event.verb} {event.unit}", _CODING[event.verb]
        self._extra_s += self.coding_s(event.encode_bytes + event.decode_bytes)
        last = self.start_coding((lane, before), name, event.encode_bytes, ready_s, last)
        last = self.start_calls(lane, name, event.calls, ready_s, last)
        return self.start_coding((lane, after), name, event.decode_bytes, ready_s, last)

    def _compute(self, event: Event) -> None:
        name, unit, end_of = event.unit, self._seconds[event.unit], self.end_of
        if event.verb == "forward":
            work_s, num_kernels = unit.forward, unit.forward_kernels
            # The device has memory for the activations of this unit and of one that is being copied.
            ready_s = end_of(self._offloads[0])
        else:
            work_s, num_kernels = unit.backward, unit.backward_kernels
            # Wait until the activations are fetched and there is memory for the gradients.
            slot_s = end_of(self._slots[0]) if name in self._has_slot else 0.0
            copied_s = end_of(self._leaving_grads[0]) if name in self._has_leaving_grads else 0.0
            ready_s = max(slot_s, copied_s, end_of(self._copies.get(("fetch", name))))
        # If the host updates the weights of the unit, it launches the unit after that.
        self._host_s = max(self._host_s, end_of(self._host_updates.pop(name, None)))
        begin_s = max(self._compute_s, self._host_s, ready_s, end_of(self._gathers.pop(name, None)))
        self._host_s += num_kernels * self.overheads.launch_s
        # The unit cannot end before its last kernel is launched.
        self._compute_s = max(self.computed(begin_s, work_s + self._extra_s), self._host_s)
        self._extra_s = 0.0
        self.work_s += work_s
        self.spans.append(Span("compute", f"{event.verb} {name}", begin_s, self._compute_s))

    def _copy_activations(self, event: Event) -> None:
        before = self._copies.get(("stow", event.unit)) if event.verb == "fetch" else None
        name = f"{event.verb} {event.unit}"
        copy = self.start_move(name, event.moves[0], self._compute_s, before, "activations")
        self._copies[event.verb, event.unit] = copy
        if event.verb == "stow":
            self._offloads.append(copy)

    def _reduce(self, event: Event, is_last: bool) -> None:
        self._host_s += self.overheads.event_s
        name = f"reduce {event.unit}"
        last = reduced = self._start_collectives(event, self._compute_s, None)
        for move in event.moves:
            last = self.start_move(name, move, self._compute_s, last, "gradients")
        if event.unit in self._has_slot:
            self._slots.append(last)
        if is_last:
            self._leaving_grads.append(last if event.unit in self._has_leaving_grads else None)
            self._extra_s += self._seconds[event.unit].norm_of_offloaded
        self._reductions[event.unit], self._arrivals[event.unit] = reduced, last
        if event.blocks:
            self._compute_s = max(self._compute_s, self.end_of(last))

    def _exchange(self, event: Event) -> None:
        """Exchange small values between ranks: "agree" (which parameters were used), for which nothing waits, and the
        norm, which waits for all gradients. All updates wait for the norm."""
        if event.verb != "norm":
            self.start_calls("reduce", event.verb, event.calls, self._compute_s, None)
            return
        begin_s = max([self._compute_s, *map(self.end_of, self._reductions.values())])
        norm_s = sum(self._seconds[name].norm for name in self._reductions)
        self._compute_s = begin_s + norm_s
        last = self.start_calls("reduce", "norm", event.calls, self._compute_s, None)
        self._compute_s = max(self._compute_s, self.end_of(last))
        self._norm_end_s = self._compute_s
        self.updates_s += norm_s
        self.spans.append(Span("compute", "norm", begin_s, self._compute_s))

    def _update(self, event: Event) -> None:
        """Simulate a unit's update on the device."""
        update_s = self._seconds[event.unit].update
        if update_s or not event.host_elems:
            reduced_s = self.end_of(self._reductions.get(event.unit))
            begin_s = max(self._compute_s, self._updates_end_s, reduced_s)
            self._updates_end_s = self.computed(begin_s, update_s)
            self.updates_s += update_s
            self.spans.append(Span("compute", f"update {event.unit}", begin_s, self._updates_end_s))

    def _update_on_host(self, events: Sequence[Event]) -> None:
        """Queue the host's updates. With clipping they are ready after the norm, except those ahead of it. Otherwise
        each is ready when its gradient arrives."""
        waiting = {event.unit: event for event in events}
        norm_end_s = {name: 0.0 if name in self._ahead else self._norm_end_s for name in waiting}
        ready_s = {name: max(norm_end_s[name], self.end_of(self._arrivals.get(name))) for name in waiting}
        while waiting:
            start_s = max(self._host_updates_end_s, min(ready_s[name] for name in waiting))
            candidates = [name for name in waiting if 0 < self._norm_end_s <= start_s or ready_s[name] <= start_s]
            name = min(candidates, key=lambda name: self._position_of[name])
            event = waiting.pop(name)
            # Reads from disk and writes to disk overlap with the update.
            host_s = event.host_elems * self._cluster.node_size / self._cluster.host_adam_elems_per_s
            wires = ((HOST, host_s), *(wire for move in event.moves for wire in self._wires(move)))
            op = Op((HOST, HOST), f"update {name}", ready_s[name], None, (wires, 0.0))
            self._host_updates[name] = self._queue(op)
            # An estimate without other disk transfers, which is used only for the order of updates.
            self._host_updates_end_s = max(start_s, ready_s[name]) + max(wire_s for _, wire_s in wires)


@dataclass(frozen=True)
class Timing:
    """Predicted time of a step. `compute_s`: forwards and backwards without waits; `update_s`: updates on the device.
    The rest of `step_s` is waits for wires and host, and slowdown by collectives. `busy_s`: seconds by wire."""

    step_s: float
    compute_s: float
    update_s: float
    busy_s: dict[str, float]
    simulated: tuple[list[Span], float, float]  # what happened, and when the step began and ended

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Spans of the step, in seconds from its begin."""
        spans, begin_s, end_s = self.simulated
        found = [
            Span(span.lane, span.name, span.begin_s - begin_s, span.end_s - begin_s)
            for span in spans
            # Keep computations of zero duration: the n-th one belongs to the n-th instant of the predicted memory.
            if (span.end_s > span.begin_s or span.lane == "compute") and span.begin_s < end_s
        ]
        return tuple(sorted(found, key=lambda span: (span.begin_s, span.lane != "compute")))

    def continued(self, fewer: "Timing", num: int) -> "Timing":
        """Return the timing with `num` more micro-batches (`spans` stay as they are). `fewer` is the timing with one
        micro-batch less than this one: the difference is the cost of a micro-batch."""
        return replace(
            self,
            step_s=self.step_s + num * (self.step_s - fewer.step_s),
            compute_s=self.compute_s + num * (self.compute_s - fewer.compute_s),
            busy_s={name: busy + num * (busy - fewer.busy_s.get(name, 0.0)) for name, busy in self.busy_s.items()},
        )


def step_time(
    schedule: Schedule,
    events: Sequence[Event],
    seconds: Mapping[str, UnitSeconds],
    cluster: Cluster,
    overheads: Overheads = IDEAL,
    ahead: Container[str] = (),
) -> Timing:
    """Simulate a step. `events`: `step_events(schedule, ...)`; `seconds`: durations of each unit without waits.
    `ahead`: units that the host updates before the norm, in a step that is not clipped."""
    simulator = StepSimulator(schedule, seconds, cluster, overheads, ahead)
    begin_s = simulator.play(events)
    end_s = simulator.play(events)
    simulated = simulator.spans, begin_s, end_s
    return Timing(end_s - begin_s, simulator.work_s, simulator.updates_s, dict(simulator.busy_s), simulated)
