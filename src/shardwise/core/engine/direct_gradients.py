"""Linear layers that write their weight gradient directly into the memory that is reduced.

Autograd would allocate each gradient, and the engine would copy it into the reduction slot: a second pass over every
gradient, and a second buffer for it. Instead the backward of a linear layer writes its product into the weight's place
there (`Gradient.put`). The same operation does the cast, the mean over ranks and the sum over micro-batches.

This changes speed only. If no place is open, the graph is compiled, or the gradient itself is requested
(`torch.autograd.grad`, `create_graph`), the layer is an ordinary one, and its gradient is copied as usual.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...base.dtypes import FP32
from ..saved_tensors import keep, kept
from ..unit.state import FlatState, Unit


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, state: FlatState, index: int) -> Tensor:
        ctx.state, ctx.index = state, index
        saved = (x, weight if x.requires_grad else None)
        ctx.has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        if ctx.has_hooks:
            keep(ctx, *saved)
        else:
            ctx.to_save = saved  # what `save_for_backward` does, without a call
        out = F.linear(x, weight, bias)
        # Autograd forbids in-place changes of a view that a custom function returns, and such an activation may follow.
        return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = kept(ctx) if ctx.has_hooks else ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        inputs = x.reshape(-1, x.shape[-1])
        gradient, param = ctx.state.gradient, ctx.state.compute_params[ctx.index]
        try:
            # True if this backward adds to weight.grad (it will execute the node next_functions[1]), and no hook needs
            # the gradient as a tensor.
            is_direct = (
                not torch.is_grad_enabled()
                and torch._C._will_engine_execute_node(ctx.next_functions[1][0])
                and param.requires_grad  # it may have been frozen since the forward
                and not param._backward_hooks
                and not param._post_accumulate_grad_hooks
            )
        except RuntimeError:
            is_direct = False  # torch.autograd.grad was called for this very weight
        is_direct = is_direct and (gradient.places is not None or gradient.ask_to_open(rows.shape[0]))
        if is_direct:
            gradient.put(ctx.index, rows, inputs)
        return (
            None if weight is None else rows.mm(weight).view(x.shape),
            None if is_direct else rows.t().mm(inputs),
            rows.sum(0) if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


# `Function.apply` without its slow Python code for functorch; `_forward` checks for functorch instead. The backward is
# called by autograd directly, without the two functions in between that look for it.
_apply_linear: Any = super(torch.autograd.Function, _Linear).apply
_Linear._backward_cls.apply = _Linear.backward  # type: ignore[attr-defined]


def install_direct_gradients(units: Iterable[Unit], modules: dict[str, nn.Module]) -> None:
    """Let the plain linear layers of a model write their gradients directly."""
    for unit in units:
        for state in unit.trainable_states:
            flat = state.flat
            # A GPU can write the product of 16-bit matrices in fp32; a CPU writes it in their own dtype only.
            if flat.reduce != flat.compute and not (state.device.type == "cuda" and flat.reduce == FP32):
                continue
            for index, spec in enumerate(flat.params):
                for site in spec.sites:
                    module = modules[site.module]
                    is_linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
                    is_plain = is_linear and "forward" not in module.__dict__ and "bias" in module._parameters
                    if site.attribute == "weight" and is_plain:
                        module.forward = _forward(module, state, index)


def _forward(module: Any, state: FlatState, index: int) -> Any:
    parameters, param = module._parameters, state.compute_params[index]

    def forward(input: Tensor) -> Tensor:  # noqa: A002, nn.Linear's own name for it
        if (
            torch.compiler.is_dynamo_compiling()
            or parameters.get("weight") is not param
            or "bias" not in parameters
            or not (torch.is_grad_enabled() and param.requires_grad)
            or type(input) is not Tensor
            or (input.is_nested or input.layout != torch.strided)
            or torch.is_autocast_enabled(input.device.type)
            or torch._C._are_functorch_transforms_active()
            or torch.autograd.forward_ad._current_level >= 0
            # A part of another weight of the unit: a late gradient would read it when others have its memory.
            or input.untyped_storage().data_ptr() == param.untyped_storage().data_ptr()
        ):
            return nn.Linear.forward(module, input)
        return _apply_linear(input, param, parameters["bias"], state, index)

    return forward
