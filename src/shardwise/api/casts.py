"""Casts that a model needs to compute in 16 bits: around modules that stay in fp32, and of inputs in another dtype.

Some modules compute in fp32 with every precision: those that the precision or the model itself names, those with
running statistics (which are fp32), and parametrizations, which compute weights from other tensors. The inputs of these
modules are cast to fp32, and their outputs back to the compute dtype.

Many models make fp32 tensors as they run: tables of positions, masks, coordinates. If one is the input of a torch layer
that refuses to mix dtypes, it is cast to the dtype of the layer's weights. Language models do not need that, so the
hook of a layer is removed if its first calls had nothing to cast.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import wraps
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..base.dtypes import FP16, FP32
from ..base.errors import ConfigurationError, did_you_mean
from ..core.engine.nested_tensors import map_tensors
from ..core.precision import Precision
from ..core.schedule.model import matches
from ..core.unit.state import Unit

# Layers of torch whose inputs must have the dtype of their weights. Other layers promote dtypes, and get no casts. We
# compare forwards, not classes: a subclass with its own forward may need its inputs unchanged.
_STRICT = {kind.forward for kind in (
    nn.Linear, nn.Bilinear, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell,
    nn.LSTMCell, nn.GRUCell, nn.MultiheadAttention, nn.PReLU,
)}  # fmt: skip
# Modules of Hugging Face that fail in 16 bits: Fourier transforms, products with fp32 buffers, and routers that cast
# their own weights to fp32.
_BROKEN_BY_16_BITS = {
    "fnet.modeling_fnet.FNetBasicFourierTransform",
    "openai.modeling_openai.Attention",
    "switch_transformers.modeling_switch_transformers.SwitchTransformersTop1Router",
    "nllb_moe.modeling_nllb_moe.NllbMoeTop2Router",
}
# After this many calls without anything to cast, a layer's hook is removed.
_CALLS_TO_TRUST = 3


def fp32_patterns(model: nn.Module, precision: Precision) -> tuple[str, ...]:
    """Patterns of modules that compute in fp32: those that the precision names, and those that this model needs."""
    known = [path for path, _ in model.named_modules()]
    for pattern in precision.keep_fp32:
        if not any(fnmatchcase(path, pattern) for path in known):
            raise ConfigurationError(f"keep_fp32: {pattern!r} matches no module; {did_you_mean(pattern, known)[:300]}")
    if precision.compute == FP32:
        return precision.keep_fp32
    names: set[str] = set()
    paths: list[str] = []
    for path, module in model.named_modules():
        names.update(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
        if precision.compute == FP16:
            names.update(getattr(module, "_keep_in_fp32_modules", None) or ())
        needs_fp32 = (
            (isinstance(module, _NormBase) and module.running_mean is not None)
            or isinstance(module, ParametrizationList)
            # Torch's older weight norm and spectral norm compute the weights before each forward.
            or any(isinstance(hook, (WeightNorm, SpectralNorm)) for hook in module._forward_pre_hooks.values())
            or _name_of(type(module)).removeprefix("transformers.models.") in _BROKEN_BY_16_BITS
        )
        if path and needs_fp32:
            paths.append(escape(path))
    by_name = sorted(pattern for name in names for pattern in (name, f"*.{name}"))
    return (*precision.keep_fp32, *by_name, *paths)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def install_casts(
    modules: dict[str, nn.Module], units: Sequence[Unit], precision: Precision, patterns: Sequence[str]
) -> None:
    """Install hooks and forwards that cast. `patterns` are patterns of modules that compute in fp32."""
    device, compute = units[0].states[0].device.type, precision.compute.torch
    sites = [site for unit in units for state in unit.states for spec in state.flat.params for site in spec.sites]
    # A weight with a parametrization counts as a weight of the layer on which the parametrization is registered.
    for path in dict.fromkeys(site.module.partition(".parametrizations.")[0] for site in sites):
        kind = type(modules[path])
        is_conv = issubclass(kind, _ConvNd) or _name_of(kind) == "transformers.pytorch_utils.Conv1D"
        if precision.compute != FP32 and (is_conv or kind.forward in _STRICT):
            _InputCast(modules[path], torch.float32 if matches(path, patterns) else compute, device)
    inside = [path for path in modules if any(fnmatchcase(path, pattern) for pattern in patterns)]
    outermost = [path for path in inside if not any(path.startswith(f"{other}.") for other in inside)]
    _cast_at_borders([modules[path] for path in outermost], compute)
    if precision.autocast is not None:
        # Units get autocast as well: a user may call a part of the model without its root.
        for module in dict.fromkeys([modules[""], *(unit.module for unit in units)]):
            _run_under_autocast(module, device, precision.autocast.torch)


def _cast_at_borders(modules: Iterable[nn.Module], compute: torch.dtype) -> None:
    """Cast the inputs of modules that stay in fp32 to fp32, and their outputs to the compute dtype.

    An output without dimensions, such as a loss, stays in fp32. Torch's batch norm takes 16-bit inputs with fp32
    weights, and needs no casts.
    """

    def enter(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype == compute else tensor

    def leave(tensor: Tensor) -> Tensor:
        return tensor.to(compute) if tensor.dtype == torch.float32 and tensor.ndim else tensor

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return map_tensors(args, enter), map_tensors(kwargs, enter)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return map_tensors(output, leave)

    for module in modules:
        if type(module).forward is not nn.BatchNorm1d.forward:
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(after)


class _InputCast:
    """Casts the inputs of a layer to the dtype of its weights; removed if the first calls had nothing to cast."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: str) -> None:
        self._dtype = dtype
        self._device = device
        self._is_needed = False
        self._num_calls = 0
        self._handle = module.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_autocast_enabled(self._device):
            return None
        changed = map_tensors(args, self._enter), map_tensors(kwargs, self._enter)
        # While torch.compile traces, calls are not counted: the graph contains the casts that were needed.
        if torch.compiler.is_compiling() or self._is_needed:
            return changed
        self._is_needed = changed[0] is not args or changed[1] is not kwargs
        self._num_calls += 1
        if self._num_calls == _CALLS_TO_TRUST and not self._is_needed:
            self._handle.remove()
        return changed

    def _enter(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() and tensor.dtype != self._dtype else tensor


def _run_under_autocast(module: nn.Module, device: str, dtype: torch.dtype) -> None:
    forward = module.forward

    @wraps(forward)
    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype, cache_enabled=False):
            return forward(*args, **kwargs)

    module.forward = under_autocast
