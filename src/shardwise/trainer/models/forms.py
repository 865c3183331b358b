"""A model's tensors as they lie in files: other names, tied weights once, experts and adapters apart.

All of it is planned with shapes alone, on the meta device. Values are asked for when they are written, and what is made
of several tensors, or several of one, is made once, when the first of it is written.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...base.errors import CheckpointError
from ...checkpoint.tensor_files import Source
from ..model import Transformer
from .llama import llama_name
from .lora import ADAPTER

_WRAPPER, _BASE_LAYER = "base_model.model.", ".base_layer."


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def base_name(name: str) -> str:
    """What peft has put around a name is taken away; other names are as they are."""
    return name.removeprefix(_WRAPPER).replace(_BASE_LAYER, ".")


def names_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The names of each tensor of the state dict, by the first of them; tied ones have several."""
    found: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), []).append(name)
    return {names[0]: tuple(names) for names in found.values()}


def stored_form(inner: Any, sources: Iterable[Source], names: Mapping[str, Sequence[str]]) -> list[Source]:
    """Under the names that the architecture has in files. `names`: those of a tensor, where it has more than one."""
    if isinstance(inner, Transformer):
        return [_renamed(source, llama_name(source.name)) for source in sources]
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    plain: dict[str, Source] = {}
    for source in sources:
        tied = names.get(source.name, ())
        # One tensor under all names: what is left is the one under which it is looked for.
        left = remove_tied_weights_from_state_dict(dict.fromkeys(tied, torch.zeros(1)), inner) if len(tied) > 1 else ()
        plain[next(iter(left), source.name)] = source
    return _converted(inner, plain)


def _converted(inner: Any, plain: Mapping[str, Source]) -> list[Source]:
    """What transformers did to the tensors when it loaded them is undone."""
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
        # Rules that look at more than the tensors they change: all of these at once.
        groups = [[name for name in shapes if name not in found]]
    for group in groups:
        found[group[0]] = _Made(inner, [(name, plain[name]) for name in group]).sources(revert(group))
    return [source for name in shapes for source in found.get(name, ())]


def _groups(targets: Mapping[str, set[str]]) -> list[list[str]]:
    """Tensors that have a part in the same ones in the files."""
    groups: list[tuple[list[str], set[str]]] = []
    for name, made in targets.items():
        common = [group for group in groups if group[1] & made]
        groups = [group for group in groups if not group[1] & made]
        groups.append(([*(n for group in common for n in group[0]), name], made.union(*(group[1] for group in common))))
    return [names for names, _ in groups]


class _Made:
    """Tensors that are made together. They are held until the last of them is written."""

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
    """Under the names that peft looks for."""
    from peft import get_peft_model_state_dict

    shapes = {source.name: torch.empty(0, device="meta") for source in adapters}
    found = get_peft_model_state_dict(model, state_dict=shapes, adapter_name=ADAPTER, save_embedding_layers=False)
    sources = {id(shapes[source.name]): source for source in adapters}
    if {id(shape) for shape in found.values()} != set(sources):
        raise CheckpointError("peft keeps these adapters in another form than they have in the model: merge them")
    in_file = llama_name if isinstance(model.get_base_model(), Transformer) else str
    return [_renamed(sources[id(shape)], in_file(name)) for name, shape in found.items()]


def _renamed(source: Source, name: str) -> Source:
    return replace(source, name=name)
