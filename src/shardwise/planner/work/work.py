"""What one micro-batch asks of a unit beside its weights: memory in bytes, products, traffic of device memory."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product of the forward, (m x k) @ (k x n), `count` times.

    Not `trainable`: its weight is frozen and gets no gradient; one that is has two more products in the backward.
    """

    m: int
    n: int
    k: int
    count: int = 1
    trainable: bool = True

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.count


@dataclass(frozen=True, slots=True)
class Work:
    """Peaks are what lives at most beyond what lived when the forward, or the backward, began.

    A forward begins with its input alive, and ends with `saved_bytes` (its input with them, if it is kept) and its
    output. A backward begins with `saved_bytes` and the gradient of its output alive, and ends with the gradient of its
    input and `grad_bytes`: gradients of weights that autograd made, and that nobody has fetched yet.
    """

    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    output_bytes: int
    grad_bytes: int = 0
    products: tuple[Product, ...] = ()
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    num_kernels: int = 0
    # The share of the forward, in FLOPs of products and attention, that the backward computes again.
    recomputed: float = 0.0
    kind: Literal["activations", "loss"] = "activations"

    @property
    def flops(self) -> float:
        """Of the forward."""
        return sum(product.flops for product in self.products) + self.attention_flops
