"""Refusals: changes to a sharded model that would go wrong raise an error that says what to do instead.

Parameters are guarded in `unit/user_parameter.py`. The modules are guarded here: saving, copying, casting and moving
them raises, and so does giving them parameters or modules that are not sharded.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ...base.errors import ConfigurationError, StateError
from .runtime import Engine

_KEY = "_shardwise_engine"

_REFUSALS = {
    "__deepcopy__": "a sharded model cannot be copied: copy it before sw.shard, or copy sw.full_state_dict(model)",
    "__reduce_ex__": "a sharded model cannot be pickled: save sw.full_state_dict(model)",
    "zero_grad": "gradients of a part of a sharded model cannot be cleared alone: call optimizer.zero_grad()",
}

_NO_STATE_DICT = (
    "model.state_dict() of a sharded model holds what this rank has, under most layouts a part: call "
    "sw.full_state_dict(model) on every rank, use `with sw.whole(model):`, or write a checkpoint with "
    "sw.save(path, model, optimizer); for Hugging Face models, model.save_pretrained(folder) on every rank"
)
_NO_LOADING = (
    "model.load_state_dict() does not know about shards: call sw.load_full_state_dict(model, state_dict) on every "
    "rank, use `with sw.whole(model, write=True):`, or read a checkpoint with sw.load(path, model)"
)


def guard(model: nn.Module, engine: Engine, zero_grad: Callable[..., None]) -> None:
    _watch_registrations()
    for module in model.modules():
        # A module without state needs no guard. Models, sharded or not, may share one activation module.
        if not (module._modules or module._parameters or module._buffers):
            continue
        module.__dict__[_KEY] = engine
        module.__dict__["_apply"] = partial(_refuse_change, module)
        for name, reason in _REFUSALS.items():
            module.__dict__[name] = partial(_refuse, reason)
        module.register_state_dict_pre_hook(partial(_refuse_outside_whole, _NO_STATE_DICT))
        module.register_load_state_dict_pre_hook(partial(_refuse_outside_whole, _NO_LOADING))
    model.__dict__["zero_grad"] = zero_grad


@cache
def _watch_registrations() -> None:
    """Register global hooks: torch calls them when any module of the process gets a parameter or a submodule."""
    register_module_parameter_registration_hook(_refuse_parameter)
    register_module_module_registration_hook(_refuse_module)


def _refuse_parameter(module: nn.Module, name: str, param: nn.Parameter) -> None:
    engine = find_engine(module)
    if engine is not None and not engine.whole_modules and module._parameters.get(name) is not param:
        raise StateError(
            f"parameter {name!r} was given to a {type(module).__name__} that is sharded already, and would not be "
            "trained: add parameters before sw.shard, change values inside `with sw.whole(model, write=True):`"
        )


def _refuse_module(module: nn.Module, name: str, new: nn.Module | None) -> None:
    engine = find_engine(module)
    if engine is None or new is None or module._modules.get(name) is new:
        return
    strange = any(part._parameters and find_engine(part) is not engine for part in new.modules())
    if name == "parametrizations" or strange:
        raise StateError(
            f"module {name!r} ({type(new).__name__}) was given to a {type(module).__name__} that is sharded already: "
            "it would not be trained; build the whole model, adapters and parametrizations too, before sw.shard"
        )


def engine_of(module: nn.Module) -> Engine:
    if not isinstance(module, nn.Module):
        raise ConfigurationError(
            f"a sharded model is expected, not the {type(module).__name__} {module!r}: sw.save and sw.load take the "
            "path first, all else the model"
        )
    engine = find_engine(module)
    if engine is None:
        raise StateError(f"this {type(module).__name__} is not sharded: call sw.shard(model, optimizer, ...) first")
    return engine


def find_engine(module: nn.Module) -> Engine | None:
    return module.__dict__.get(_KEY)


def own_state_dict(model: nn.Module, engine: Engine) -> dict[str, Any]:
    """Return the model's own state dict (refused elsewhere), with the tensors that its modules hold now."""
    engine.whole_modules = {id(module) for module in model.modules()}
    try:
        return model.state_dict(keep_vars=True)
    finally:
        engine.whole_modules = set()


def _refuse_change(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Replacement of `Module._apply`: refuse casts and moves. Some models call it without effect; that is allowed."""
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
    # Four dimensions, as channels_last needs: so a change of the memory format is noticed, too.
    probe = torch.ones((2, 2, 2, 2), dtype=torch.float32, device=device).to(dtype)
    try:
        same = fn(probe) is probe
    except (RuntimeError, TypeError, ValueError, AssertionError):  # its effect on parameters is unknown
        return True
    return not same or (probe.device.type == "cpu" and probe.is_shared()) or not bool((probe == 1).all())


def _refuse(reason: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise StateError(reason)


def _refuse_outside_whole(reason: str, module: nn.Module, *args: Any) -> None:
    if id(module) not in engine_of(module).whole_modules:
        raise StateError(reason)
