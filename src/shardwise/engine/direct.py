"""Linear layers whose weight gradient is written straight to where its reduction reads it.

Autograd would allocate each gradient, and the engine copy it into the reduction slot: a second pass over every
gradient, and a second place for it. Instead the backward of a linear layer multiplies into the open place of its
weight (`FlatState.put`), with the cast, the mean over ranks and the sum over micro-batches inside the product.

It is a matter of speed only. Where no place is open, the graph is compiled, or somebody asks for the gradient itself
(`torch.autograd.grad`, `create_graph`), the layer is an ordinary one and its gradient takes the ordinary path.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..unit import FlatState
from .runtime import Engine


class _Weight:
    """The weight of one linear layer, and the way to its place."""

    __slots__ = ("_accumulator", "_engine", "_index", "_state", "param")

    def __init__(self, engine: Engine, state: FlatState, index: int) -> None:
        self.param = state.compute_params[index]
        self._engine = engine
        self._state = state
        self._index = index
        # What autograd runs to add to param.grad; it tells whether this backward is meant to.
        self._accumulator: Any = self.param.view_as(self.param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]

    def put(self, rows: Tensor, inputs: Tensor) -> bool:
        """Write the gradient, if this backward has a place for it."""
        if (
            self._state.places is None
            or torch.is_grad_enabled()
            or not torch._C._will_engine_execute_node(self._accumulator)
        ):
            return False
        self._state.put(self._index, rows, inputs, self._engine.scale)
        return True


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, direct: _Weight) -> Tensor:
        ctx.direct = direct
        ctx.save_for_backward(x, weight if x.requires_grad else None)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        inputs = x.reshape(-1, x.shape[-1])
        grad_x = None if weight is None else rows.mm(weight).view(x.shape)
        grad_weight = None if ctx.direct.put(rows, inputs) else rows.t().mm(inputs)
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None


def install_direct_gradients(engine: Engine, modules: dict[str, nn.Module]) -> None:
    """Let the plain linear layers of a model write their gradients directly."""
    for unit in engine.units:
        for state in unit.states:
            if not state.flat.trainable or not _can_multiply_into(state):
                continue
            for index, spec in enumerate(state.flat.params):
                for site in spec.sites:
                    module = modules[site.module]
                    if site.attribute == "weight" and _is_plain_linear(module):
                        module.forward = _forward(module, _Weight(engine, state, index))
                        unit.writes_directly = True


def _can_multiply_into(state: FlatState) -> bool:
    """Products of 16-bit matrices come out in fp32 on a GPU; on a CPU in their own dtype only."""
    flat = state.flat
    return flat.reduce == flat.compute or (state.master.is_cuda and flat.reduce == torch.float32)


def _is_plain_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward and "forward" not in module.__dict__


def _forward(module: nn.Module, direct: _Weight) -> Any:
    parameters = module._parameters

    def forward(x: Tensor) -> Tensor:
        weight, bias = parameters["weight"], parameters["bias"]
        if (
            torch.compiler.is_compiling()
            or weight is not direct.param
            or not torch.is_grad_enabled()
            or type(x) is not Tensor
            or torch.is_autocast_enabled(x.device.type)
            or torch._C._are_functorch_transforms_active()
        ):
            return F.linear(x, weight, bias)  # type: ignore[arg-type]
        return _Linear.apply(x, weight, bias, direct)  # type: ignore[no-untyped-call]

    return forward
