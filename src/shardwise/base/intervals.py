"""Interval arithmetic: where a parameter lies in a flat buffer, and which part of it a rank holds.

Everything here counts elements. The engine, the planner and the checkpoints use it, so that they cannot disagree.

A flat buffer is a row of parameters. Each starts at a multiple of `BLOCK_ELEMS` (or of a codec's larger block). The row
is padded so that it divides into equal shards, whose length is also a multiple of the block. So no shard boundary ever
cuts a quantisation block, and a block holds elements of one parameter only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

BLOCK_ELEMS = 256


@dataclass(frozen=True, slots=True, order=True)
class Interval:
    """The elements from `start` up to, not including, `stop`."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"not an interval: start {self.start}, stop {self.stop}")

    @property
    def num_elems(self) -> int:
        return self.stop - self.start

    def overlap(self, other: "Interval") -> "Interval":
        """The common part; empty (and inside `self`) when there is none."""
        start = min(max(self.start, other.start), self.stop)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def within(self, outer: "Interval") -> slice:
        """This interval as a slice of a buffer that holds `outer`."""
        if not (outer.start <= self.start and self.stop <= outer.stop):
            raise ValueError(f"{self} is not inside {outer}")
        return slice(self.start - outer.start, self.stop - outer.start)


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one parameter that a shard holds, as an interval of the flat and as an interval of the parameter."""

    param: int
    in_flat: Interval
    in_param: Interval


def round_up(num_elems: int, multiple: int) -> int:
    return -(-num_elems // multiple) * multiple


def place(sizes: Sequence[int], num_shards: int, block: int = BLOCK_ELEMS) -> tuple[tuple[Interval, ...], int]:
    """Place parameters of these sizes in a row. Return the interval of each, and the padded length of the row."""
    intervals = []
    end = 0
    for size in sizes:
        start = round_up(end, block)
        end = start + size
        intervals.append(Interval(start, end))
    return tuple(intervals), round_up(end, block * num_shards)


def nested_shards(num_elems: int, sizes: Sequence[int], indices: Sequence[int]) -> tuple[Interval, ...]:
    """Return the intervals that a rank holds after 0, 1, 2, ... splits. Entry 0 is the whole row. Split k divides the
    interval into `sizes[k]` shards, and this rank keeps shard number `indices[k]`."""
    spans = [Interval(0, num_elems)]
    for size, index in zip(sizes, indices, strict=True):
        outer = spans[-1]
        length, rest = divmod(outer.num_elems, size)
        if rest:
            raise ValueError(f"{outer.num_elems} elements do not divide into {size} equal shards")
        start = outer.start + index * length
        spans.append(Interval(start, start + length))
    return tuple(spans)


def pieces(params: Sequence[Interval], span: Interval) -> Iterator[Piece]:
    """Yield the parts of parameters that lie in `span`; parameters outside of it are left out."""
    for index, interval in enumerate(params):
        common = interval.overlap(span)
        if common.num_elems:
            yield Piece(index, common, Interval(common.start - interval.start, common.stop - interval.start))


def cuts(params: Sequence[Interval], num_elems: int) -> list[int]:
    """Return the lengths of padding, parameter, padding, parameter, ..., padding, in the order of the flat."""
    lengths, end = [], 0
    for interval in params:
        lengths += [interval.start - end, interval.num_elems]
        end = interval.stop
    return [*lengths, num_elems - end]
