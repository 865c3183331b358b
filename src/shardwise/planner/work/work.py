"""Memory, matrix products and memory traffic of a unit in one micro-batch, and the scratch memory of GPU kernels.

Scratch memory of attention: the backward sums the gradient of the queries in fp32. If several heads share keys and
values, it first computes their gradients for each head, then adds them up. torch's flash attention and cuDNN's do so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ...base.intervals import round_up

Kind = Literal["activations", "loss"]


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product of the forward, (m x k) @ (k x n), `count` times.

    The backward has two more products of this size, or only one if the weight is frozen (not `trainable`).
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
    """Memory and arithmetic of a unit. A peak is relative to the memory in use when that forward or backward began.

    A forward begins with its input alive, and ends with `saved_bytes` (including its input, if saved) and its output.
    A backward begins with `saved_bytes` and the gradient of its output alive, and ends with the gradient of its input
    and `grad_bytes`: gradients of weights that autograd allocated and that are not yet reduced.
    """

    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    output_bytes: int
    grad_bytes: int = 0
    products: tuple[Product, ...] = ()
    attention_flops: float = 0.0
    # Memory traffic of the forward and of the backward (with its recompute), without products and attention.
    moved_bytes: float = 0.0
    backward_moved_bytes: float = 0.0
    num_kernels: int = 0
    # If gradients of weights are computed at the end of the backward: its peak until then, and the bytes that they are
    # computed from, which are alive at the end. 0: unknown.
    late_peak_bytes: int = 0
    late_bytes: int = 0
    # The share of the forward's FLOP (products and attention) that the backward recomputes, and of attention's alone.
    recomputed: float = 0.0
    recomputed_attention: float = 0.0
    kind: Kind = "activations"

    @property
    def flops(self) -> float:
        """FLOP of the forward."""
        return sum(product.flops for product in self.products) + self.attention_flops


ROUND_BYTES = 512


def rounded(num_bytes: int) -> int:
    """Round up like torch's GPU allocator."""
    return round_up(num_bytes, ROUND_BYTES)


class Meter:
    """Counts live bytes and their peak, products and traffic while a unit runs forward and then backward."""

    def __init__(self) -> None:
        self.live = self.peak = self.before = self.num_kernels = 0
        self.products: list[Product] = []
        self.attention_flops = self.moved_bytes = 0.0

    def take(self, num_bytes: int) -> None:
        self.live += num_bytes
        self.peak = max(self.peak, self.live)

    def begin(self) -> None:
        """Begin a forward or a backward: its peak is relative to the bytes that are live now."""
        self.before = self.peak = self.live

    def end_forward(self, output_bytes: int, kind: Kind = "activations") -> Work:
        """Return the work of the forward. From here on, products count as recomputed, and traffic as the backward's."""
        work = Work(
            self.live - output_bytes, self.peak - self.before, 0, output_bytes, 0, tuple(self.products),
            self.attention_flops, self.moved_bytes, num_kernels=self.num_kernels, kind=kind,
        )  # fmt: skip
        self.products, self.attention_flops, self.moved_bytes = [], 0.0, 0.0
        return work

    def end_backward(self, forward: Work, grad_bytes: int) -> Work:
        flops = sum(product.flops for product in self.products) + self.attention_flops
        recomputed = flops / forward.flops if forward.flops else 0.0
        attention = self.attention_flops / forward.attention_flops if forward.attention_flops else 0.0
        return replace(
            forward, backward_peak_bytes=self.peak - self.before, grad_bytes=grad_bytes, recomputed=recomputed,
            recomputed_attention=attention, backward_moved_bytes=self.moved_bytes,
        )  # fmt: skip


def chain(works: Sequence[Work], input_bytes: int = 0) -> Work:
    """Return the work of blocks that run one after the other. `input_bytes`: the input of the first one."""
    if len(works) == 1:
        return works[0]
    forward_peak = backward_peak = saved = grads = 0
    before = input_bytes
    for work in works:
        forward_peak = max(forward_peak, saved + before + work.forward_peak_bytes)
        saved += work.saved_bytes
        before = work.output_bytes
    total = saved
    for work in reversed(works):
        backward_peak = max(backward_peak, saved + work.output_bytes + grads + work.backward_peak_bytes)
        saved -= work.saved_bytes
        grads += work.grad_bytes
    last = works[-1]
    flops, attention_flops = sum(work.flops for work in works), sum(work.attention_flops for work in works)
    attention_again = sum(work.recomputed_attention * work.attention_flops for work in works)
    return replace(
        last,
        saved_bytes=total,
        forward_peak_bytes=forward_peak - input_bytes,
        backward_peak_bytes=backward_peak - total - last.output_bytes,
        grad_bytes=grads,
        products=tuple(product for work in works for product in work.products),
        attention_flops=attention_flops,
        moved_bytes=sum(work.moved_bytes for work in works),
        backward_moved_bytes=sum(work.backward_moved_bytes for work in works),
        num_kernels=sum(work.num_kernels for work in works),
        recomputed=sum(work.recomputed * work.flops for work in works) / flops if flops else 0.0,
        recomputed_attention=attention_again / attention_flops if attention_flops else 0.0,
    )


_ROW_MULTIPLE = 128  # attention kernels pad sequences to a multiple of this
# Up to this number of tokens, one kernel accumulates the gradients of an embedding in place.
_FEW_TOKENS = 3072


@dataclass(frozen=True, slots=True)
class AttentionShape:
    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int

    @property
    def flops(self) -> float:
        """FLOP of a causal forward: two products, of which the kernel skips the masked half."""
        return 2.0 * self.batch * self.heads * self.seq * self.seq * self.head_dim

    @property
    def kernel(self) -> Literal["flash", "efficient", "math"]:
        """The kernel that torch chooses on a GPU for causal attention without a mask: `flash` is torch's and cuDNN's,
        `efficient` is torch's for fp32, `math` is unfused, with all scores in memory."""
        if self.itemsize == 2:
            return "flash"
        return "efficient" if self.heads == self.kv_heads else "math"

    @property
    def scratch_bytes(self) -> int:
        if self.kernel == "efficient":
            return 4 * self.batch * self.seq * self.heads
        width = round_up(self.head_dim, 32 if self.head_dim <= 128 else 64)
        row_sum_bytes = 4 * self.batch * round_up(self.seq, _ROW_MULTIPLE) * self.heads
        expanded = 2 * self.itemsize * self.batch * self.seq * self.heads * self.head_dim
        return row_sum_bytes * (width + 1) + (expanded if self.heads != self.kv_heads else 0)


def embedding_scratch_bytes(num_tokens: int, num_rows: int, width: int) -> int:
    """Scratch memory of an embedding's backward, which sorts tokens and sums up to 10 gradients at a time in fp32."""
    if num_tokens <= _FEW_TOKENS:
        return 0
    num_sums = min(num_tokens, num_rows) + num_tokens // 10
    return 6 * 8 * num_tokens + 4 * width * num_sums
