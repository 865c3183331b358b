"""Tensors inside the inputs and outputs of models: in containers, dataclasses and objects of any kind."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

# Types whose attributes are not searched: they hold no computed tensors, or are not plain objects.
_OPAQUE = (str, bytes, int, float, complex, type, FunctionType, MethodType, ModuleType, nn.Module)
# How many levels of objects are searched: a cache, its layers, and their attributes. Deeper objects are not the output.
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
        yield from tensors_in(getattr(value, "__dict__", {}), depth - 1)
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__"):
                    yield from tensors_in(getattr(value, name, None), depth - 1)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of the value, with `change` applied to its tensors. Return the value itself if none of its tensors
    changes, if it is neither a container nor a dataclass, or if it cannot be copied."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        old: dict[Any, Any] = dict(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        old = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    elif isinstance(value, Mapping):
        old = dict(value)
    else:
        return value
    new = {key: map_tensors(item, change) for key, item in old.items()}
    changed = {key: item for key, item in new.items() if item is not old[key]}
    return _with(value, new, changed) if changed else value


def _with(value: Any, new: dict[Any, Any], changed: dict[Any, Any]) -> Any:
    """A copy of a container or a dataclass with `new` items or fields, of which some are `changed`; the value itself if
    its class allows no copy."""
    kind = type(value)
    is_mapping: bool = isinstance(value, Mapping)
    is_dataclass: bool = dataclasses.is_dataclass(value)
    if kind in (list, tuple, dict):
        return new if kind is dict else kind(new.values())
    try:
        if isinstance(value, tuple):
            # A namedtuple may have a constructor of its own, which `_make` does not call.
            twin = getattr(kind, "_make", kind)(list(new.values()))
        elif is_dataclass and is_mapping:
            twin = dataclasses.replace(value, **changed)  # Hugging Face's outputs keep their fields as items, too
        elif is_mapping and not isinstance(value, MutableMapping):
            twin = kind(new)
        else:
            twin = copy.copy(value)
            for key, item in changed.items():
                if is_dataclass and not isinstance(value, list):
                    # Not `replace`, which calls the constructor. This also works if the class is frozen.
                    object.__setattr__(twin, key, item)
                else:
                    twin[key] = item
    except (TypeError, AttributeError, ValueError, KeyError, RuntimeError, copy.Error):
        return value
    return twin if type(twin) is kind else value
