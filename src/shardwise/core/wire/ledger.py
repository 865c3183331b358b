"""The ledger of every byte that leaves a rank: by kind of collective, axis and dtype.

`wire_bytes` are the least that one rank must send (and receive) in a collective: (N-1)/N of the buffer for a gather or
a reduce-scatter over N ranks, twice that for an all-reduce. Axes of one rank move nothing and are not counted.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from ...base.dtypes import DTypeLike, dtype_of
from .codec import Codec

Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]

SHARE_OF_BUFFER: dict[Kind, int] = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


@dataclass(frozen=True, slots=True, order=True)
class Call:
    """One collective: `num_bytes` is the size of the whole buffer, over an axis of `num_ranks`."""

    kind: Kind
    axis: str
    dtype: str
    num_bytes: int
    num_ranks: int

    @property
    def wire_bytes(self) -> float:
        return SHARE_OF_BUFFER[self.kind] * self.num_bytes * (self.num_ranks - 1) / self.num_ranks


@cache
def describe_call(
    kind: Kind, axis: str, num_ranks: int, num_elems: int, dtype: DTypeLike, codec: Codec | None = None
) -> Call:
    """Describe a collective. Rows of encoded values are counted under the name of their codec. Equal calls are one
    object, so that comparing them takes no time."""
    known = dtype_of(dtype)
    return Call(kind, axis, known.name if codec is None else str(codec), num_elems * known.itemsize, num_ranks)


@dataclass(frozen=True, slots=True, order=True)
class Row:
    """The calls of one kind over one axis in one dtype, added up."""

    axis: str
    kind: Kind
    dtype: str
    num_calls: int
    wire_bytes: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank moved in one step: between ranks, and (`moves`, by direction) between its own memories."""

    rows: tuple[Row, ...]
    moves: Mapping[str, int] = field(default_factory=dict)

    @property
    def wire_bytes(self) -> float:
        return sum(row.wire_bytes for row in self.rows)

    @property
    def num_calls(self) -> int:
        return sum(row.num_calls for row in self.rows)

    def __str__(self) -> str:
        if not self.rows and not self.moves:
            return "nothing moved"
        cells = [("axis", "collective", "dtype", "calls", "MB")]
        cells += [
            (row.axis, row.kind, row.dtype, str(row.num_calls), f"{row.wire_bytes / 1e6:.3f}") for row in self.rows
        ]
        cells += [("", way.replace("_", " "), "", "", f"{size / 1e6:.3f}") for way, size in self.moves.items()]
        return "\n".join("{:<10} {:<15} {:<9} {:>5} {:>11}".format(*row) for row in cells)


def add_up(calls: Iterable[Call]) -> Traffic:
    by_row = defaultdict[tuple[str, Kind, str], list[float]](list)
    for call in calls:
        by_row[call.axis, call.kind, call.dtype].append(call.wire_bytes)
    return Traffic(tuple(sorted(Row(*key, len(sizes), sum(sizes)) for key, sizes in by_row.items())))


class Ledger:
    """The calls of the current step, and those of the last complete one."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.last_step: list[Call] | None = None

    def close_step(self) -> None:
        self.last_step = self.calls
        self.calls = []

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count the collectives in this context: they do not belong to a training step."""
        num_calls = len(self.calls)
        try:
            yield
        finally:
            del self.calls[num_calls:]

    def traffic(self) -> Traffic:
        """The traffic of the last complete step; before the first one, that of all calls so far."""
        return add_up(self.calls if self.last_step is None else self.last_step)
