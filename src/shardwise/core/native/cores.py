"""The processors on which a rank's host updates run: the ranks of one machine share them fairly.

Shares differ by one processor at most. They are contiguous in an order that keeps NUMA nodes together, and within them
the threads of a core. Therefore few ranks share a core or the memory bus of a NUMA node. A container's quota of
processor time limits the number of threads: with more of them, the kernel would pause the process.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from ...base.processes import cpu_limit

SYSTEM = Path("/sys/devices/system")


def cores_for(local_rank: int, num_local_ranks: int) -> tuple[int, ...]:
    """The kernel's ids of the processors of rank `local_rank` of `num_local_ranks` on this machine: at least one.

    The processors that this process may run on are shared. If a launcher has bound every rank to processors of its own,
    call `cores_for(0, 1)`.
    """
    ordered = sort_by_locality(os.sched_getaffinity(0), SYSTEM)
    return share(ordered, cpu_limit(), local_rank, num_local_ranks)


def share(ordered: tuple[int, ...], quota: float | None, local_rank: int, num_local_ranks: int) -> tuple[int, ...]:
    """The part of `ordered` that belongs to one rank. With more ranks than processors, ranks share processors."""
    num_cores = len(ordered)
    if num_local_ranks >= num_cores:
        return (ordered[local_rank % num_cores],)
    begin, end = (num_cores * rank // num_local_ranks for rank in (local_rank, local_rank + 1))
    allowed = num_cores if quota is None else max(1, int(quota) // num_local_ranks)
    return ordered[begin:end][:allowed]


def sort_by_locality(ids: Iterable[int], system: Path) -> tuple[int, ...]:
    """The processors sorted by NUMA node, then by core."""
    nodes = {
        processor: int(folder.name.removeprefix("node"))
        for folder in system.glob("node/node[0-9]*")
        for processor in listed((folder / "cpulist").read_text())
    }

    def place(processor: int) -> tuple[int, int, int]:
        siblings = system / f"cpu/cpu{processor}/topology/thread_siblings_list"
        core = min(listed(siblings.read_text()), default=processor) if siblings.is_file() else processor
        return nodes.get(processor, 0), core, processor

    return tuple(sorted(ids, key=place))


def listed(text: str) -> set[int]:
    """Parse a list of numbers in the kernel's format, such as 0-3,8."""
    spans = (span.partition("-") for span in text.strip().split(",") if span)
    return {number for first, _, last in spans for number in range(int(first), int(last or first) + 1)}
