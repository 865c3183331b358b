"""What a user may touch on a sharded model, and what is refused with a reason instead of going wrong.

Between steps the modules show this rank's part of the masters. Reading them is safe; whatever would treat them as whole
weights (saving, copying, casting, moving) raises.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from ..errors import ConfigurationError, StateError
from .runtime import Engine

_KEY = "_shardwise_engine"

_REFUSALS = {
    "__deepcopy__": "a sharded model cannot be copied: copy it before sw.shard, or copy sw.full_state_dict(model)",
    "__reduce_ex__": "a sharded model cannot be pickled: save sw.full_state_dict(model)",
    "_apply": "a sharded model cannot be moved or cast with .to(), .cuda(), .half(), ...: do that before sw.shard "
    "(the device is chosen by sw.init, the dtype by precision=)",
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
        module.__dict__[_KEY] = engine
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
