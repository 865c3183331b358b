"""Stand-ins for tensors that are stored elsewhere: reading one raises an error that says where."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.errors import StateError

# Functions that describe a tensor without reading it: attributes, and functions that memory tools call.
_HARMLESS = {"__get__", "untyped_storage", "size", "numel", "dim", "element_size", "data_ptr", "is_floating_point"}
# The same for a parameter, whose attributes can be set, and which has hooks.
_TELLS = _HARMLESS | {"__set__", "requires_grad_", "register_hook"}


class StandIn(Tensor):
    """Stand-in for the gradient of a user's parameter, which lies in a flat shard; using it raises."""

    why = (
        "gradients lie in flat shards, not in param.grad: step the optimizer that sw.shard returned (give it all of "
        "them), clip with optimizer.clip_grad_norm(...), read with sw.grad_norms(model) or inside "
        "`with sw.whole(model, grads=True):`, clear with optimizer.zero_grad(), and leave a GradScaler out "
        "(precision='fp16' scales by itself)"
    )
    harmless = _HARMLESS

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in cls.harmless:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise StateError(cls.why)

    @classmethod
    def like(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape)).as_subclass(cls)


class NotShown(StandIn):
    """Stand-in for a gradient inside `sw.whole`, which shows weights."""

    why = "sw.whole(model) shows weights: for gradients write `with sw.whole(model, grads=True):`"


class OnDisk(StandIn):
    """Stand-in for master weights or optimizer state on disk."""

    why = (
        "this tensor rests on disk: read weights with sw.full_state_dict(model) or inside `with sw.whole(model):`, and "
        "optimizer state through a checkpoint"
    )
    harmless = _TELLS | {"detach"}
