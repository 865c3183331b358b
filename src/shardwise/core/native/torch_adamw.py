"""The same updates by torch's own operations, for machines without a C compiler. A chunk at a time, so that what is
cast stays in the caches and no second copy of anything is made. torch's own number of threads counts here."""

import torch
from torch import Tensor
from torch.optim.adam import adam

from .adamw_settings import BLOCK_ELEMS, LEAST_SCALE, AdamSettings

CHUNK_ELEMS = 1 << 20


@torch.no_grad()
def adamw(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    out: Tensor | None,
    settings: AdamSettings,
    grad_scale: float,
) -> None:
    for begin in range(0, master.numel(), CHUNK_ELEMS):
        part = slice(begin, begin + CHUNK_ELEMS)
        adam(
            [master[part]],
            [(grad[part] * grad_scale).float()],
            [exp_avg[part]],
            [exp_avg_sq[part]],
            [],
            [torch.tensor(float(settings.step - 1))],
            foreach=False,
            fused=settings.fused,
            amsgrad=False,
            beta1=settings.beta1,
            beta2=settings.beta2,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            eps=settings.eps,
            maximize=settings.maximize,
            decoupled_weight_decay=settings.decoupled,
        )
        if out is not None:
            out[part].copy_(master[part])


@torch.no_grad()
def adamw8(
    master: Tensor,
    exp_avg_codes: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq_codes: Tensor,
    exp_avg_sq_scale: Tensor,
    signed_map: Tensor,
    unsigned_map: Tensor,
    grad: Tensor,
    out: Tensor | None,
    settings: AdamSettings,
    grad_scale: float,
) -> None:
    lr, step = (torch.tensor(value, dtype=torch.float32) for value in (settings.lr, settings.step))
    bias1, bias2 = 1 - settings.beta1**step, 1 - settings.beta2**step
    sign = -1.0 if settings.maximize else 1.0
    for begin in range(0, master.numel(), CHUNK_ELEMS):
        part = slice(begin, begin + CHUNK_ELEMS)
        blocks = slice(begin // BLOCK_ELEMS, (begin + CHUNK_ELEMS) // BLOCK_ELEMS)
        weight, gradient = master[part], (grad[part] * (sign * grad_scale)).float()
        if settings.decoupled:
            weight.sub_(lr * settings.weight_decay * weight)
        else:
            gradient += settings.weight_decay * weight
        mean = _decoded(exp_avg_codes[part], exp_avg_scale[blocks], signed_map)
        square = _decoded(exp_avg_sq_codes[part], exp_avg_sq_scale[blocks], unsigned_map)
        mean = _towards(mean, gradient, 1 - settings.beta1)
        square = _towards(square, gradient.square(), 1 - settings.beta2)
        _encode(mean, exp_avg_codes[part], exp_avg_scale[blocks], signed_map)
        _encode(square, exp_avg_sq_codes[part], exp_avg_sq_scale[blocks], unsigned_map)
        weight.sub_(lr * (mean / bias1) / (square.sqrt() / bias2.sqrt() + settings.eps))
        if out is not None:
            out[part].copy_(weight)


def _towards(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """`lerp` in the order of operations that torchao's compiled update has."""
    if abs(weight) < 0.5:
        return start + (end - start) * weight
    return end + (end - start) * -(1.0 - weight)


def _decoded(codes: Tensor, scale: Tensor, lookup: Tensor) -> Tensor:
    return lookup[codes.int()] * scale.repeat_interleave(BLOCK_ELEMS)[: codes.numel()]


def _encode(values: Tensor, codes: Tensor, scale: Tensor, lookup: Tensor) -> None:
    """Writes codes and scales of `values`. Ties go up, as torchao's do."""
    num_padding = scale.numel() * BLOCK_ELEMS - values.numel()
    blocks = torch.nn.functional.pad(values, (0, num_padding)).view(-1, BLOCK_ELEMS)
    scale.copy_(blocks.abs().amax(-1).clamp(min=LEAST_SCALE))
    scaled = (blocks / scale.view(-1, 1)).flatten()[: values.numel()]
    below = (torch.searchsorted(lookup, scaled, right=True) - 1).clamp(min=0)
    above = (below + 1).clamp(max=lookup.numel() - 1)
    is_up = scaled - lookup[below] >= (lookup[above] - lookup[below]) * 0.5
    codes.copy_(torch.where(is_up, above, below))
