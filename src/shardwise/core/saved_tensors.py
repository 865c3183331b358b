"""Saving tensors in a custom autograd function before it computes anything, as torch's own functions do.

`save_for_backward` hands tensors to saved-tensor hooks only after the forward. Activation checkpointing stops a
recompute where the last tensor is saved: at the end of a block, such a function would compute a result that is not
needed. These two functions call the hooks at once:

    keep(ctx, weight, inputs)        # first line of `forward`
    weight, inputs = kept(ctx)       # in `backward`
"""

from typing import Any

import torch
from torch import Tensor


def keep(ctx: Any, *tensors: Tensor | None) -> None:
    """Save tensors for the backward. Call it first in a forward."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    ctx.has_hooks = hooks is not None
    if hooks is None:
        ctx.save_for_backward(*tensors)
    else:
        pack, ctx.unpack = hooks
        ctx.packed = [None if tensor is None else pack(tensor) for tensor in tensors]


def kept(ctx: Any) -> tuple[Any, ...]:
    """Return the saved tensors in the backward. They are then dropped, unless the graph is retained.

    The hooks are dropped, too, because those of checkpointing hold the inputs of the block.
    """
    if not ctx.has_hooks:
        return tuple(ctx.saved_tensors)
    if ctx.packed is None:
        raise RuntimeError("backward through a graph a second time, after it was freed: give retain_graph=True")
    saved = tuple(None if packed is None else ctx.unpack(packed) for packed in ctx.packed)
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        ctx.packed = ctx.unpack = None
    return saved
