"""What an allocator takes from the driver beyond what it lends out: an estimate with an interval.

Blocks that were freed may not have the sizes that are asked for next. Our engine keeps what it reuses, so little is
lost: on one H200 the median of 119 runs was 0.3 GB (`benchmarks/planner_against_measured.py`), of which the estimate
misses 1 % of the whole. In one run of ten the largest block (a reduction slot, a unit's whole gradients, logits) found
no hole and came on top: the interval has room for most of one. Units that are gathered until the backward and then
given back leave holes among the activations of checkpointed blocks, up to 0.45 of what they hold; gradients of an
earlier micro-batch lie between activations. FSDP2, to compare with, allocates in three streams.
"""

from dataclasses import dataclass

from ...core.schedule.state_bytes import resting_grads
from ...core.schedule.step_schedule import Schedule
from ..training import Training
from .fsdp2 import Fsdp2Memory
from .peak import LOSS, Memory

MB, GIB = 10**6, 1 << 30
# Of the memory of FSDP2's computing stream, in torchtitan's logs (`benchmarks/planner_memory_published.py`).
HOLES = 0.08


@dataclass(frozen=True, slots=True)
class Reserved:
    low: int
    expected: int
    high: int


def reserved_of(schedule: Schedule, memory: Memory, training: Training, is_recomputed: bool) -> Reserved:
    active = memory.peak.total
    if isinstance(memory, Fsdp2Memory):
        return _of_streams(memory)
    returned = sum(unit.gathered_bytes for unit in schedule.units if unit.layout.gathered_until == "backward")
    kept = schedule.reduction_slot_bytes // 2 if training.num_micro_batches > 1 else 0
    holes = returned // (5 if is_recomputed else 30)
    expected = active + min(200 * MB, active // 8) + active // 200 + holes + kept
    more = 150 * MB + active // 100 + returned // 4 + largest_bytes(schedule, memory) * 2 // 3
    return Reserved(active + 20 * MB, expected, expected + more)


def largest_bytes(schedule: Schedule, memory: Memory) -> int:
    """Of the blocks of memory that come and go within a step."""
    whole = [resting_grads(unit.flats) for unit in schedule.units if unit.layout.grads == "whole"]
    loss = max(instant.num_bytes[LOSS] for instant in memory.instants)
    return max(schedule.reduction_slot_bytes, loss // 4, *whole, 0)


def _of_streams(memory: Fsdp2Memory) -> Reserved:
    """Of FSDP2: what a stream has freed, another cannot use, so that their peaks add up; and the computing one leaves
    holes. Before it gives up, the allocator hands back what is free: little more than it lends out has to fit."""
    active, computing, together = memory.peak.total, memory.pools[0], sum(memory.pools)
    return Reserved(active + active // 100, together + round(HOLES * computing), together + computing // 5)
