"""Updates as the C of this folder takes them: its structs, field by field, and what to put into them."""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...base.errors import StateError
from .adamw_settings import LEAST_SCALE, AdamSettings
from .cores import Cores
from .square_root import PROCESSORS_OWN, torch_square_root

DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # 0: none
FUSED_LANES = 8  # what is left of an array when divided by it, torch's fused kernels round in another order
NUM_SPANS = (25 << 7) + 1


def fields(**names_by_type: str) -> list[tuple[str, Any]]:
    """Of a struct, in their order."""
    return [(name, getattr(ctypes, kind)) for kind, names in names_by_type.items() for name in names.split()]


class AdamwJob(ctypes.Structure):
    _fields_ = fields(
        c_void_p="master exp_avg exp_avg_sq grad out roots set_threads",
        c_int64="last",
        c_float="grad_scale kept into_gradient lerp_weight beta2 square_weight bias_root eps minus_step_size",
        c_int32="grad_dtype out_dtype",
    )


class Adamw8Job(ctypes.Structure):
    _fields_ = fields(
        c_void_p="master exp_avg_codes exp_avg_scale exp_avg_sq_codes exp_avg_sq_scale signed_map unsigned_map "
        "signed_encoder unsigned_encoder grad out",
        c_float="grad_scale lr beta1 beta2 eps weight_decay step lerp_weight lerp_rest square_weight square_rest "
        "least_scale",
        c_int32="grad_dtype out_dtype is_decoupled",
    )


class CastJob(ctypes.Structure):
    _fields_ = fields(c_void_p="master out", c_int32="out_dtype")


def adamw(
    library: ctypes.CDLL,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    out: Tensor | None,
    settings: AdamSettings,
    grad_scale: float,
    cores: Cores,
) -> None:
    num_elems = master.numel()
    root = PROCESSORS_OWN if settings.fused else torch_square_root()
    job = AdamwJob(
        master=master.data_ptr(),
        exp_avg=exp_avg.data_ptr(),
        exp_avg_sq=exp_avg_sq.data_ptr(),
        grad=grad.data_ptr(),
        out=_address(out),
        roots=root.address,
        set_threads=root.set_threads,
        last=num_elems - num_elems % FUSED_LANES if settings.fused else num_elems,
        grad_scale=_signed(grad_scale, settings),
        kept=settings.kept,
        into_gradient=settings.into_gradient,
        lerp_weight=1 - settings.beta1,
        beta2=settings.beta2,
        square_weight=1 - settings.beta2,
        bias_root=settings.bias_root,
        eps=settings.eps,
        minus_step_size=-settings.step_size,
        grad_dtype=DTYPES[grad.dtype],
        out_dtype=_dtype(out),
    )
    _call(library.shardwise_adamw, job, num_elems, cores)


def adamw8(
    library: ctypes.CDLL,
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
    encoders = [_encoder(library, tuple(lookup.tolist())) for lookup in (signed_map, unsigned_map)]
    job = Adamw8Job(
        master=master.data_ptr(),
        exp_avg_codes=exp_avg_codes.data_ptr(),
        exp_avg_scale=exp_avg_scale.data_ptr(),
        exp_avg_sq_codes=exp_avg_sq_codes.data_ptr(),
        exp_avg_sq_scale=exp_avg_sq_scale.data_ptr(),
        signed_map=signed_map.data_ptr(),
        unsigned_map=unsigned_map.data_ptr(),
        signed_encoder=encoders[0].data_ptr(),
        unsigned_encoder=encoders[1].data_ptr(),
        grad=grad.data_ptr(),
        out=_address(out),
        grad_scale=_signed(grad_scale, settings),
        lr=settings.lr,
        beta1=settings.beta1,
        beta2=settings.beta2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        step=settings.step,
        lerp_weight=1 - settings.beta1,
        lerp_rest=-(1.0 - (1 - settings.beta1)),
        square_weight=1 - settings.beta2,
        square_rest=-(1.0 - (1 - settings.beta2)),
        least_scale=LEAST_SCALE,
        grad_dtype=DTYPES[grad.dtype],
        out_dtype=_dtype(out),
        is_decoupled=settings.decoupled,
    )
    _call(library.shardwise_adamw8, job, master.numel(), cores)


def cast(library: ctypes.CDLL, master: Tensor, out: Tensor, cores: Cores) -> None:
    job = CastJob(master=master.data_ptr(), out=out.data_ptr(), out_dtype=_dtype(out))
    _call(library.shardwise_cast, job, master.numel(), cores)


def _signed(grad_scale: float, settings: AdamSettings) -> float:
    return -grad_scale if settings.maximize else grad_scale


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _dtype(tensor: Tensor | None) -> int:
    return 0 if tensor is None else DTYPES[tensor.dtype]


@cache
def _encoder(library: ctypes.CDLL, lookup: tuple[float, ...]) -> Tensor:
    made = torch.empty(2 * NUM_SPANS, dtype=torch.int32)
    values = (ctypes.c_float * len(lookup))(*lookup)
    if library.shardwise_make_encoder(values, ctypes.c_void_p(made.data_ptr())):
        raise StateError("the map of an 8-bit state must ascend as torchao's do, but has finer steps; take torchao's")
    return made


def _call(function: Any, job: ctypes.Structure, num_elems: int, cores: Cores) -> None:
    """ctypes gives the GIL back while the function runs."""
    ids = (ctypes.c_int32 * len(cores.ids))(*cores.ids)
    function(ctypes.byref(job), ctypes.c_int64(num_elems), ids, ctypes.c_int32(len(cores.ids)))
