"""Replaces parts of a Hugging Face model by torch's fused operations: the same function in fewer passes over memory.

The RMS norms of most architectures are eight operations that save tensors in fp32; torch has one kernel for them. A
part is known by the code of its forward, not by its name: a class whose code differs in any way is left as it is.
Weights, names and exports do not change, and results differ within the rounding of the dtype only. Attention needs no
replacement: transformers calls torch's own, without repeated keys, and without a mask where there is no padding.
"""

from collections.abc import Callable
from functools import cache
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Forward = Callable[..., Any]


def _norm_of_llama(self: Any, hidden_states: Any) -> Any:
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)


def _norm_of_olmo(self: Any, hidden_states: Any) -> Any:
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return (self.weight * hidden_states).to(input_dtype)


def _fused_norm(plain: Forward) -> Forward:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != self.weight.dtype:  # torch has no kernel for two dtypes
            return plain(self, hidden_states)
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)

    return forward


# Forwards as transformers writes them (variable names included), and what makes a replacement of each.
_REPLACEMENTS: tuple[tuple[Forward, Callable[[Forward], Forward]], ...] = (
    (_norm_of_llama, _fused_norm),  # Llama, Mistral, Qwen, Phi-3, Granite, ...
    (_norm_of_olmo, _fused_norm),  # OLMo 2 and 3, gpt-oss
)


def use_fused_parts(model: nn.Module) -> int:
    """Replace the parts that are known, and return their number."""
    num_replaced = 0
    for module in model.modules():
        fused: Any = _fused_class(type(module))  # type: ignore[arg-type]  # mypy takes no class for hashable
        if fused is not None and "forward" not in module.__dict__:
            module.__class__ = fused
            num_replaced += 1
    return num_replaced


@cache
def _fused_class(cls: type[nn.Module]) -> type[nn.Module] | None:
    """Return a subclass with the same name and the replaced forward; None if the class is not known."""
    code = getattr(cls.forward, "__code__", None)
    for known, fused in _REPLACEMENTS:
        if code is not None and _parts_of(code) == _parts_of(known.__code__):
            names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
            return type(cls.__name__, (cls,), {**names, "forward": fused(cls.forward)})
    return None


def _parts_of(code: CodeType) -> tuple[Any, ...]:
    return code.co_code, code.co_consts, code.co_names, code.co_varnames
