"""An update of AdamW or Adam on the host as a value, its factors, and how torch's own operations carry it out.

torch computes the factors in double precision and rounds each once; so do we. `adamw.py` runs the update in C where
there is a compiler, and calls `update_with_torch` where there is none.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam

from ...base.errors import StateError

BLOCK_ELEMS = 256  # elements of an 8-bit moment that share a scale
LEAST_SCALE = 1e-12  # smallest scale of such a block, as in torchao: a block of zeros has a scale, too
CHUNK_ELEMS = 1 << 20  # torch's operations work on this many elements at a time, which stay in the caches
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


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
        """The factor by which AdamW's decay multiplies a weight."""
        return 1 - self.lr * self.weight_decay if self.decoupled else 1.0

    @property
    def into_gradient(self) -> float:
        """The share of a weight that Adam's decay adds to its gradient."""
        return 0.0 if self.decoupled else self.weight_decay

    @property
    def step_size(self) -> float:
        return self.lr / (1 - self.beta1**self.step)

    @property
    def bias_root(self) -> float:
        bias = 1 - self.beta2**self.step
        return math.sqrt(bias) if self.fused else bias**0.5


@dataclass(frozen=True, slots=True)
class Moment8:
    """A moment in 8 bits: each code is an index into `lookup`, 256 ascending values, and each block has a scale. The
    last block may be short."""

    codes: Tensor
    scale: Tensor
    lookup: Tensor


@dataclass(frozen=True, slots=True)
class AdamUpdate:
    """One update of flat tensors of one length. The gradient counts as grad * grad_scale, rounded to its dtype.

    `master` and the moments are updated in place: fp32, or both moments in 8 bits. Then updates and codes are those of
    torchao's AdamW8bit and Adam8bit, which have one order of operations, so `settings.fused` does not matter. `grad`
    is fp32, bf16 or fp16. `out`, of the same dtypes, receives the new weights, rounded to nearest even.
    """

    master: Tensor
    exp_avg: Tensor | Moment8
    exp_avg_sq: Tensor | Moment8
    grad: Tensor
    out: Tensor | None
    settings: AdamSettings
    grad_scale: float

    def check(self) -> None:
        """Refuse tensors whose addresses C would misread."""
        num_elems = self.master.numel()
        _check("master", self.master, num_elems, torch.float32)
        for name, moment in (("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq)):
            if isinstance(moment, Moment8):
                _check(f"{name}_codes", moment.codes, num_elems, torch.uint8)
                _check(f"{name}_scale", moment.scale, -(-num_elems // BLOCK_ELEMS), torch.float32)
                _check(f"{name}_lookup", moment.lookup, 256, torch.float32)
            else:
                _check(name, moment, num_elems, torch.float32)
        _check("grad", self.grad, num_elems, *FLOATS)
        if self.out is not None:
            _check("out", self.out, num_elems, *FLOATS)


def _check(name: str, tensor: Tensor, num_elems: int, *dtypes: torch.dtype) -> None:
    if tensor.device.type != "cpu" or tensor.dtype not in dtypes or tensor.shape != (num_elems,):
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise StateError(
            f"{name} of a host update must be a flat CPU tensor of {num_elems} elements of {wanted}, but is "
            f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
        )
    if not tensor.is_contiguous():
        raise StateError(f"{name} of a host update must be contiguous, but has stride {tensor.stride(0)}; copy it")


@torch.no_grad()
def update_with_torch(update: AdamUpdate) -> None:
    """Run an update with torch's operations, chunk by chunk, so that no second copy of anything is made. They use
    torch's own number of threads."""
    for begin in range(0, update.master.numel(), CHUNK_ELEMS):
        part = slice(begin, begin + CHUNK_ELEMS)
        if isinstance(update.exp_avg, Moment8):
            _update_chunk8(update, part)
        else:
            _update_chunk(update, part)
        if update.out is not None:
            update.out[part].copy_(update.master[part])


def _update_chunk(update: AdamUpdate, part: slice) -> None:
    settings, exp_avg, exp_avg_sq = update.settings, update.exp_avg, update.exp_avg_sq
    assert isinstance(exp_avg, Tensor)
    assert isinstance(exp_avg_sq, Tensor)
    adam(
        [update.master[part]],
        [(update.grad[part] * update.grad_scale).float()],
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


def _update_chunk8(update: AdamUpdate, part: slice) -> None:
    settings = update.settings
    lr, step = (torch.tensor(value, dtype=torch.float32) for value in (settings.lr, settings.step))
    bias1, bias2 = 1 - settings.beta1**step, 1 - settings.beta2**step
    sign = -1.0 if settings.maximize else 1.0
    weight, gradient = update.master[part], (update.grad[part] * (sign * update.grad_scale)).float()
    if settings.decoupled:
        weight.sub_(lr * settings.weight_decay * weight)
    else:
        gradient += settings.weight_decay * weight
    mean = _moved(update.exp_avg, part, gradient, 1 - settings.beta1)
    square = _moved(update.exp_avg_sq, part, gradient.square(), 1 - settings.beta2)
    weight.sub_(lr * (mean / bias1) / (square.sqrt() / bias2.sqrt() + settings.eps))


def _moved(moment: Tensor | Moment8, part: slice, end: Tensor, weight: float) -> Tensor:
    """Move a part of a moment towards `end`, in the order of operations of torchao's compiled update; store its codes
    and return its values."""
    assert isinstance(moment, Moment8)
    codes, scale = moment.codes[part], moment.scale[part.start // BLOCK_ELEMS : part.stop // BLOCK_ELEMS]
    start = moment.lookup[codes.int()] * scale.repeat_interleave(BLOCK_ELEMS)[: codes.numel()]
    is_near = abs(weight) < 0.5
    moved = start + (end - start) * weight if is_near else end + (end - start) * -(1.0 - weight)
    _encode(moved, codes, scale, moment.lookup)
    return moved


def _encode(values: Tensor, codes: Tensor, scale: Tensor, lookup: Tensor) -> None:
    """Write codes and scales of `values`. Ties go up, as torchao's do."""
    num_padding = scale.numel() * BLOCK_ELEMS - values.numel()
    blocks = torch.nn.functional.pad(values, (0, num_padding)).view(-1, BLOCK_ELEMS)
    scale.copy_(blocks.abs().amax(-1).clamp(min=LEAST_SCALE))
    scaled = (blocks / scale.view(-1, 1)).flatten()[: values.numel()]
    below = (torch.searchsorted(lookup, scaled, right=True) - 1).clamp(min=0)
    above = (below + 1).clamp(max=lookup.numel() - 1)
    is_up = scaled - lookup[below] >= (lookup[above] - lookup[below]) * 0.5
    codes.copy_(torch.where(is_up, above, below))
