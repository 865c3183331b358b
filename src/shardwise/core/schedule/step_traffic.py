"""Bytes that one rank moves in a step: by axis (as the ledger counts them), inside and between nodes, to and from the
host, and from and to disk.

Bytes between nodes are those that have to cross a node's border: every element that the node lacks comes in once, and
its ranks share the work. The rest of the ledger's bytes stays inside. A ring through all ranks may carry more across
the border; predicted seconds (`planner/cost/step_time.py`) are those of the ring.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from ..wire.ledger import SHARE_OF_BUFFER, Call, Traffic, add_up
from .events import Event, Way


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Bytes of one rank. `by_call` are its collectives by axis; the last four are the moves of `events.Way`."""

    by_call: Traffic
    intra_node: float
    inter_node: float
    to_device: int
    to_host: int
    read: int
    write: int

    def continued(self, fewer: "StepTraffic", num: int) -> "StepTraffic":
        """Add `num` micro-batches; one is the difference between this and `fewer`."""
        before = {(row.axis, row.kind, row.dtype): row for row in fewer.by_call.rows}
        rows = []
        for row in self.by_call.rows:
            last = before.get((row.axis, row.kind, row.dtype), replace(row, num_calls=0, wire_bytes=0.0))
            rows.append(
                replace(
                    row,
                    num_calls=row.num_calls + num * (row.num_calls - last.num_calls),
                    wire_bytes=row.wire_bytes + num * (row.wire_bytes - last.wire_bytes),
                )
            )
        names = [entry.name for entry in fields(self) if entry.name != "by_call"]
        amounts = {name: getattr(self, name) + num * (getattr(self, name) - getattr(fewer, name)) for name in names}
        return StepTraffic(Traffic(tuple(rows)), **amounts)

    @property
    def pcie(self) -> int:
        return self.to_device + self.to_host

    @property
    def disk(self) -> int:
        return self.read + self.write


def traffic_of(events: Sequence[Event], num_nodes: int, node_size: int) -> StepTraffic:
    calls = [call for event in events for call in event.calls]
    inter = sum(crossing_bytes(call, num_nodes, node_size) for call in calls)
    moves = [move for event in events for move in event.moves]

    def moved(way: Way) -> int:
        return sum(move.num_bytes for move in moves if move.way == way)

    by_call = add_up(calls)
    return StepTraffic(
        by_call, by_call.wire_bytes - inter, inter, moved("to_device"), moved("to_host"), moved("read"), moved("write")
    )


def crossing_bytes(call: Call, num_nodes: int, node_size: int) -> float:
    """Bytes of a collective that one rank has to take across its node's border."""
    if call.axis == "node" or num_nodes == 1:
        return 0.0
    if call.axis == "replicate":
        return call.wire_bytes
    return SHARE_OF_BUFFER[call.kind] * call.num_bytes * (num_nodes - 1) / num_nodes / node_size
