"""AdamW and Adam for state in host memory: each array is read once and written once.

The C code (`c/adamw.c`, `c/adamw8.c`) is compiled at the first call (`library.py`). It runs outside the GIL, on one
thread for each of the rank's processors. The results are those of `torch.optim.AdamW` on the same processor, bit for
bit: as in torch, factors are computed in double precision and rounded once. Without a C compiler, torch's own
operations are used.
"""

import ctypes
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam

from ...base.errors import StateError
from .library import DTYPES, library, struct_fields

ROWS = ("master", "exp_avg", "exp_avg_sq")
BLOCK_ELEMS = 256  # elements of an 8-bit moment that share a scale
LEAST_SCALE = 1e-12  # smallest scale of such a block, as in torchao: a block of zeros has a scale, too
CHUNK_ELEMS = 1 << 20  # torch's operations work on this many elements at a time, which stay in the caches
FUSED_LANES = 8  # torch's fused kernels use another order of operations for the last `length % 8` elements
NUM_SPANS = (25 << 7) + 1  # length of an encoder's table for one sign, as in c/adamw8.c
SQRT_MODE = 0x140102  # the mode in which torch calls MKL's square root: high accuracy, denormals kept, no errors
NUM_TRIED = 1 << 12  # numbers on which `torch_square_root` compares


class AdamwJob(ctypes.Structure):
    _fields_ = struct_fields(
        c_void_p="master exp_avg exp_avg_sq new_master new_exp_avg new_exp_avg_sq grad out roots set_threads",
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


class AdamSettings(NamedTuple):
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool  # AdamW; otherwise Adam, whose decay goes into the gradient
    maximize: bool
    fused: bool  # the order of operations of torch's fused=True, otherwise that of its loop (foreach=False)
    step: int  # 1 for the first update


@dataclass(frozen=True, slots=True)
class Moment8:
    """A moment in 8 bits: each code is an index into `lookup`, 256 ascending values, and each block has a scale. The
    last block may be short."""

    codes: Tensor
    scale: Tensor
    lookup: Tensor


@dataclass(frozen=True, slots=True)
class AdamUpdate:
    """One update of flat tensors of equal length. The gradient is grad * grad_scale, rounded to its dtype.

    `master` and the moments are updated in place, or into `new`: other memory for the three, which then stay as they
    are. They are fp32, or both moments have 8 bits; in this case the results are those of torchao's AdamW8bit and
    Adam8bit, `settings.fused` has no effect, and there is no `new`. `grad` is fp32, bf16 or fp16. `out` may have the
    same three dtypes. It receives the new weights, rounded to nearest even.
    """

    master: Tensor
    exp_avg: Any  # a Tensor, or a Moment8
    exp_avg_sq: Any
    grad: Tensor
    out: Tensor | None
    settings: AdamSettings
    grad_scale: float
    new: tuple[Tensor, Tensor, Tensor] | None = None

    def check(self) -> None:
        """Refuse tensors that the C code would misread, because it sees only their addresses."""
        num_elems, fp32 = self.master.numel(), (torch.float32,)
        wanted: dict[str, tuple[Tensor, int, Iterable[torch.dtype]]] = {"master": (self.master, num_elems, fp32)}
        for name, moment in (("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq)):
            if isinstance(moment, Moment8):
                wanted[f"{name}_codes"] = (moment.codes, num_elems, (torch.uint8,))
                wanted[f"{name}_scale"] = (moment.scale, -(-num_elems // BLOCK_ELEMS), fp32)
                wanted[f"{name}_lookup"] = (moment.lookup, 256, fp32)
            else:
                wanted[name] = (moment, num_elems, fp32)
        wanted["grad"] = (self.grad, num_elems, DTYPES)
        if self.out is not None:
            wanted["out"] = (self.out, num_elems, DTYPES)
        if self.new is not None:
            wanted |= {f"new {name}": (tensor, num_elems, fp32) for name, tensor in zip(ROWS, self.new, strict=True)}
        for name, (tensor, length, dtypes) in wanted.items():
            is_flat = tensor.device.type == "cpu" and tensor.shape == (length,) and tensor.is_contiguous()
            if not is_flat or tensor.dtype not in dtypes:
                raise StateError(
                    f"{name} of a host update must be a flat, contiguous CPU tensor of {length} elements of "
                    f"{' or '.join(map(str, dtypes))}, but is {tuple(tensor.shape)} of {tensor.dtype} on "
                    f"{tensor.device} with strides {tensor.stride()}; copy it"
                )


def adamw(update: AdamUpdate, cores: tuple[int, ...]) -> None:
    """Run one update, on one thread for each of these processors."""
    update.check()
    loaded = library()
    if loaded is None:
        update_with_torch(update)
        return
    job = _job(loaded, update)
    function = loaded.shardwise_adamw8 if isinstance(job, Adamw8Job) else loaded.shardwise_adamw
    ids = (ctypes.c_int32 * len(cores))(*cores)
    # ctypes releases the GIL while the function runs.
    function(ctypes.byref(job), ctypes.c_int64(update.master.numel()), ids, ctypes.c_int32(len(cores)))


def _job(loaded: ctypes.CDLL, update: AdamUpdate) -> AdamwJob | Adamw8Job:
    settings, out, mean, square = update.settings, update.out, update.exp_avg, update.exp_avg_sq
    values: dict[str, Any] = settings._asdict() | {
        "master": update.master.data_ptr(),
        "grad": update.grad.data_ptr(),
        "grad_dtype": DTYPES[update.grad.dtype],
        "out": None if out is None else out.data_ptr(),
        "out_dtype": 0 if out is None else DTYPES[out.dtype],
        "grad_scale": -update.grad_scale if settings.maximize else update.grad_scale,
        "lerp_weight": 1 - settings.beta1,
        "square_weight": 1 - settings.beta2,
    }
    if isinstance(mean, Moment8):
        for name, sign, moment in (("exp_avg", "signed", mean), ("exp_avg_sq", "unsigned", square)):
            values[f"{name}_codes"], values[f"{name}_scale"] = moment.codes.data_ptr(), moment.scale.data_ptr()
            values[f"{sign}_map"] = moment.lookup.data_ptr()
            values[f"{sign}_encoder"] = _encoder(loaded, tuple(moment.lookup.tolist())).data_ptr()
        values["lerp_rest"] = -(1.0 - (1 - settings.beta1))
        values["square_rest"] = -(1.0 - (1 - settings.beta2))
        values["least_scale"], values["is_decoupled"] = LEAST_SCALE, settings.decoupled
        return Adamw8Job(**{name: values[name] for name, _ in Adamw8Job._fields_})
    num_elems, bias = update.master.numel(), 1 - settings.beta2**settings.step
    values["exp_avg"], values["exp_avg_sq"] = mean.data_ptr(), square.data_ptr()
    new = update.new or (update.master, mean, square)
    values |= {f"new_{name}": tensor.data_ptr() for name, tensor in zip(ROWS, new, strict=True)}
    values["roots"], values["set_threads"] = (None, None) if settings.fused else torch_square_root()
    values["last"] = num_elems - num_elems % FUSED_LANES if settings.fused else num_elems
    values["kept"] = 1 - settings.lr * settings.weight_decay if settings.decoupled else 1.0
    values["into_gradient"] = 0.0 if settings.decoupled else settings.weight_decay
    values["bias_root"] = math.sqrt(bias) if settings.fused else bias**0.5
    values["minus_step_size"] = -settings.lr / (1 - settings.beta1**settings.step)
    return AdamwJob(**{name: values[name] for name, _ in AdamwJob._fields_})


@cache
def _encoder(loaded: ctypes.CDLL, lookup: tuple[float, ...]) -> Tensor:
    made = torch.empty(2 * NUM_SPANS, dtype=torch.int32)
    values = (ctypes.c_float * len(lookup))(*lookup)
    if loaded.shardwise_make_encoder(values, ctypes.c_void_p(made.data_ptr())):
        raise StateError("the map of an 8-bit state must ascend as torchao's do, but has finer steps; take torchao's")
    return made


@cache
def torch_square_root() -> tuple[int | None, int | None]:
    """Find by a trial which square root torch's loop of AdamW uses. Return the addresses of MKL's function and of the
    one that keeps it on the calling thread, or twice None for the processor's own square root.

    On x86 torch takes roots of whole tensors with MKL, whose results may differ from the processor's in the last bit
    and depend on the processor. torch's fused AdamW always uses the processor's own.
    """
    tried = torch.rand(NUM_TRIED, generator=torch.Generator().manual_seed(0))
    roots = tried.sqrt()
    # Rounding a square root to double and then to single is the same as rounding it once.
    if torch.equal(roots, torch.tensor([math.sqrt(value) for value in tried.tolist()])):
        return None, None
    try:
        torch_library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        function, set_threads = torch_library.vmsSqrt, torch_library.MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return None, None
    found = torch.empty_like(tried)
    addresses = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (tried, found))
    function(ctypes.c_int(NUM_TRIED), *addresses, ctypes.c_int64(SQRT_MODE))
    if not torch.equal(roots, found):
        return None, None
    return ctypes.cast(function, ctypes.c_void_p).value, ctypes.cast(set_threads, ctypes.c_void_p).value


@torch.no_grad()
def update_with_torch(update: AdamUpdate) -> None:
    """Run an update with torch's operations, chunk by chunk, so that no second copy of anything is made. They use
    torch's own number of threads."""
    if update.new is not None:
        for target, source in zip(update.new, (update.master, update.exp_avg, update.exp_avg_sq), strict=True):
            target.copy_(source)
        master, mean, square = update.new
        update = replace(update, master=master, exp_avg=mean, exp_avg_sq=square, new=None)
    update_chunk = _update_chunk8 if isinstance(update.exp_avg, Moment8) else _update_chunk
    for begin in range(0, update.master.numel(), CHUNK_ELEMS):
        part = slice(begin, begin + CHUNK_ELEMS)
        update_chunk(update, part)
        if update.out is not None:
            update.out[part].copy_(update.master[part])


def _update_chunk(update: AdamUpdate, part: slice) -> None:
    settings = update.settings._asdict()
    step, decoupled = torch.tensor(float(settings.pop("step") - 1)), settings.pop("decoupled")
    adam(
        [update.master[part]],
        [(update.grad[part] * update.grad_scale).float()],
        [update.exp_avg[part]],
        [update.exp_avg_sq[part]],
        [],
        [step],
        foreach=False,
        amsgrad=False,
        decoupled_weight_decay=decoupled,
        **settings,
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


def _moved(moment: Moment8, part: slice, end: Tensor, weight: float) -> Tensor:
    """Move a part of a moment towards `end`, in the order of operations of torchao's compiled update; store its codes
    and scales, and return its values. Ties go up, as torchao's do."""
    codes, lookup = moment.codes[part], moment.lookup
    scale = moment.scale[part.start // BLOCK_ELEMS : part.stop // BLOCK_ELEMS]
    start = lookup[codes.int()] * scale.repeat_interleave(BLOCK_ELEMS)[: codes.numel()]
    is_near = abs(weight) < 0.5
    moved = start + (end - start) * weight if is_near else end + (end - start) * -(1.0 - weight)
    num_padding = scale.numel() * BLOCK_ELEMS - moved.numel()
    blocks = torch.nn.functional.pad(moved, (0, num_padding)).view(-1, BLOCK_ELEMS)
    scale.copy_(blocks.abs().amax(-1).clamp(min=LEAST_SCALE))
    scaled = (blocks / scale.view(-1, 1)).flatten()[: moved.numel()]
    below = (torch.searchsorted(lookup, scaled, right=True) - 1).clamp(min=0)
    above = (below + 1).clamp(max=lookup.numel() - 1)
    is_up = scaled - lookup[below] >= (lookup[above] - lookup[below]) * 0.5
    codes.copy_(torch.where(is_up, above, below))
    return moved
