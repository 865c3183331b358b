"""What decides a tape: the shape of a model, its batch, and how it is run."""

from dataclasses import dataclass

from ..shapes.shape import ModelShape
from .kernels import AttentionShape
from .operations import Habits


@dataclass(frozen=True, slots=True)
class Setting:
    """A block of this shape, in this batch, run in this way."""

    shape: ModelShape
    batch: int
    seq: int
    itemsize: int
    habits: Habits

    @property
    def attention(self) -> AttentionShape:
        shape = self.shape
        return AttentionShape(self.batch, self.seq, shape.heads, shape.kv_heads, shape.head_dim, self.itemsize)
