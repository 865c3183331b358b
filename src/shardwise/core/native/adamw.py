"""AdamW and Adam for state in host memory: each array is read once and written once.

The C code (`c/adamw.c`, `c/adamw8.c`) is compiled at the first call (`library.py`). It runs outside the GIL, on one
thread for each of the rank's `Cores`. The results are those of `torch.optim.AdamW` on the same processor, bit for bit.
Without a compiler torch's own operations do the work.
"""

import ctypes
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...base.errors import StateError
from .adam_update import LEAST_SCALE, AdamSettings, AdamUpdate, Moment8, update_with_torch
from .cores import Cores
from .library import DTYPES, library, struct_fields

__all__ = ["AdamSettings", "AdamUpdate", "Moment8", "adamw"]

FUSED_LANES = 8  # torch's fused kernels round the remainder of an array, divided by this, in another order
NUM_SPANS = (25 << 7) + 1
SQRT_MODE = 0x140102  # the mode in which torch calls MKL's root: high accuracy, denormals as they are, no errors
NUM_TRIED = 1 << 12


class AdamwJob(ctypes.Structure):
    _fields_ = struct_fields(
        c_void_p="master exp_avg exp_avg_sq grad out roots set_threads",
        c_int64="last",
        c_float="grad_scale kept into_gradient lerp_weight beta2 square_weight bias_root eps minus_step_size",
        c_int32="grad_dtype out_dtype",
    )


class Adamw8Job(ctypes.Structure):
    _fields_ = struct_fields(
        c_void_p="master exp_avg_codes exp_avg_scale exp_avg_sq_codes exp_avg_sq_scale signed_map unsigned_map "
        "signed_encoder unsigned_encoder grad out",
        c_float="grad_scale lr beta1 beta2 eps weight_decay step lerp_weight lerp_rest square_weight square_rest "
        "least_scale",
        c_int32="grad_dtype out_dtype is_decoupled",
    )


def adamw(update: AdamUpdate, cores: Cores) -> None:
    """Run one update."""
    update.check()
    loaded = library()
    if loaded is None:
        update_with_torch(update)
        return
    is_eight_bit = isinstance(update.exp_avg, Moment8)
    job = _job8(loaded, update) if is_eight_bit else _job(update)
    function = loaded.shardwise_adamw8 if is_eight_bit else loaded.shardwise_adamw
    ids = (ctypes.c_int32 * len(cores.ids))(*cores.ids)
    # ctypes gives the GIL back while the function runs.
    function(ctypes.byref(job), ctypes.c_int64(update.master.numel()), ids, ctypes.c_int32(len(cores.ids)))


def _job(update: AdamUpdate) -> AdamwJob:
    settings, num_elems = update.settings, update.master.numel()
    assert isinstance(update.exp_avg, Tensor)
    assert isinstance(update.exp_avg_sq, Tensor)
    root = PROCESSORS_OWN if settings.fused else torch_square_root()
    return AdamwJob(
        exp_avg=update.exp_avg.data_ptr(),
        exp_avg_sq=update.exp_avg_sq.data_ptr(),
        roots=root.address,
        set_threads=root.set_threads,
        last=num_elems - num_elems % FUSED_LANES if settings.fused else num_elems,
        kept=settings.kept,
        into_gradient=settings.into_gradient,
        bias_root=settings.bias_root,
        minus_step_size=-settings.step_size,
        **_common_fields(update),
    )


def _job8(loaded: ctypes.CDLL, update: AdamUpdate) -> Adamw8Job:
    settings, mean, square = update.settings, update.exp_avg, update.exp_avg_sq
    assert isinstance(mean, Moment8)
    assert isinstance(square, Moment8)
    encoders = [_encoder(loaded, tuple(moment.lookup.tolist())) for moment in (mean, square)]
    return Adamw8Job(
        exp_avg_codes=mean.codes.data_ptr(),
        exp_avg_scale=mean.scale.data_ptr(),
        exp_avg_sq_codes=square.codes.data_ptr(),
        exp_avg_sq_scale=square.scale.data_ptr(),
        signed_map=mean.lookup.data_ptr(),
        unsigned_map=square.lookup.data_ptr(),
        signed_encoder=encoders[0].data_ptr(),
        unsigned_encoder=encoders[1].data_ptr(),
        lr=settings.lr,
        beta1=settings.beta1,
        weight_decay=settings.weight_decay,
        step=settings.step,
        lerp_rest=-(1.0 - (1 - settings.beta1)),
        square_rest=-(1.0 - (1 - settings.beta2)),
        least_scale=LEAST_SCALE,
        is_decoupled=settings.decoupled,
        **_common_fields(update),
    )


def _common_fields(update: AdamUpdate) -> dict[str, Any]:
    settings, out = update.settings, update.out
    return {
        "master": update.master.data_ptr(),
        "grad": update.grad.data_ptr(),
        "grad_dtype": DTYPES[update.grad.dtype],
        "out": None if out is None else out.data_ptr(),
        "out_dtype": 0 if out is None else DTYPES[out.dtype],
        "grad_scale": -update.grad_scale if settings.maximize else update.grad_scale,
        "lerp_weight": 1 - settings.beta1,
        "beta2": settings.beta2,
        "square_weight": 1 - settings.beta2,
        "eps": settings.eps,
    }


@cache
def _encoder(loaded: ctypes.CDLL, lookup: tuple[float, ...]) -> Tensor:
    made = torch.empty(2 * NUM_SPANS, dtype=torch.int32)
    values = (ctypes.c_float * len(lookup))(*lookup)
    if loaded.shardwise_make_encoder(values, ctypes.c_void_p(made.data_ptr())):
        raise StateError("the map of an 8-bit state must ascend as torchao's do, but has finer steps; take torchao's")
    return made


@dataclass(frozen=True, slots=True)
class SquareRoot:
    """Addresses of C functions, or None for the processor's own root. `set_threads` keeps the root on the thread that
    calls it."""

    address: int | None
    set_threads: int | None


PROCESSORS_OWN = SquareRoot(None, None)


@cache
def torch_square_root() -> SquareRoot:
    """Find the square root that torch's loop of AdamW uses, by a trial.

    On x86 torch takes roots of whole tensors with MKL, whose results may differ from the processor's in the last bit
    and depend on the processor. torch's fused AdamW always uses the processor's own.
    """
    tried = torch.rand(NUM_TRIED, generator=torch.Generator().manual_seed(0))
    roots = tried.sqrt()
    # Rounding a square root to double and then to single is the same as rounding it once.
    if torch.equal(roots, torch.tensor([math.sqrt(value) for value in tried.tolist()])):
        return PROCESSORS_OWN
    try:
        torch_library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        function, set_threads = torch_library.vmsSqrt, torch_library.MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return PROCESSORS_OWN
    found = torch.empty_like(tried)
    addresses = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (tried, found))
    function(ctypes.c_int(NUM_TRIED), *addresses, ctypes.c_int64(SQRT_MODE))
    if not torch.equal(roots, found):
        return PROCESSORS_OWN
    return SquareRoot(*(ctypes.cast(each, ctypes.c_void_p).value for each in (function, set_threads)))
