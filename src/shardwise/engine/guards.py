"""What a user may touch on a sharded model, and what is refused with a reason instead of going wrong.

Between steps the modules show this rank's part of the masters. Reading them is safe; whatever would treat them as whole
weights (saving, copying, casting, moving) raises.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError, StateError
from .runtime import Engine

_KEY = "_shardwise_engine"

_REFUSALS = {
    "__deepcopy__": "a sharded model cannot be copied: copy it before sw.shard, or copy sw.full_state_dict(model)",
    "__reduce_ex__": "a sharded model cannot be pickled: save sw.full_state_dict(model)",
    "zero_grad": "gradients of a part of a sharded model cannot be cleared alone: call optimizer.zero_grad()",
}

# Of torch and DeepSpeed: what splits, gathers or reduces by itself, by the names of its classes.
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")


def refuse_wrapped(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _WRAPPERS and kind.__module__.startswith(("torch.", "deepspeed.")):
                what = f"its module {path!r}" if path else "it"
                raise ConfigurationError(
                    f"sw.shard was given a model that another library shards already ({what} is a {kind.__name__}): "
                    "give it the plain model, and the optimizer that was built on that one's parameters"
                )


def guard(model: nn.Module, engine: Engine, zero_grad: Callable[..., None]) -> None:
    for module in model.modules():
        if _is_bare(module):
            continue
        module.__dict__[_KEY] = engine
        module.__dict__["_apply"] = partial(_refuse_change, module)
        for name, reason in _REFUSALS.items():
            module.__dict__[name] = _refuser(reason)
        module.register_state_dict_pre_hook(_refuse_state_dict)
        module.register_load_state_dict_pre_hook(_refuse_load)
    model.__dict__["zero_grad"] = zero_grad


def engine_of(module: nn.Module) -> Engine:
    engine = find_engine(module)
    if engine is None:
        raise StateError(f"this {type(module).__name__} is not sharded: call sw.shard(model, optimizer, ...) first")
    return engine


def find_engine(module: nn.Module) -> Engine | None:
    return module.__dict__.get(_KEY)


def own_state_dict(model: nn.Module, engine: Engine) -> dict[str, Any]:
    """The model's state dict with what its modules show at this moment."""
    engine.whole_modules = {id(module) for module in model.modules()}
    try:
        return model.state_dict(keep_vars=True)
    finally:
        engine.whole_modules = set()


def _is_bare(module: nn.Module) -> bool:
    """Whether it has nothing to guard: one activation function may serve many models, sharded or not."""
    return not (module._modules or module._parameters or module._buffers)


def _refuse_change(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """In the place of `_apply`: models cast and move their own parts, which need not change them."""
    where = engine_of(module).mesh.device
    kinds = {(param.dtype, where) for param in module.parameters(recurse)}
    for dtype, device in kinds | {(buffer.dtype, buffer.device) for buffer in module.buffers(recurse)}:
        if _changes(fn, dtype, device):
            raise StateError(
                "a sharded model cannot be moved or cast with .to(), .cuda(), .half(), ...: do that before sw.shard "
                "(the device is chosen by sw.init, the dtype by precision=, and that of a module which a forward casts "
                f"to fp32 by sw.Precision(..., keep_fp32=)); this {type(module).__name__} is in {dtype} on {device}"
            )
    return module


def _changes(fn: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device) -> bool:
    # Four dimensions: a memory format is a change, too.
    probe = torch.ones((2, 2, 2, 2), dtype=torch.float32, device=device).to(dtype)
    try:
        same = fn(probe) is probe
    except (RuntimeError, TypeError, ValueError, AssertionError):  # what it does to parameters remains unknown
        return True
    return not same or (probe.device.type == "cpu" and probe.is_shared()) or not bool((probe == 1).all())


def _refuser(reason: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise StateError(reason)

    return refuse


def _refuse_state_dict(module: nn.Module, *args: Any) -> None:
    if id(module) not in engine_of(module).whole_modules:
        raise StateError(
            "model.state_dict() would hold this rank's part only: call sw.full_state_dict(model) on every rank, use "
            "`with sw.whole(model):`, or write a checkpoint with sw.save(path, model, optimizer)"
        )


def _refuse_load(module: nn.Module, *args: Any) -> None:
    if id(module) not in engine_of(module).whole_modules:
        raise StateError(
            "model.load_state_dict() does not know about shards: call sw.load_full_state_dict(model, state_dict) on "
            "every rank, use `with sw.whole(model, write=True):`, or read a checkpoint with sw.load(path, model)"
        )
