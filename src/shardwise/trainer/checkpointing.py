"""Activation checkpointing of a model's blocks: which tensors a block saves for its backward, and which it recomputes.

    none       all tensors that autograd needs
    selective  the block's input, attention, and products that are worth their memory; the rest is recomputed
    full       the block's input only

To recompute one element of a product over k terms costs 2k operations, so products of one input save equally much work
per byte. Attention saves more as sequences grow; elementwise operations are never worth their memory. In elements per
token, for a Llama block of width h, with keys and values of h / 4 and a feed-forward of 3.5 h:

                              none      selective   full
    saved                     20.5 h    7.5 h       1 h
    recomputed products       0         31 %        73 %, and attention

Selective checkpointing saves attention, products that keep the width (query, out), and every second one of the products
that widen (gate and up, or a fused qkv and up), which have most of the bytes. It does not save products that narrow to
half or less: down, whose result no backward reads, and keys and values of grouped queries, which are cheap. The common
rule (every second product, in the order of execution) saves 7.75 h here, and recomputes 37 %.

The wrapper replaces `module.forward`, so module hooks, and with them the engine's gathers, run outside of it.
A recompute runs in the block's backward, for which the block is gathered anyway.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..base.errors import ConfigurationError, did_you_mean
from ..core.schedule.units import find_blocks, modules_of_class

Mode = Literal["none", "selective", "full"]

# Matrix products, and the index of the first of their two matrices among the arguments.
_PRODUCTS = {
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.aten._scaled_mm.default: 0,
    torch.ops.aten._grouped_mm.default: 0,
}
# Types of a block's arguments that are no cache of keys and values.
_PLAIN = (torch.Tensor, tuple, list, dict, str, int, float, type(None))
# Batched products: attention that is written without a fused kernel.
_BATCHED_PRODUCTS = {torch.ops.aten.bmm.default: 0, torch.ops.aten.baddbmm.default: 1}


def checkpoint_blocks(
    model: nn.Module, mode: Mode, *, blocks: Sequence[str | type[nn.Module]] | None = None
) -> list[str]:
    """Make the blocks of a model save less for the backward, and return the blocks' paths.

    Blocks are the modules that a model repeats, or those of the classes in `blocks`. Losses and gradients stay the same
    bit for bit. It can be called before or after `sw.shard`. Blocks may be compiled too
    (`block.compile()`, `torch.compile(block)`, before or after): the compiler then plans the recomputation. A second
    call replaces the mode of the first.
    """
    modes = get_args(Mode)
    if mode not in modes:
        raise ConfigurationError(f"checkpointing mode {mode!r}: {did_you_mean(mode, modes)}")
    paths = find_blocks(model) if blocks is None else modules_of_class(model, blocks, "blocks")
    if not paths and mode != "none":
        raise ConfigurationError(
            f"checkpointing mode {mode!r}: no repeated blocks were found in this {type(model).__name__}; name their "
            "classes with blocks=[...]"
        )
    for path in paths:
        module: Any = model.get_submodule(path)
        module = getattr(module, "_orig_mod", module)  # inside of torch.compile(block)
        forward = module.forward
        if isinstance(forward, partial) and forward.func is _checkpointed:
            forward = forward.args[0]
        if mode == "selective" and getattr(forward, "_torchdynamo_orig_callable", None) is not None:
            raise ConfigurationError(
                f"checkpointing mode {mode!r}: the forward of {path!r} is compiled by itself, so nothing in it can be "
                "selected: compile the block (block.compile()), or use 'full'"
            )
        # A partial of a bound method, not a closure: a deep copy of the model calls the copy's forward.
        module.forward = forward if mode == "none" else partial(_checkpointed, forward, mode)
    return paths


def _checkpointed(forward: Callable[..., Any], mode: Mode, *args: Any, **kwargs: Any) -> Any:
    if torch.is_grad_enabled():
        for value in (*args, *kwargs.values()):
            # torch 2.11 cannot compile the name of a builtin type; the whole block would run without compilation.
            if not isinstance(value, _PLAIN) and type(value).__name__.endswith("Cache"):
                raise ConfigurationError(
                    f"checkpointing mode {mode!r}: a recompute would write its keys and values into the "
                    f"{type(value).__name__} a second time: set model.config.use_cache = False for training"
                )
    if mode == "full":
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=_selective_contexts, **kwargs)


def _selective_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return create_selective_checkpoint_contexts(_Selection())


class _Selection:
    """Decides what a block's forward saves. Some torch versions ask again in the recompute: it has its own count."""

    def __init__(self) -> None:
        self._num_wide = {False: 0, True: 0}

    def __call__(self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = _is_attention(op) or self._is_kept_product(context.is_recompute, op, args)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    def _is_kept_product(self, is_recompute: bool, op: Any, args: Sequence[Any]) -> bool:
        if op in _BATCHED_PRODUCTS:
            first = _BATCHED_PRODUCTS[op]
            return bool(args[first].shape[-1] >= args[first + 1].shape[-1])
        if op not in _PRODUCTS:
            return False
        first = _PRODUCTS[op]
        width, new_width = args[first].shape[-1], args[first + 1].shape[-1]
        if new_width > width:
            self._num_wide[is_recompute] += 1
            return self._num_wide[is_recompute] % 2 == 1
        return bool(width < 2 * new_width)


@cache
def _is_attention(op: Any) -> bool:
    """Recognise attention by name, so that kernels of other libraries are found too."""
    name = str(op)
    return "attention" in name or "attn" in name
