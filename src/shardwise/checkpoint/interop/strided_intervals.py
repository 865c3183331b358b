"""Turn tensors with strides, and rectangles of tensors, into intervals of elements at places in files.

A tensor that is contiguous in its file is one piece. Any other is several contiguous runs, which are counted before
they are made.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ...base.errors import CheckpointError
from ..index import DTYPES, NAMES, Piece, Stored
from .known_names import Strided

# A checkpoint with this many runs takes 200 MB of memory, and minutes to read.
MAX_RUNS = 1 << 20


@dataclass(slots=True)
class Budget:
    """The number of runs that a checkpoint may still have."""

    num_left: int = MAX_RUNS

    def spend(self, num_runs: int, what: str) -> None:
        if num_runs > self.num_left:
            raise CheckpointError(
                f"{what} lies in {num_runs} places of its file, of {self.num_left} that are left: save it contiguous"
            )
        self.num_left -= num_runs


def stored_of(tensor: Strided, budget: Budget) -> Stored:
    """Locate the elements of a tensor, in row-major order."""
    if tensor.dtype not in NAMES:
        raise CheckpointError(f"a tensor of {tensor.dtype}, which is not known here: {', '.join(DTYPES)}")
    dims = [(length, step) for length, step in zip(tensor.shape, tensor.stride, strict=True) if length != 1]
    num_elems, run = tensor.num_elems, 1
    if num_elems == 0:
        return Stored(tensor.shape, NAMES[tensor.dtype], ())
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    budget.spend(num_elems // run, f"a tensor of shape {tensor.shape} and strides {tensor.stride}")
    size = tensor.dtype.itemsize
    begin = tensor.storage.offset + tensor.first * size
    pieces = (
        Piece(tensor.storage.file, begin + place * size, number * run, (number + 1) * run)
        for number, place in enumerate(_places(dims))
    )
    return Stored(tensor.shape, NAMES[tensor.dtype], tuple(pieces))


def _places(dims: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Yield the offset of each element of these dimensions (length, stride), in row-major order."""
    if not dims:
        yield 0
        return
    (length, step), inner = dims[0], dims[1:]
    for index in range(length):
        for place in _places(inner):
            yield index * step + place


def place(chunk: Stored, offsets: tuple[int, ...], shape: tuple[int, ...], budget: Budget) -> list[Piece]:
    """Return the pieces of a whole tensor that a rectangle of it covers, whose first element is at `offsets`."""
    if len(chunk.shape) != len(shape) or any(
        at + length > whole for at, length, whole in zip(offsets, chunk.shape, shape, strict=True)
    ):
        raise CheckpointError(f"a part of shape {chunk.shape} at {offsets} does not lie in a tensor of shape {shape}")
    if chunk.num_elems == 0:
        return []
    steps = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    begin = sum(at * step for at, step in zip(offsets, steps, strict=True))
    dims = [(length, step) for length, step in zip(chunk.shape, steps, strict=True) if length != 1]
    run = 1
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    budget.spend(chunk.num_elems // run + len(chunk.pieces), f"a part of shape {chunk.shape} of a tensor {shape}")
    return list(_cut(chunk, run, (begin + place for place in _places(dims))))


def _cut(chunk: Stored, run: int, starts: Iterator[int]) -> Iterator[Piece]:
    """Cut the pieces of a chunk where a run ends, each at its place in the whole tensor."""
    size = chunk.torch_dtype.itemsize
    pieces = iter(chunk.pieces)
    piece = next(pieces)
    for number, start in enumerate(starts):
        at, end = number * run, (number + 1) * run
        while at < end:
            while piece.stop <= at:
                piece = next(pieces)
            stop = min(end, piece.stop)
            first = start + at - number * run
            yield Piece(piece.file, piece.offset + (at - piece.start) * size, first, first + stop - at)
            at = stop
