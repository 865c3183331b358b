"""AdamW and Adam for state that rests on the host: each array is read once and written once.

A gradient of 16 or 32 bits comes in, master weights and moments are updated in place, weights in the compute dtype
go out. The work is C, compiled at the first call (`library.py`), outside the GIL and on the threads of `Cores`; results
are those of `torch.optim.AdamW` on the same processor, bit for bit. Without a compiler torch's own operations do it.
"""

import torch
from torch import Tensor

from ...base.errors import StateError
from . import compiled, torch_adamw
from .adamw_settings import BLOCK_ELEMS, AdamSettings
from .cores import Cores
from .library import library

__all__ = ["AdamSettings", "Cores", "adamw", "adamw8", "cast", "is_compiled"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def is_compiled() -> bool:
    """Whether the one-pass update runs here. The first call may compile it, which takes seconds."""
    return library() is not None


def adamw(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    out: Tensor | None,
    settings: AdamSettings,
    grad_scale: float,
    cores: Cores,
) -> None:
    """One update of flat tensors of one length. The gradient counts as grad * grad_scale, rounded to its dtype.

    master, exp_avg, exp_avg_sq: fp32, updated in place. grad: fp32, bf16 or fp16. out: the same, or None; it gets the
    new weights, rounded to nearest even.
    """
    num_elems = master.numel()
    _check("master", master, num_elems, torch.float32)
    _check("exp_avg", exp_avg, num_elems, torch.float32)
    _check("exp_avg_sq", exp_avg_sq, num_elems, torch.float32)
    _check("grad", grad, num_elems, *FLOATS)
    if out is not None:
        _check("out", out, num_elems, *FLOATS)
    arrays = (master, exp_avg, exp_avg_sq, grad, out)
    if (loaded := library()) is not None:
        compiled.adamw(loaded, *arrays, settings, grad_scale, cores)
    else:
        torch_adamw.adamw(*arrays, settings, grad_scale)


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
    cores: Cores,
) -> None:
    """The same with moments of 8 bits: codes in blocks of 256 that share a scale, values from ascending maps of 256.

    Updates and codes are those of torchao's AdamW8bit and Adam8bit, whose order of operations is one, whatever
    `settings.fused` says. The last block may be short.
    """
    num_elems = master.numel()
    num_blocks = -(-num_elems // BLOCK_ELEMS)
    _check("master", master, num_elems, torch.float32)
    _check("exp_avg_codes", exp_avg_codes, num_elems, torch.uint8)
    _check("exp_avg_sq_codes", exp_avg_sq_codes, num_elems, torch.uint8)
    _check("exp_avg_scale", exp_avg_scale, num_blocks, torch.float32)
    _check("exp_avg_sq_scale", exp_avg_sq_scale, num_blocks, torch.float32)
    _check("signed_map", signed_map, 256, torch.float32)
    _check("unsigned_map", unsigned_map, 256, torch.float32)
    _check("grad", grad, num_elems, *FLOATS)
    if out is not None:
        _check("out", out, num_elems, *FLOATS)
    moments = (exp_avg_codes, exp_avg_scale, exp_avg_sq_codes, exp_avg_sq_scale, signed_map, unsigned_map)
    if (loaded := library()) is not None:
        compiled.adamw8(loaded, master, *moments, grad, out, settings, grad_scale, cores)
    else:
        torch_adamw.adamw8(master, *moments, grad, out, settings, grad_scale)


def cast(master: Tensor, out: Tensor, cores: Cores) -> None:
    """`out.copy_(master)` on the threads of `cores`."""
    _check("master", master, master.numel(), torch.float32)
    _check("out", out, master.numel(), *FLOATS)
    if (loaded := library()) is not None:
        compiled.cast(loaded, master, out, cores)
    else:
        out.copy_(master)


def _check(name: str, tensor: Tensor, num_elems: int, *dtypes: torch.dtype) -> None:
    """What C is given an address of must be what C takes it for."""
    if tensor.device.type != "cpu" or tensor.dtype not in dtypes or tensor.shape != (num_elems,):
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise StateError(
            f"{name} of a host update must be a flat CPU tensor of {num_elems} elements of {wanted}, but is "
            f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
        )
    if not tensor.is_contiguous():
        raise StateError(f"{name} of a host update must be contiguous, but has stride {tensor.stride(0)}; copy it")
