"""The output projection and the cross-entropy in one, a chunk of tokens at a time.

Logits are the largest tensor of a language model: for 16384 tokens and a vocabulary of 128256, 4.2 GB in bf16 and 8.4
GB in fp32. The plain path holds several such tensors at a time when the activations of all blocks are alive, too. Here
only one chunk of the logits exists at a time, in the forward and in the backward.

The gradients of a chunk are computed in the forward, while its logits exist. The alternative, to compute the logits
again in the backward, costs one more product of the size of the head (2 % of a step of an 8B model) and saves no
memory. Here the gradient of the weight is held from the forward to the backward. There it is allocated when the
backward begins, right after the loss, so the peak is the same. Our way needs more only if several forwards come before
one backward: one gradient of the weight for each forward.

All sums are in fp32: logits, losses and gradients. Until the backward, the gradients are those of the summed loss. The
backward scales and rounds them once. So nothing underflows before loss scaling, and the number of chunks changes only
the last bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from ..base.errors import ConfigurationError, did_you_mean
from ..planner.training import LossChunk, tokens_per_chunk

Reduction = Literal["mean", "sum", "none"]


@dataclass(frozen=True, slots=True)
class Chunks:
    """The way of the chunked loss: the size of a chunk, and whether the softmax and its gradient are compiled."""

    size: LossChunk = "small"
    is_compiled: bool = False


USUAL_CHUNKS = Chunks()


# Excluded from compilation, because a compiler could keep several chunks alive. Torch's own functions do the same;
# torch.compiler.disable would import the compiler, which takes as long as torch itself.
@_disable_dynamo
def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk_tokens: int | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    chunks: Chunks = USUAL_CHUNKS,
) -> Tensor:
    """Compute `F.cross_entropy(F.linear(hidden, weight), targets)` in fp32, without all logits in memory.

    hidden (..., hidden), weight (vocab, hidden), targets (...). The mean is over the targets that are not
    `ignore_index`; if there is none, it is NaN with zero gradients, as in torch. For a mean over several batches, use
    `reduction="sum"` and divide by the number of targets in all of them. "none" returns the loss of each target, and 0
    where there is none; its backward computes the logits again. `chunk_tokens` replaces the size of `chunks`.
    """
    if reduction not in get_args(Reduction):
        raise ConfigurationError(f"reduction={reduction!r}: {did_you_mean(reduction, get_args(Reduction))}")
    if hidden.shape[:-1] != targets.shape or hidden.shape[-1] != weight.shape[-1]:
        raise ConfigurationError(
            f"hidden {tuple(hidden.shape)}, targets {tuple(targets.shape)} and weight {tuple(weight.shape)} do not "
            "belong together: they must be (..., hidden), (...) and (vocab, hidden)"
        )
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden, weight = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (hidden, weight))
    if hidden.dtype != weight.dtype:
        raise ConfigurationError(f"hidden is {hidden.dtype} and weight {weight.dtype}: cast one of them")
    if chunk_tokens is None:
        chunk_tokens = tokens_per_chunk(weight.shape[0], chunks.size)
    elif chunk_tokens < 1:
        raise ConfigurationError(f"chunk_tokens={chunk_tokens}: a chunk holds at least one token")
    wide = torch.promote_types(hidden.dtype, torch.float32)
    shape = targets.shape
    num_targets = (targets != ignore_index).sum().to(wide) if reduction == "mean" else hidden.new_ones((), dtype=wide)
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    with torch.autocast(device, enabled=False):
        if reduction == "none":
            each: Tensor = _TokenLosses.apply(  # type: ignore[no-untyped-call]
                hidden, weight, targets, chunk_tokens, ignore_index, chunks.is_compiled
            )
            return each.view(shape)
        if torch.is_grad_enabled():
            return _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
                hidden, weight, targets, num_targets, chunk_tokens, ignore_index, chunks.is_compiled
            )
        total, _, _ = _sums(hidden, weight, targets, chunk_tokens, ignore_index, (False, False), chunks.is_compiled)
        return total / num_targets


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        num_targets: Tensor,
        chunk_tokens: int,
        ignore_index: int,
        is_compiled: bool,
    ) -> Tensor:
        total, grad_hidden, grad_weight = _sums(
            hidden, weight, targets, chunk_tokens, ignore_index, ctx.needs_input_grad[:2], is_compiled
        )
        ctx.dtype = hidden.dtype
        ctx.save_for_backward(grad_hidden, grad_weight, num_targets)
        return total / num_targets

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, num_targets = ctx.saved_tensors
        scale = grad / num_targets.clamp(min=1)
        return _scaled(grad_hidden, scale, ctx.dtype), _scaled(grad_weight, scale, ctx.dtype), *(None,) * 5


class _TokenLosses(torch.autograd.Function):
    """The loss of each token. Its gradients differ from token to token, so they are computed in the backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int, ignore_index: int, compiles: bool
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.asked = (chunk_tokens, ignore_index, compiles)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        if hidden.device.type != "cuda":
            hidden, weight = hidden.to(wide), weight.to(wide)
        losses = targets.new_zeros(targets.shape, dtype=wide)
        for start in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = _product(hidden[rows], weight.t(), wide)
            losses[rows] = logits.logsumexp(1) - logits.gather(1, targets[rows, None].clamp(min=0))[:, 0]
        return losses.masked_fill_(targets == ignore_index, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        chunk_tokens, ignore_index, compiles = ctx.asked
        # The largest factor is 1, so that 16-bit slopes neither overflow nor underflow with loss scaling.
        most = grad.abs().max().clamp(min=torch.finfo(grad.dtype).tiny)
        _, grad_hidden, grad_weight = _sums(
            hidden, weight, targets, chunk_tokens, ignore_index, ctx.needs_input_grad[:2], compiles, grad / most
        )
        return _scaled(grad_hidden, most, hidden.dtype), _scaled(grad_weight, most, hidden.dtype), *(None,) * 4


def _scaled(grad: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Scale in fp32 and round in one pass. Not in place: a retained graph needs the gradient again."""
    return None if grad is None else torch.mul(grad, scale, out=torch.empty_like(grad, dtype=dtype))


def _sums(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_tokens: int,
    ignore_index: int,
    needs: tuple[bool, bool],
    is_compiled: bool,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the summed loss and its gradients for `hidden` and `weight`, in fp32 (fp64 for fp64 inputs). The gradients
    are those of the losses times `factors`, one for each token, if these are given."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if hidden.device.type != "cuda":
        # Only CUDA has a product of 16-bit matrices with an fp32 result.
        hidden, weight = hidden.to(wide), weight.to(wide)
    total = hidden.new_zeros((), dtype=wide)
    grad_hidden = torch.empty_like(hidden, dtype=wide) if needs[0] else None
    grad_weight = torch.zeros_like(weight, dtype=wide) if needs[1] and not len(hidden) else None
    compiled = _compiled_slopes() if is_compiled and any(needs) else None
    for start in range(0, hidden.shape[0], chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        states, is_ignored = hidden[rows], (targets[rows] == ignore_index)[:, None]
        wanted = targets[rows, None].masked_fill(is_ignored, 0)
        # `slopes` is the gradient of the logits: the probabilities, minus one at the target. Ignored tokens are set to
        # zero in the (chunk, hidden) tensors below instead, which are smaller than (chunk, vocab).
        if compiled is not None:
            chosen, slopes = compiled(_product(states, weight.t(), wide), wanted, hidden.dtype)
        else:
            # Two tensors (chunk, vocab) in fp32: the logits are freed when their log-softmax exists.
            scores = F.log_softmax(_product(states, weight.t(), wide), dim=-1)
            chosen = scores.gather(1, wanted)
            if any(needs):
                slopes = scores.exp_().scatter_(1, wanted, chosen.exp().sub_(1)).to(hidden.dtype)
            del scores
        if factors is not None:
            slopes.mul_(factors[rows, None])
        total -= chosen.masked_fill(is_ignored, 0).sum()
        if grad_hidden is not None:
            grad_hidden[rows] = _product(slopes, weight, wide).masked_fill_(is_ignored, 0)
        if needs[1]:
            states = states.masked_fill(is_ignored, 0)
            if grad_weight is None:
                grad_weight = _product(slopes.t(), states, wide)
            else:
                _add_product(grad_weight, slopes.t(), states)
    return total, grad_hidden, grad_weight


@cache
def _compiled_slopes() -> Callable[[Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor]]:
    """Return the compiled function for the log-probabilities of the targets and the gradient of the logits. It reads
    the logits twice and writes the gradient once; eager, a chunk has six such passes over fp32."""

    def slopes_of(logits: Tensor, wanted: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        total = torch.logsumexp(logits, 1, keepdim=True)
        is_wanted = torch.arange(logits.shape[1], device=logits.device)[None] == wanted
        # `gather` refuses a target that is not in the vocabulary.
        return logits.gather(1, wanted) - total, ((logits - total).exp() - is_wanted.to(logits.dtype)).to(dtype)

    return torch.compile(slopes_of)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mm(a, b) if a.dtype == dtype else torch.mm(a, b, out_dtype=dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += a @ b without another tensor of that size."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
