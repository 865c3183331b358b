"""A model as a list of units, and units as lists of parameters with their names and sizes.

`units.py` finds the units of a real module; `planner/shapes/shape.py` makes those of a model that is only a shape.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from ...base.dtypes import DType

ROOT = "root"

# A block of more elements than this is cut into its parts. Two gather slots in 16 bits and two reduction slots in fp32
# take 12 bytes per element: 48 GB of an 80 GB device. The blocks of dense models are smaller (Llama 3.1 405B: 3.2e9).
LARGE_BLOCK = 4 * 10**9
# A part of a cut block, or a module outside the blocks, of this many elements is a unit: 64 MiB in 16 bits, which a
# collective moves at full speed. Smaller ones join the unit around them, which is gathered until its backward ends.
LARGE_PART = 32 << 20


@dataclass(frozen=True, slots=True)
class Site:
    """A place where a parameter is registered: the module's path and the attribute."""

    module: str
    attribute: str

    @property
    def name(self) -> str:
        return f"{self.module}.{self.attribute}" if self.module else self.attribute


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter. `sites` are all places where it is registered: tied weights have several. `name` is that of the
    first. `is_table`: one of them is an embedding. `optimizer`: the number of the optimizer that updates it."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    trainable: bool
    sites: tuple[Site, ...]
    is_table: bool = False
    optimizer: int = 0

    @property
    def num_elems(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """One unit. `path` is its module's path in the model; `holds_units` says that other units lie inside it.

    `backward_reads` is False if its backward needs no weights to compute gradients: plain embeddings.
    """

    name: str
    path: str
    params: tuple[Param, ...]
    holds_units: bool
    backward_reads: bool


def matches(name: str, patterns: Sequence[str]) -> bool:
    """True if a module's path, or the path of a module around it, matches one of the patterns."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1) for pattern in patterns)


def least_outside(block_elems: int) -> float:
    """A module outside the blocks is a unit if it has at least this many elements: a large part, or half a block."""
    return min(LARGE_PART, block_elems / 2)


def parts_of(block: str, size: Callable[[str], int], children: Callable[[str], Iterable[str]]) -> list[str]:
    """The paths of a block's parts that become units of their own. Empty if the block stays one unit: it is small
    enough, or too much of it lies outside its large parts.

    `size` counts the elements of a module; `children` are the modules that it calls."""
    if size(block) <= LARGE_BLOCK:
        return []
    parts = [child for child in children(block) if size(child) >= LARGE_PART]
    if size(block) - sum(size(part) for part in parts) >= LARGE_PART:
        return []
    return [path for part in parts for path in parts_of(part, size, children) or [part]]
