"""What an update needs to know beside its tensors, and the factors that follow from it.

torch computes these factors in double precision and rounds each once; so do we.
"""

import math
from dataclasses import dataclass

BLOCK_ELEMS = 256  # of 8-bit state that share a scale
LEAST_SCALE = 1e-12  # of such a block, as torchao has it: a block of zeros has a scale too


@dataclass(frozen=True, slots=True)
class AdamSettings:
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool  # AdamW; otherwise Adam, whose decay goes into the gradient
    maximize: bool
    fused: bool  # the order of operations of torch's fused=True, otherwise that of its loop (foreach=False)
    step: int  # 1 for the first update

    @property
    def kept(self) -> float:
        """What AdamW's decay leaves of a weight."""
        return 1 - self.lr * self.weight_decay if self.decoupled else 1.0

    @property
    def into_gradient(self) -> float:
        """How much of a weight Adam's decay adds to its gradient."""
        return 0.0 if self.decoupled else self.weight_decay

    @property
    def step_size(self) -> float:
        return self.lr / (1 - self.beta1**self.step)

    @property
    def bias_root(self) -> float:
        bias = 1 - self.beta2**self.step
        return math.sqrt(bias) if self.fused else bias**0.5
