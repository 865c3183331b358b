"""Low-rank adapters added to the weights that they were trained on, one at a time, in fp32: W + scale * B @ A."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from ...base.errors import ConfigurationError
from ...checkpoint.tensor_files import Source
from ...checkpoint.writer import converted
from .forms import base_name, is_adapter
from .lora import ADAPTER


@dataclass(frozen=True, slots=True)
class _Adapter:
    down: str  # the name of A
    up: str  # of B
    scale: float
    is_transposed: bool


def merged(model: Any, sources: Iterable[Source]) -> list[Source]:
    """A model's own tensors, under the names that they had before peft, with the adapters in them."""
    sources = list(sources)
    by_name = {source.name: source for source in sources}
    adapters = _adapters_of(model)
    found = []
    for source in sources:
        if is_adapter(source.name):
            continue
        rows = source.rows
        if source.name in adapters:
            adapter = adapters.pop(source.name)
            rows = partial(_merged_rows, source, by_name[adapter.down], by_name[adapter.up], adapter)
        found.append(Source(base_name(source.name), source.dtype, source.shape, rows))
    if adapters:
        raise ConfigurationError(f"adapters on {next(iter(adapters))!r}, which is not among the weights to merge with")
    return found


def _merged_rows(source: Source, down: Source, up: Source, adapter: _Adapter) -> list[Tensor]:
    product = up.read().float() @ down.read().float()
    whole = source.read().float()
    whole.add_(product.T if adapter.is_transposed else product, alpha=adapter.scale)
    return [converted(source.name, whole, source.dtype)]


def _adapters_of(model: Any) -> dict[str, _Adapter]:
    """By the name of the weight that each is added to."""
    config = model.peft_config[ADAPTER]
    unusual = [key for key in ("use_dora", "lora_bias", "modules_to_save") if getattr(config, key, None)]
    if unusual:
        raise ConfigurationError(f"adapters with {unusual[0]} cannot be merged here: use peft's merge_and_unload")
    found: dict[str, _Adapter] = {}
    for path, layer in model.named_modules():
        scaling = getattr(layer, "scaling", None)
        if not isinstance(scaling, dict) or ADAPTER not in scaling:
            continue
        weight = layer.get_base_layer().weight
        if weight.dim() != 2:
            raise ConfigurationError(f"adapters on {path!r}, which is no matrix, cannot be merged here")
        if ADAPTER in layer.lora_embedding_A:
            names = (f"{path}.lora_embedding_A.{ADAPTER}", f"{path}.lora_embedding_B.{ADAPTER}")
            is_transposed = True
        else:
            names = (f"{path}.lora_A.{ADAPTER}.weight", f"{path}.lora_B.{ADAPTER}.weight")
            is_transposed = bool(getattr(layer, "fan_in_fan_out", False))
        found[f"{path}.base_layer.weight"] = _Adapter(*names, float(scaling[ADAPTER]), is_transposed)
    return found
