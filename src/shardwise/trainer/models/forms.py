"""A model's tensors in the form that files have: other names, tied weights once, experts and adapters separate.

Everything is planned with shapes alone, on the meta device. Values are read when they are written; tensors that are
converted together are converted once, when the first of them is written. Adapters can be merged into the weights that
they were trained on, one weight at a time, in fp32: W + scale * B @ A.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...base.errors import CheckpointError, ConfigurationError
from ...checkpoint.tensor_files import Source
from ...checkpoint.writer import converted
from ..model import Transformer
from .llama import llama_name
from .lora import ADAPTER
from .weights import names_by_tensor

_WRAPPER, _BASE_LAYER = "base_model.model.", ".base_layer."


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def base_name(name: str) -> str:
    """The name without the parts that peft adds."""
    return name.removeprefix(_WRAPPER).replace(_BASE_LAYER, ".")


def names_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of each tensor of the state dict, by the first of them; tied tensors have several."""
    return {names[0]: tuple(names) for names in names_by_tensor(model).values()}


def stored_form(inner: Any, sources: Iterable[Source], names: Mapping[str, Sequence[str]]) -> list[Source]:
    """The tensors under the names that the architecture has in files. `names` are those of tied tensors."""
    if isinstance(inner, Transformer):
        return [_renamed(source, llama_name(source.name)) for source in sources]
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    plain: dict[str, Source] = {}
    for source in sources:
        tied = names.get(source.name, ())
        # Of a tied tensor, transformers keeps the name that it expects in a file.
        kept = remove_tied_weights_from_state_dict(dict.fromkeys(tied, torch.zeros(1)), inner) if len(tied) > 1 else ()
        plain[next(iter(kept), source.name)] = source
    return _converted(inner, plain)


def _converted(inner: Any, plain: Mapping[str, Source]) -> list[Source]:
    """Undo the conversions that transformers applies when it loads weights."""
    from transformers.core_model_loading import revert_weight_conversion

    def revert(names: Iterable[str]) -> dict[str, Tensor]:
        return dict(revert_weight_conversion(inner, {name: shapes[name] for name in names}))

    shapes = {name: torch.empty(s.shape, dtype=s.dtype, device="meta") for name, s in plain.items()}
    wanted = revert(shapes)
    origin = {id(shape): name for name, shape in shapes.items()}
    found: dict[str, list[Source]] = {}
    made: dict[str, Tensor] = {}
    for name, shape in wanted.items():
        if id(shape) in origin:
            found[origin[id(shape)]] = [_renamed(plain[origin[id(shape)]], name)]
        else:
            made[name] = shape
    groups = _groups({name: set(revert([name])) for name in shapes if name not in found})
    outcome = {name: shape for group in groups for name, shape in revert(group).items()}
    if {name: shape.shape for name, shape in outcome.items()} != {name: shape.shape for name, shape in made.items()}:
        # A rule depends on more tensors than it changes: convert all of them at once.
        groups = [[name for name in shapes if name not in found]]
    for group in groups:
        found[group[0]] = _Converted(inner, [(name, plain[name]) for name in group]).sources(revert(group))
    return [source for name in shapes for source in found.get(name, ())]


def _groups(targets: Mapping[str, set[str]]) -> list[list[str]]:
    """Group tensors that are converted to the same tensors of the files."""
    groups: list[tuple[list[str], set[str]]] = []
    for name, made in targets.items():
        common = [group for group in groups if group[1] & made]
        groups = [group for group in groups if not group[1] & made]
        groups.append(([*(n for group in common for n in group[0]), name], made.union(*(group[1] for group in common))))
    return [names for names, _ in groups]


class _Converted:
    """Tensors that are converted together. They are held until the last of them is written."""

    def __init__(self, inner: Any, parts: list[tuple[str, Source]]) -> None:
        self._inner = inner
        self._parts = parts
        self._held: dict[str, Tensor] = {}

    def sources(self, shapes: Mapping[str, Tensor]) -> list[Source]:
        return [
            Source(name, shape.dtype, tuple(shape.shape), partial(self._rows, name)) for name, shape in shapes.items()
        ]

    def _rows(self, name: str) -> list[Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        if not self._held:
            given = {part: source.read() for part, source in self._parts}
            self._held = dict(revert_weight_conversion(self._inner, given))
        return [self._held.pop(name).contiguous()]


def adapter_form(model: Any, adapters: Sequence[Source]) -> list[Source]:
    """Adapters under the names that peft expects."""
    from peft import get_peft_model_state_dict

    shapes = {source.name: torch.empty(0, device="meta") for source in adapters}
    found = get_peft_model_state_dict(model, state_dict=shapes, adapter_name=ADAPTER, save_embedding_layers=False)
    sources = {id(shapes[source.name]): source for source in adapters}
    if {id(shape) for shape in found.values()} != set(sources):
        raise CheckpointError("peft stores these adapters in another form than the model has: merge them")
    in_file = llama_name if isinstance(model.get_base_model(), Transformer) else str
    return [_renamed(sources[id(shape)], in_file(name)) for name, shape in found.items()]


def _renamed(source: Source, name: str) -> Source:
    return replace(source, name=name)


@dataclass(frozen=True, slots=True)
class _Adapter:
    down: str  # the name of A
    up: str  # the name of B
    scale: float
    is_transposed: bool


def merged(model: Any, sources: Iterable[Source]) -> list[Source]:
    """The base model's tensors under their own names, with the adapters merged into them."""
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
    """Adapters by the name of the weight that each is added to."""
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
            raise ConfigurationError(f"adapters on {path!r}, which is not a matrix, cannot be merged here")
        if ADAPTER in layer.lora_embedding_A:
            names = (f"{path}.lora_embedding_A.{ADAPTER}", f"{path}.lora_embedding_B.{ADAPTER}")
            is_transposed = True
        else:
            names = (f"{path}.lora_A.{ADAPTER}.weight", f"{path}.lora_B.{ADAPTER}.weight")
            is_transposed = bool(getattr(layer, "fan_in_fan_out", False))
        found[f"{path}.base_layer.weight"] = _Adapter(*names, float(scaling[ADAPTER]), is_transposed)
    return found
