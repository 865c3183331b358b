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
# take 12 bytes of each: 48 GB of an 80 GB device. Dense models in use have smaller blocks (Llama 3.1 405B: 3.2e9).
LARGE_BLOCK = 4 * 10**9
# A part of a cut block, or a module outside the blocks, of this many elements is a unit: 64 MiB in 16 bits, which a
# collective moves at full speed. What is in no such unit is gathered from the forward to the end of the backward.
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
    """A parameter by its first name. `sites` are all places where it is registered: tied weights have several.
    `is_table`: one of them is an embedding. `optimizer`: the number of the optimizer that updates it."""

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
    """`path` is the module's path in the model; `holds_units` says that other units lie inside it.

    `backward_reads` is False where a backward computes gradients without the weights: plain embeddings.
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
    """The least number of elements with which a module outside the blocks is a unit: a large part, or half a block."""
    return min(LARGE_PART, block_elems / 2)


def parts_of(block: str, size: Callable[[str], int], children: Callable[[str], Iterable[str]]) -> list[str]:
    """The paths of a block's parts that become units instead of the block. Empty if the block is a unit itself: it is
    not too large, or too much of it lies outside its large parts.

    `children` are the modules that a module calls."""
    if size(block) <= LARGE_BLOCK:
        return []
    parts = [child for child in children(block) if size(child) >= LARGE_PART]
    if size(block) - sum(size(part) for part in parts) >= LARGE_PART:
        return []
    return [path for part in parts for path in parts_of(part, size, children) or [part]]
