"""A model as the plan sees it: parameters with their names and sizes, and the units they travel in.

Units of a real module are found in `units.py`; those of a model that is only a shape are made in `shapes/shape.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from ..dtypes import DType

ROOT = "root"


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
    """A parameter by its first name. `sites` are all places it is used under, tied weights have several. `is_table`:
    one of them looks rows up in it. `optimizer`: the number of the one that updates it."""

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
class FoundUnit:
    """`path` is the module's path in the model; `holds_units` says that other units lie inside it.

    `backward_reads` is False where a backward computes gradients without the weights: plain embeddings.
    """

    name: str
    path: str
    params: tuple[Param, ...]
    holds_units: bool
    backward_reads: bool


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a module's path, or the path of a module around it, matches one of the patterns."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1) for pattern in patterns)
