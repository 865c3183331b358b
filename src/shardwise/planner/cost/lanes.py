"""Transfers of a rank during its computation: collectives, copies between device and host, updates on the host, disk.

Every transfer is an operation. It waits in a queue (a communicator, one direction of the bus, the host, the disk).
It begins when it is ready and both its predecessors, in the queue and in its chain, are done, and it occupies a wire
for some seconds. A wire is modelled by the time at which it is free again, as on the emulated fabric
(`bench/fabric.py`): operations take it in the order in which they begin; latency overlaps with the next one's bytes.

The bus has a wire for each direction and one for both, because both at once are not twice as fast. A disk reads and
writes in turns. An update of state on disk is one operation of host and disk, which work chunk by chunk in parallel.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ...core.wire.ledger import Call
from ..events import Move
from ..hardware.cluster import Cluster
from ..hardware.gpus import IDEAL, Overheads
from ..hardware.links import plan_transfer

Queue = tuple[str, str]
# Seconds on each named wire, and the latency at the end.
Cost = tuple[tuple[tuple[str, float], ...], float]

COLLECTIVES = ("gather", "reduce")
COPY, DISK, HOST = "copy", "disk", "host"
_LANES = {"to_device": COPY, "to_host": COPY, "read": DISK, "write": DISK}
# Bandwidth of both directions of the bus together, relative to one alone: 38 GB/s each and 54 GB/s, on one H200.
BOTH_WAYS = 1.4


@dataclass(frozen=True, slots=True)
class Span:
    """A named time interval on a lane."""

    lane: str
    name: str
    begin_s: float
    end_s: float


class Op:
    """A queued operation; `end_s` is negative until it has begun."""

    __slots__ = ("before", "cost", "end_s", "name", "queue", "ready_s")

    def __init__(self, queue: Queue, name: str, ready_s: float, before: "Op | None", cost: Cost) -> None:
        self.queue, self.name, self.ready_s, self.before, self.cost = queue, name, ready_s, before, cost
        self.end_s = -1.0


def cost_of(call: Call, cluster: Cluster, wear: Overheads = IDEAL) -> Cost:
    """Cost of a collective on the wires of one rank. A switch that reduces makes all-reduces inside a node faster."""
    fabric, world = cluster.fabric, cluster.world_size
    ranks = range(0, world, max(1, world // call.num_ranks)) if call.axis == "replicate" else range(call.num_ranks)
    num_hops = ranks[-1] // fabric.node_size
    if call.kind == "all_reduce" and cluster.switch is not None and not num_hops:
        fabric = replace(fabric, intra=cluster.switch)
    transfer = plan_transfer(fabric, call.kind, call.num_bytes, ranks, 0)
    wires = tuple((wire, wire_s) for wire, wire_s in transfer.occupied_s.items() if wire_s)
    return wires, transfer.latency_s + num_hops * wear.hop_us * 1e-6


class Lanes:
    """Simulates the operations of one rank in the order in which they begin."""

    def __init__(self, cluster: Cluster, wear: Overheads) -> None:
        self._cluster, self._wear = cluster, wear
        self._queues: dict[Queue, deque[Op]] = {}
        self._queue_free: dict[Queue, float] = {}
        self._wire_free: dict[str, float] = {}
        self._costs: dict[Call, Cost] = {}
        self._busy: list[tuple[float, float]] = []  # intervals of collectives that may overlap with computation
        self.busy_s: dict[str, float] = {}
        self.spans: list[Span] = []

    def start_calls(self, lane: str, name: str, calls: Iterable[Call], ready_s: float, after: Op | None) -> Op | None:
        """Queue collectives one after the other; return the last operation of the chain."""
        for call in calls:
            cost = self._costs.get(call)
            if cost is None:
                cost = self._costs[call] = cost_of(call, self._cluster, self._wear)
            after = self._queue(Op((lane, call.axis), name, ready_s, after, cost))
        return after

    def coding_s(self, num_bytes: int) -> float:
        """Seconds that the device takes to read and write these bytes while it encodes or decodes."""
        return num_bytes / (self._wear.coding * self._cluster.gpu.hbm_bytes_per_s)

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

    def start_update(self, name: str, num_elems: int, moves: Sequence[Move], ready_s: float) -> Op:
        """Queue an update on the host. `moves`: its reads and writes on disk, which run at the same time."""
        host_s = num_elems * self._cluster.node_size / self._cluster.host_adam_elems_per_s
        wires = ((HOST, host_s), *(wire for move in moves for wire in self._wires(move)))
        return self._queue(Op((HOST, HOST), name, ready_s, None, (wires, 0.0)))

    def _queue(self, op: Op) -> Op:
        if op.queue not in self._queues:
            self._queues[op.queue], self._queue_free[op.queue] = deque(), 0.0
        self._queues[op.queue].append(op)
        return op

    def end_of(self, op: Op | None) -> float:
        if op is None:
            return 0.0
        while op.end_s < 0.0:
            self._begin_next(float("inf"))
        return op.end_s

    def run_until(self, instant_s: float) -> bool:
        """Start all operations that begin before the instant; return False if there were none."""
        did = False
        while self._begin_next(instant_s):
            did = True
        return did

    def _begin_next(self, before_s: float) -> bool:
        first: Op | None = None
        begin_s = before_s
        for queue, ops in self._queues.items():
            if ops:
                op = ops[0]
                op_s = max(op.ready_s, self._queue_free[queue])
                if op.before is not None:
                    if op.before.end_s < 0.0:
                        continue
                    op_s = max(op_s, op.before.end_s)
                # If two begin at the same time, the gather is first: the engine queues it first.
                if op_s < begin_s or (op_s == begin_s and queue[0] == "gather" and first is not None):
                    first, begin_s = op, op_s
        if first is None:
            return False
        begun_s = done_s = begin_s
        lane = first.queue[0]
        wires, latency_s = first.cost
        for wire, wire_s in wires:
            wire_begin_s = max(begin_s, self._wire_free.get(wire, 0.0))
            free_s = self._wire_free[wire] = wire_begin_s + wire_s
            self.busy_s[wire] = self.busy_s.get(wire, 0.0) + wire_s
            if free_s > done_s:
                begun_s, done_s = wire_begin_s, free_s
            if wire == DISK != lane:
                self.spans.append(Span(DISK, first.name, wire_begin_s, free_s))
        first.end_s = self._queue_free[first.queue] = done_s + latency_s
        self._queues[first.queue].popleft()
        if self._wear.contention != 1.0 and lane in COLLECTIVES and wires:
            self._busy.append((begun_s, first.end_s))
            self._busy.sort()
        self.spans.append(Span(lane, first.name, begun_s, first.end_s))
        return True

    def computed(self, begin_s: float, work_s: float) -> float:
        """Return the end of work that starts at `begin_s`, slowed down while collectives run."""
        if self._wear.contention == 1.0:
            return begin_s + work_s
        end_s = self._stretched(begin_s, work_s)
        while self.run_until(end_s):
            end_s = self._stretched(begin_s, work_s)
        self._busy = [span for span in self._busy if span[1] > end_s]
        return end_s

    def _stretched(self, begin_s: float, work_s: float) -> float:
        slow = self._wear.contention
        now_s, left_s = begin_s, work_s
        for begun_s, ended_s in self._busy:
            if ended_s <= now_s:
                continue
            if begun_s > now_s:
                if now_s + left_s <= begun_s:
                    break
                left_s -= begun_s - now_s
                now_s = begun_s
            if now_s + left_s * slow <= ended_s:
                return now_s + left_s * slow
            left_s -= (ended_s - now_s) / slow
            now_s = ended_s
        return now_s + left_s
