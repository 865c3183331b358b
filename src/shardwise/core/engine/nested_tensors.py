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
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item, depth)
    elif isinstance(value, Mapping):
        for item in value.values():
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
    """The same value with its tensors changed; the value itself, if none of its tensors changes.

    Values that are neither containers nor dataclasses, or cannot be copied, are returned unchanged, too.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return _with_items(value, items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        changed = {name: map_tensors(item, change) for name, item in found.items()}
        changed = {name: item for name, item in changed.items() if item is not found[name]}
        return _with_fields(value, changed) if changed else value
    if isinstance(value, Mapping):
        pairs = {key: map_tensors(item, change) for key, item in value.items()}
        if all(pairs[key] is value[key] for key in pairs):
            return value
        return pairs if type(value) is dict else _with_pairs(value, pairs)
    return value


def _with_items(value: Any, items: list[Any]) -> Any:
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(items)
    if isinstance(value, tuple):
        # A namedtuple may have a constructor of its own, which `_make` passes by.
        make = getattr(kind, "_make", kind)
        return _made(lambda: make(items), value)

    def made() -> Any:
        twin = copy.copy(value)
        twin[:] = items
        return twin

    return _made(made, value)


def _with_fields(value: Any, changed: dict[str, Any]) -> Any:
    is_mapping: bool = isinstance(value, Mapping)
    if is_mapping:  # Hugging Face's outputs keep their fields as items, too
        return _made(lambda: dataclasses.replace(value, **changed), value)

    def made() -> Any:
        # Not `replace`: fields may be no arguments, and constructors may do more than take them. Frozen ones, too.
        twin = copy.copy(value)
        for name, item in changed.items():
            object.__setattr__(twin, name, item)
        return twin

    return _made(made, value)


def _with_pairs(value: Any, pairs: dict[Any, Any]) -> Any:
    def made() -> Any:
        if not isinstance(value, MutableMapping):
            return type(value)(pairs)
        twin = copy.copy(value)
        for key, item in pairs.items():
            twin[key] = item
        return twin

    return _made(made, value)


def _made(make: Callable[[], Any], value: Any) -> Any:
    """Return what `make` makes, or the value itself where its class does not allow a copy."""
    try:
        twin = make()
    except (TypeError, AttributeError, ValueError, KeyError, RuntimeError, copy.Error):
        return value
    return twin if type(twin) is type(value) else value
