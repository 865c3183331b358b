"""Weights for a model built on the meta device, one unit at a time.

Every module draws from a generator seeded by the seed and its own name, so the weights depend neither on the layout
nor on the number of ranks, and no rank ever holds more than its share and one unit.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import ConfigurationError


def initialise_module(model: nn.Module, path: str, module: nn.Module, seed: int, device: torch.device) -> None:
    """Give a module's own meta parameters and buffers real memory and their initial values."""
    own = [*module._parameters.values(), *module._buffers.values()]
    if not any(tensor is not None and tensor.is_meta for tensor in own):
        return
    reset = _reset_of(model, path, module)
    for name, param in module._parameters.items():
        if param is not None and param.is_meta:
            module._parameters[name] = _unfilled(param, device)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device=device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        digest = hashlib.sha256(f"{seed}:{path}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        reset()


def _unfilled(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    # NaN, so that a reset that forgets a parameter is seen at the first loss instead of training on old memory.
    filled = torch.full(param.shape, float("nan"), dtype=param.dtype, device=device)
    return nn.Parameter(filled, requires_grad=param.requires_grad)


def _reset_of(model: nn.Module, path: str, module: nn.Module) -> Callable[[], Any]:
    """The module's own `reset_parameters`, or the way its Hugging Face model initialises it."""
    for owner in model.modules():
        init_weights = getattr(owner, "_init_weights", None)
        if callable(init_weights) and any(child is module for child in owner.modules()):
            return lambda: init_weights(module)
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            return reset
    raise ConfigurationError(
        f"module {path!r} ({type(module).__name__}) is on the meta device and has no reset_parameters(): "
        "give it one, or build the model on a real device"
    )
