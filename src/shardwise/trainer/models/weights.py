"""Weights in safetensors files, as a mapping that reads a tensor when it is used.

Files are memory-mapped: tensors come from the page cache, and none is held here. Names in a Hugging Face folder may
differ from those of the model: a prefix may be missing, tied weights are stored once, and some architectures store
separately what they compute with as one tensor (experts). The rules are those of transformers, applied to one tensor
at a time.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...base.errors import ConfigurationError
from .facts import weight_files
from .llama import in_tree_name

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

    def renamed(self, names: Mapping[str, str]) -> "LazyWeights":
        """The same tensors under new names: `names` maps old to new."""
        return LazyWeights({names[name]: maker for name, maker in self._makers.items()})

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "LazyWeights":
        return LazyWeights({**self._makers, **{name: partial(_identity, tensor) for name, tensor in tensors.items()}})


def _identity(tensor: Tensor) -> Tensor:
    return tensor


class StoredTensors:
    """The tensors of some files: names and shapes are read from headers, values on demand."""

    def __init__(self, files: list[Path]) -> None:
        from safetensors import SafetensorError, safe_open  # not needed for random weights

        self._files: dict[str, Any] = {}
        for path in files:
            try:
                opened: Any = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ConfigurationError(f"{path} cannot be read as safetensors: {error}") from None
            self._files.update(dict.fromkeys(opened.keys(), opened))

    @property
    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._files[name].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def float_dtype(self) -> torch.dtype:
        """The dtype of the first floating-point tensor."""
        for name in self._files:
            dtype = self.read(name).dtype  # a view of the mapped file, nothing is read
            if dtype.is_floating_point:
                return dtype
        return torch.float32


def names_by_tensor(model: nn.Module) -> dict[int, list[str]]:
    """All names of each tensor of the state dict, by id; tied tensors have several, always in the same order."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return names


def in_tree_weights(model: nn.Module, folder: Path) -> LazyWeights:
    stored = StoredTensors(weight_files(folder))
    expected = model.state_dict()
    names = {in_tree_name(name): name for name in stored.names if in_tree_name(name) in expected}
    _require_fit(model, stored, names, set(), sorted(set(stored.names) - set(names.values())), folder)
    return LazyWeights({own: partial(stored.read, name) for own, name in names.items()})


def hugging_face_weights(model: Any, folder: Path) -> LazyWeights:
    """The weights of a transformers model on the meta device, under the model's names."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    stored = StoredTensors(weight_files(folder))
    expected = model.state_dict()
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    converter_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    names: dict[str, str] = {}  # of the model's tensors to those in the files
    conversions: dict[str, _Conversion] = {}  # by the first tensor that they produce
    unknown = []
    for name in sorted(stored.names, key=dot_natural_key):
        own, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        if own not in expected and name in expected:
            own, pattern = name, None
        if own not in expected:
            unknown.append(name)
        elif pattern is None:
            names[own] = name
        else:
            conversion = conversions.setdefault(own, _Conversion(converter_of[pattern], own, model))
            conversion.parts.append((pattern, name))
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ())]
    unknown = [name for name in unknown if not COMPUTED.search(name) and not any(re.search(p, name) for p in ignored)]
    makers: dict[str, Callable[[], Tensor]] = {own: partial(stored.read, name) for own, name in names.items()}
    for conversion in conversions.values():
        makers |= {target: partial(conversion.make, stored, target) for target in conversion.targets}
    _require_fit(model, stored, names, set(makers), unknown, folder)
    # An export undoes these rules, so that it has the names of the original folder.
    model._weight_conversions = [rule for rule in rules if rule.was_used()]
    return LazyWeights(makers)


class _Conversion:
    """Tensors of a model that a rule of transformers makes from several stored ones, or from a part of one."""

    def __init__(self, rule: Any, first_target: str, model: Any) -> None:
        self.rule = rule
        self.parts: list[tuple[str, str]] = []  # source pattern, stored name
        self._first_target = first_target
        self._model = model

    @property
    def targets(self) -> list[str]:
        first, *_ = patterns = self.rule.target_patterns
        return [self._first_target.replace(first, pattern) for pattern in patterns]

    def make(self, stored: StoredTensors, target: str) -> Tensor:
        rule = deepcopy(self.rule)
        for pattern, name in self.parts:
            rule.add_tensor(self._first_target, name, pattern, stored.read(name))
        made = rule.convert(self._first_target, model=self._model, config=self._model.config)[target]
        tensor: Tensor = made[0] if isinstance(made, list) else made
        return tensor


def _require_fit(
    model: nn.Module,
    stored: StoredTensors,
    names: Mapping[str, str],
    made: set[str],
    unknown: list[str],
    folder: Path,
) -> None:
    """Raise ConfigurationError unless the files have every tensor of the model in its shape, and no other.

    `names` are the stored names of tensors that are not converted; `made` are all that can be read.
    """
    expected = model.state_dict(keep_vars=True)
    tensors = names_by_tensor(model).values()
    missing = [tied[0] for tied in tensors if not any(name in names or name in made for name in tied)]
    if missing:
        raise ConfigurationError(
            f"model {str(folder)!r}: its files lack {len(missing)} of the model's {len(tensors)} tensors, "
            f"first {missing[0]!r}"
        )
    if unknown:
        raise ConfigurationError(
            f"model {str(folder)!r}: {len(unknown)} tensors in its files are not in a {type(model).__name__}, "
            f"first {unknown[0]!r}"
        )
    for own, name in names.items():
        if stored.shape(name) != expected[own].shape:
            raise ConfigurationError(
                f"model {str(folder)!r}: {name!r} is {tuple(stored.shape(name))} in its files, "
                f"{tuple(expected[own].shape)} by its config.json"
            )
