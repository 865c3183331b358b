"""What stands on the meta device for what a GPU, or our engine, runs.

Attention is one kernel that saves its inputs, its result and a number per row; an RMS norm saves its input and a number
per row; dropout saves a byte per element; a plain linear layer writes its weight's gradient without making it. The
products of experts, which torch has on the meta device in bf16 alone, are the same in other dtypes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...core.saved_tensors import keep, kept
from .kernels import AttentionShape


def laid_out(query: Tensor, shape: AttentionShape) -> Tensor:
    """A result of attention as it lies on a GPU: as the queries do if these are dense, else token by token."""
    rows = query.transpose(1, 2)
    like = torch.empty(rows.shape, dtype=rows.dtype, device="meta") if shape.kernel == "efficient" else rows
    return torch.empty_like(like).transpose(1, 2)


def attention_shape(query: Tensor, key: Tensor) -> AttentionShape:
    batch, heads, seq, head_dim = query.shape
    return AttentionShape(batch, seq, heads, key.shape[1], head_dim, query.element_size())


class StandIns(TorchFunctionMode):
    """`direct` are the weights whose gradients are written where they belong."""

    def __init__(self, direct: frozenset[Tensor]) -> None:
        super().__init__()
        self._direct = direct

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query, key, value = (*args, *(kwargs[name] for name in ("query", "key", "value")[len(args) :]))[:3]
            if attention_shape(query, key).kernel != "math":
                # Narrower values (latent attention) are padded, as for the kernel.
                narrower = query.shape[-1] - value.shape[-1]
                value = F.pad(value, (0, narrower)) if narrower else value
                mixed = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]
                return mixed[..., :-narrower] if narrower else mixed
        if func in (F.rms_norm, torch.rms_norm):
            weight = args[2] if len(args) > 2 else kwargs.get("weight")
            return _RmsNorm.apply(args[0], weight)  # type: ignore[no-untyped-call]
        if func is F.linear and torch.is_grad_enabled() and args[1] in self._direct:
            return _Linear.apply(*args, *(kwargs.get("bias"),) * (len(args) < 3))  # type: ignore[no-untyped-call]
        if func is F.dropout and kwargs.get("training", True):
            return torch.native_dropout(args[0], args[1] if len(args) > 1 else kwargs.get("p", 0.5), True)[0]
        if func is torch._grouped_mm and args[0].dtype != torch.bfloat16:
            return _GroupedProduct.apply(*args[:2], kwargs.get("offs"))  # type: ignore[no-untyped-call]
        if func is Tensor.__bool__ and args[0].is_meta:
            return True  # who asks for values asks whether a mask hides nothing
        return func(*args, **kwargs)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        rows = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        of = [torch.empty_like(tensor) if needed else None
              for tensor, needed in zip((x, weight), ctx.needs_input_grad, strict=True)]  # fmt: skip
        return tuple(of)


class _GroupedProduct(torch.autograd.Function):
    """Rows (tokens, width), each times the matrix of its expert (experts, width, new width)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        num_experts, width, new_width = weight.shape
        # As many operations: the rows of one expert times the matrices of all.
        of_one = rows[: -(-rows.shape[0] // num_experts)]
        beside = weight.as_strided((width, num_experts * new_width), (num_experts * new_width, 1))
        return torch.mm(of_one, beside).view(-1)[: rows.shape[0] * new_width].view(-1, new_width)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(torch.empty_like(tensor) if is_needed else None for tensor, is_needed in needed)


class _Linear(torch.autograd.Function):
    """As the engine's (engine/direct.py)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        keep(ctx, x, weight if x.requires_grad else None)
        out = F.linear(x, weight, bias)
        return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = kept(ctx)
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            None if weight is None else rows.mm(weight).view(x.shape),
            None,
            rows.sum(0) if ctx.needs_input_grad[2] else None,
        )
