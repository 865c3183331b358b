"""Weights in safetensors files: as a mapping that reads a tensor when it is used, and in the form that files have.

Files are memory-mapped: tensors come from the page cache, and none is held here. Names in a Hugging Face folder may
differ from those of the model: a prefix may be missing, tied weights are stored once, and some architectures store each
expert by itself, but compute with one tensor of all. The conversion rules are those of transformers, applied to one
tensor at a time when weights are read. An export undoes them. It is planned with shapes alone, on the meta device;
tensors that are converted together are converted once, when the first of them is written.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ...base.errors import ConfigurationError
from ...checkpoint.tensor_files import Source
from ..model import Transformer
from .facts import weight_files
from .llama import in_tree_name, llama_name
from .quantized import is_quantizable, packed

# Tables and masks that old versions saved with the weights, and that models compute now.
COMPUTED = re.compile(r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias|\.attention\.(masked_)?bias)$")


class LazyWeights(Mapping[str, Tensor]):
    """Tensors by name, each read or converted again on every access."""

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._makers = dict(makers)

    def __getitem__(self, name: str) -> Tensor:
        return self._makers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def with_tensors(self, tensors: Mapping[str, Tensor], names: Mapping[str, str] | None = None) -> "LazyWeights":
        """Return these tensors, renamed if `names` maps old names to new ones, together with `tensors`."""
        own = {name if names is None else names[name]: maker for name, maker in self._makers.items()}
        return LazyWeights(own | {name: partial(tensors.__getitem__, name) for name in tensors})


def stored_tensors(files: Iterable[Path]) -> LazyWeights:
    """The tensors of some files, under the names that they have there. Only headers are read now."""
    from safetensors import SafetensorError, safe_open  # not needed for random weights

    makers: dict[str, Callable[[], Tensor]] = {}
    for path in files:
        try:
            opened: Any = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ConfigurationError(f"{path} cannot be read as safetensors: {error}") from None
        makers |= {name: partial(opened.get_tensor, name) for name in opened.keys()}  # noqa: SIM118  it is no mapping
    return LazyWeights(makers)


def names_by_tensor(model: nn.Module) -> dict[int, list[str]]:
    """All names of each tensor of the state dict, by id; tied tensors have several, always in the same order."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return names


def names_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of each tensor of the state dict, by the first of them; tied tensors have several."""
    return {names[0]: tuple(names) for names in names_by_tensor(model).values()}


def in_tree_weights(model: nn.Module, folder: Path) -> LazyWeights:
    makers, quantized = packed(stored_tensors(weight_files(folder)))
    stored, expected = LazyWeights(makers), model.state_dict()
    names = {in_tree_name(name): name for name in stored if in_tree_name(name) in expected}
    _require_fit(model, stored, names, names, sorted(set(stored) - set(names.values())), folder, quantized)
    return LazyWeights({own: partial(stored.__getitem__, name) for own, name in names.items()})


def hugging_face_weights(model: Any, folder: Path) -> LazyWeights:
    """The weights of a transformers model on the meta device, under the model's names."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    makers, quantized = packed(stored_tensors(weight_files(folder)))
    stored = LazyWeights(makers)
    expected = model.state_dict()
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    converter_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    names: dict[str, str] = {}  # from the model's names to those in the files
    parts: dict[str, list[tuple[str, str]]] = {}  # (pattern, stored name), by the first tensor they produce
    unknown = []
    for name in sorted(stored, key=dot_natural_key):
        own, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        if own not in expected and name in expected:
            own, pattern = name, None
        if own not in expected:
            unknown.append(name)
        elif pattern is None:
            names[own] = name
        else:
            parts.setdefault(own, []).append((pattern, name))
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ())]
    unknown = [name for name in unknown if not COMPUTED.search(name) and not any(re.search(p, name) for p in ignored)]
    makers = {own: partial(stored.__getitem__, name) for own, name in names.items()}

    def converted(rule: Any, first: str, target: str) -> Tensor:
        """A tensor that a rule makes from several stored ones, or from a part of one."""
        rule = deepcopy(rule)
        for pattern, name in parts[first]:
            rule.add_tensor(first, name, pattern, stored[name])
        made: Any = rule.convert(first, model=model, config=model.config)[target]
        return made[0] if isinstance(made, list) else made

    for first, ((pattern, _), *_) in parts.items():
        rule = converter_of[pattern]
        for target_pattern in rule.target_patterns:
            target = first.replace(rule.target_patterns[0], target_pattern)
            makers[target] = partial(converted, rule, first, target)
    if quantized:
        for own, tensor in expected.items():
            if is_quantizable(own, tensor.ndim) != (names.get(own) in quantized):
                how = "is stored as nf4 outside" if names.get(own) in quantized else "is not stored as nf4 in"
                raise ConfigurationError(
                    f"model {str(folder)!r}: {own!r} {how} the blocks: use the unquantised weights"
                )
    _require_fit(model, stored, names, makers, unknown, folder, quantized)
    # An export undoes these rules, so that it has the names of the original folder.
    model._weight_conversions = [rule for rule in rules if rule.was_used()]
    return LazyWeights(makers)


def _require_fit(
    model: nn.Module,
    stored: Mapping[str, Tensor],
    names: Mapping[str, str],
    made: Iterable[str],
    unknown: list[str],
    folder: Path,
    quantized: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> None:
    """Raise ConfigurationError unless the files have every tensor of the model in its shape, and no other.

    `names` are the stored names of tensors that are not converted; `made` are the names of all readable ones;
    `quantized` are the shapes of those that are stored in fewer bits.
    """
    expected = model.state_dict(keep_vars=True)
    tensors = names_of(model)
    missing = [first for first, tied in tensors.items() if not {*tied} & {*made}]
    # Tensors of mapped files are views: their shapes are compared, and no values are read.
    shapes = {own: quantized.get(name) or tuple(stored[name].shape) for own, name in names.items()}
    wrong = next((own for own, shape in shapes.items() if shape != tuple(expected[own].shape)), None)
    if missing:
        why = f"its files lack {len(missing)} of the model's {len(tensors)} tensors, first {missing[0]!r}"
    elif unknown:
        why = f"{len(unknown)} tensors in its files are not in a {type(model).__name__}, first {unknown[0]!r}"
    elif wrong is not None:
        why = f"{names[wrong]!r} is {shapes[wrong]} in its files, {tuple(expected[wrong].shape)} by its config.json"
    else:
        return
    raise ConfigurationError(f"model {str(folder)!r}: {why}")


# The form in files


def stored_form(inner: Any, sources: Iterable[Source], names: Mapping[str, Sequence[str]]) -> list[Source]:
    """Return the tensors under the names that the architecture uses in files. `names`: all names of tied tensors.

    Conversions that transformers applies when it loads weights are undone.
    """
    if isinstance(inner, Transformer):
        return [replace(source, name=llama_name(source.name)) for source in sources]
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    plain: dict[str, Source] = {}
    for source in sources:
        tied = names.get(source.name, ())
        # A tied tensor has several names. Use the one that transformers expects in a file.
        left = remove_tied_weights_from_state_dict(dict.fromkeys(tied, torch.zeros(1)), inner) if len(tied) > 1 else ()
        plain[next(iter(left), source.name)] = source

    def revert(names: Iterable[str]) -> dict[str, Tensor]:
        return dict(revert_weight_conversion(inner, {name: shapes[name] for name in names}))

    shapes = {name: torch.empty(s.shape, dtype=s.dtype, device="meta") for name, s in plain.items()}
    origin = {id(shape): name for name, shape in shapes.items()}
    written: dict[str, list[Source]] = {}
    made: dict[str, Tensor] = {}
    for name, shape in revert(shapes).items():
        if id(shape) in origin:
            written[origin[id(shape)]] = [replace(plain[origin[id(shape)]], name=name)]
        else:
            made[name] = shape
    groups = _groups({name: set(revert([name])) for name in shapes if name not in written})
    outcome = {name: shape for group in groups for name, shape in revert(group).items()}
    if {name: shape.shape for name, shape in outcome.items()} != {name: shape.shape for name, shape in made.items()}:
        # A rule depends on more tensors than it changes: convert all of them at once.
        groups = [[name for name in shapes if name not in written]]

    def rows(group: Sequence[str], held: dict[str, Tensor], name: str) -> list[Tensor]:
        """Convert the tensors of a group together; they are held until the last of them is written."""
        if not held:
            held.update(revert_weight_conversion(inner, {part: plain[part].read() for part in group}))
        return [held.pop(name).contiguous()]

    for group in groups:
        own_rows = partial(rows, group, {})
        written[group[0]] = [
            Source(name, shape.dtype, tuple(shape.shape), partial(own_rows, name))
            for name, shape in revert(group).items()
        ]
    return [source for name in shapes for source in written.get(name, ())]


def _groups(targets: Mapping[str, set[str]]) -> list[list[str]]:
    """Group tensors that are converted to the same tensors of the files."""
    groups: list[tuple[list[str], set[str]]] = []
    for name, made in targets.items():
        common = [group for group in groups if group[1] & made]
        groups = [group for group in groups if not group[1] & made]
        groups.append(([*(n for group in common for n in group[0]), name], made.union(*(group[1] for group in common))))
    return [names for names, _ in groups]
