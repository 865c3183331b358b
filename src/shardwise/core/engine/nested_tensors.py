"""Tensors inside the inputs and outputs of models: in containers, dataclasses and objects of any kind."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

# Types that hold no computed tensors, or are no plain objects.
_OPAQUE = (str, bytes, int, float, complex, type, FunctionType, MethodType, ModuleType, nn.Module)
# The depth of objects inside objects: a cache, its layers, and their attributes. Deeper objects are not the output.
_DEPTH = 3


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """The tensors of a module's output: bare, in containers, in dataclasses, in attributes of other objects."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item, depth)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), depth)
    elif depth and value is not None and not isinstance(value, _OPAQUE):
        for item in _attributes(value):
            yield from tensors_in(item, depth - 1)


def _attributes(value: Any) -> Iterator[Any]:
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield getattr(value, name, None)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same value with its tensors changed; the value itself if none of its tensors changes, if it is neither a
    container nor a dataclass, or if it cannot be copied."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return _with(value, items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        changed = {name: map_tensors(item, change) for name, item in found.items()}
        changed = {name: item for name, item in changed.items() if item is not found[name]}
        return _with(value, changed) if changed else value
    if isinstance(value, Mapping):
        pairs = {key: map_tensors(item, change) for key, item in value.items()}
        if all(pairs[key] is value[key] for key in pairs):
            return value
        return _with(value, pairs)
    return value


def _with(value: Any, new: Any) -> Any:
    """A copy of a container or a dataclass with new items or fields; the value itself if its class allows no copy."""
    kind = type(value)
    is_mapping: bool = isinstance(value, Mapping)
    is_dataclass: bool = dataclasses.is_dataclass(value)
    if kind in (list, tuple, dict):
        return kind(new)
    try:
        if isinstance(value, tuple):
            # A namedtuple may have a constructor of its own, which `_make` passes by.
            twin = getattr(kind, "_make", kind)(new)
        elif is_dataclass and is_mapping:
            twin = dataclasses.replace(value, **new)  # Hugging Face's outputs keep their fields as items, too
        elif is_mapping and not isinstance(value, MutableMapping):
            twin = kind(new)
        else:
            twin = copy.copy(value)
            if isinstance(value, list):
                twin[:] = new
            elif is_dataclass:
                # Not `replace`: fields may be no arguments, and constructors may do more than take them. Frozen, too.
                for name, item in new.items():
                    object.__setattr__(twin, name, item)
            else:
                for key, item in new.items():
                    twin[key] = item
    except (TypeError, AttributeError, ValueError, KeyError, RuntimeError, copy.Error):
        return value
    return twin if type(twin) is kind else value
