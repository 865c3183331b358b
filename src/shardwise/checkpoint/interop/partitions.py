"""DeepSpeed's flat groups: where each parameter lies in the rows that its ranks wrote.

Stages 1 and 2 make one row of every group of the optimizer, parameter after parameter, and cut it into one part for
each rank. Stage 3 cuts every parameter for itself, and a rank's row is its parts, one after the other. The masters and
what the optimizer keeps lie alike in their rows, so a parameter is described once, by its spans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ...base.errors import CheckpointError
from ...base.intervals import Interval
from ..index import Piece, Stored, parts_of

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Span:
    """Elements of a parameter in the row of a rank, from its element `start` on."""

    rank: int
    start: int
    num_elems: int


def gathered(name: str, shape: tuple[int, ...], spans: Sequence[Span], rows: Sequence[Stored]) -> Stored:
    """A parameter, or something shaped like it, out of the rows of all ranks."""
    pieces: list[Piece] = []
    end = 0
    for span in spans:
        row = rows[span.rank]
        if span.start + span.num_elems > row.num_elems:
            raise CheckpointError(
                f"{name!r} should reach to element {span.start + span.num_elems} of what rank {span.rank} wrote, which "
                f"has {row.num_elems}"
            )
        size = row.torch_dtype.itemsize
        for part in parts_of(row, Interval(span.start, span.start + span.num_elems)):
            start = end + part.at
            pieces.append(Piece(part.piece.file, part.piece.offset + part.first * size, start, start + part.num_elems))
        end += span.num_elems
    if end != prod(shape):
        raise CheckpointError(f"{name!r} has {prod(shape)} elements, and {end} of them were written")
    return Stored(shape, rows[0].dtype, tuple(pieces))


def spans_of_group(shapes: Shapes, paddings: Sequence[int], lengths: Sequence[int]) -> dict[str, list[Span]]:
    """Stages 1 and 2: a group's parameters, each with so much padding behind it; `lengths` of the ranks' parts."""
    if len(paddings) != len(shapes):
        raise CheckpointError(f"a group of {len(shapes)} parameters has {len(paddings)} paddings")
    found: dict[str, list[Span]] = {}
    begin = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        wanted, left, found[name] = Interval(begin, begin + prod(shape)), 0, []
        for rank, length in enumerate(lengths):
            common = wanted.overlap(Interval(left, left + length))
            if common.num_elems:
                found[name].append(Span(rank, common.start - left, common.num_elems))
            left += length
        begin = wanted.stop + padding
    return found


def spans_of_parameters(shapes: Shapes, num_ranks: int) -> dict[str, list[Span]]:
    """Stage 3: every parameter in equal parts, of which the last ones are filled up."""
    found: dict[str, list[Span]] = {}
    begin = 0
    for name, shape in shapes.items():
        num_elems = prod(shape)
        length = -(-num_elems // num_ranks)
        shares = [min(length, max(0, num_elems - rank * length)) for rank in range(num_ranks)]
        found[name] = [Span(rank, begin, share) for rank, share in enumerate(shares) if share]
        begin += length
    return found
