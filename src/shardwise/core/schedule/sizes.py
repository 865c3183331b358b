"""How much room pieces need that lie in a row, each where O_DIRECT can reach it. Pure: the planner asks too."""

from collections.abc import Iterable

from ...base.direct_io import ALIGNMENT
from ...base.intervals import round_up


def arena_bytes(sizes: Iterable[int]) -> int:
    """What an `Arena` needs for pieces of so many bytes."""
    return sum(round_up(size, ALIGNMENT) for size in sizes)


def disk_bytes(sizes: Iterable[int]) -> int:
    """What a `Disk` needs for regions of so many bytes."""
    return sum(round_up(size, ALIGNMENT) for size in sizes)
