"""This rank's part of a weight that is split, as a tensor that works elementwise.

Moving averages and weight clipping need no more than that, so they run on every layout. Whatever needs all of the
weight is refused.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from ...base.errors import StateError
from .stand_ins import OnDisk
from .state import FlatState

DATA_GET: Any = Tensor.data.__get__  # type: ignore[attr-defined]


class Lender(Protocol):
    """The engine, as the user's parameters see it."""

    @property
    def is_computing(self) -> bool: ...
    def lend(self, state: FlatState, index: int) -> nn.Parameter: ...
    def await_update_of(self, state: FlatState) -> None: ...
    def was_rewritten(self) -> None: ...


@dataclass(slots=True, eq=False)
class Place:
    """The place of a user's parameter in its flat. `shown` is used in its place inside `sw.whole`."""

    state: FlatState
    index: int
    lender: Lender | None = None
    shown: nn.Parameter | None = None

    @property
    def name(self) -> str:
        return self.state.flat.params[self.index].name

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.state.flat.params[self.index].shape)

    @property
    def resting(self) -> nn.Parameter:
        return self.state.resting_params[self.index]

    @property
    def compute(self) -> nn.Parameter:
        return self.state.compute_params[self.index]

    @property
    def is_whole(self) -> bool:
        """True if this rank holds all of the weight, on its device."""
        flat = self.state.flat
        return flat.num_master == flat.num_elems and flat.master_on == "device"

    @property
    def whereabouts(self) -> str:
        on = self.state.flat.master_on
        return "is split over the ranks" if on == "device" else f"rests on {'disk' if on == 'disk' else 'the host'}"

    @property
    def whole(self) -> Tensor:
        interval = self.state.flat.intervals[self.index]
        return self.state.master[interval.start : interval.stop].view(self.shape)

    def part(self) -> Tensor:
        """This rank's part of the weight, in the memory of the master."""
        if isinstance(self.state.master, OnDisk):
            refuse(self.name, self.whereabouts)
        if self.lender is not None:
            self.lender.await_update_of(self.state)
        return _as_part(self.resting.detach().view(-1), self, is_master=True)


def refuse(name: str, why: str) -> NoReturn:
    raise StateError(
        f"parameter {name!r} {why}: read or change it inside `with sw.whole(model):` (write=True to change it), read "
        "all weights with sw.full_state_dict(model); a method of yours that computes with weights is made a forward by "
        "sw.register_forward(module, 'name of the method')"
    )


# fmt: off
_ELEMENTWISE = frozenset({
    "abs", "add", "addcdiv", "addcmul", "bfloat16", "clamp", "clamp_max", "clamp_min", "clip", "clone", "constant",
    "copy", "cpu", "cuda", "detach", "div", "divide", "double", "empty_like", "exp", "fill", "float", "full_like",
    "half", "iadd", "imul", "ipow", "isub", "itruediv", "lerp", "log", "maximum", "minimum", "mul", "multiply",
    "nan_to_num", "neg", "ones", "ones_like", "pow", "radd", "reciprocal", "rmul", "rsqrt", "rsub", "rtruediv", "sign",
    "sqrt", "square", "sub", "subtract", "to", "true_divide", "truediv", "type", "zero", "zeros", "zeros_like",
})
# Names of functions that describe a tensor without reading it.
TELLS = frozenset({
    "__get__", "__set__", "size", "numel", "nelement", "dim", "ndimension", "element_size", "stride", "get_device",
    "data_ptr", "untyped_storage", "__len__", "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "type_as",
    "storage_offset", "retain_grad", "has_names",
})
# fmt: on
_SHAPE_GETTERS = {Tensor.shape.__get__: lambda shape: shape, Tensor.ndim.__get__: len}  # type: ignore[attr-defined]
_OTHER_VALUES = {
    getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag", "grad", "_grad", "_base")
}


class ShardTensor(Tensor):
    """This rank's part of a tensor that is shaped like a parameter.

    Elementwise operations work on it, with tensors that are cut alike, with numbers, and with whole tensors of its
    shape, of which each rank takes its part. `is_master`: it shares memory with the weight.
    """

    place: Place
    is_master: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = next(tensor for tensor in tensors_in(args, kwargs) if isinstance(tensor, ShardTensor))
        place, name = first.place, func.__name__
        if func in _SHAPE_GETTERS:
            return _SHAPE_GETTERS[func](place.shape)
        if func == DATA_GET:
            return first
        if name in ("size", "numel", "nelement", "dim", "__len__"):
            return getattr(torch.empty(place.shape, device="meta"), name)(*args[1:], **kwargs)
        if name == "__repr__":
            return f"this rank's part of {place.name!r}, shaped {tuple(place.shape)}"
        if (name in TELLS and name != "__set__" and func not in _OTHER_VALUES) or name.startswith("is_"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name.removeprefix("_foreach_").strip("_") not in _ELEMENTWISE:
            refuse(place.name, f"{place.whereabouts}, and {name} needs all of it")
        return _run_in_parts(func, args, kwargs, place)


def _as_part(local: Tensor, place: Place, is_master: bool) -> ShardTensor:
    made = local.as_subclass(ShardTensor)
    made.place, made.is_master = place, is_master
    return made


def _cut(place: Place) -> tuple[object, ...]:
    """A key that is equal for two parts of the same elements."""
    state = place.state
    held = state.held.get(place.index)
    if held is None:
        return (place.shape, 0, 0)
    start = state.flat.spans[state.flat.depth_of_master].start + held.start - state.flat.intervals[place.index].start
    return (place.shape, start, start + held.stop - held.start)


def _run_in_parts(func: Any, args: Any, kwargs: Any, place: Place) -> Any:
    in_place = is_in_place(func, kwargs)
    targets: list[Any] = targets_of(args, kwargs) if in_place else []
    for target in targets:
        if not isinstance(target, ShardTensor):
            refuse(place.name, f"is split over the ranks, and {func.__name__} writes it to a tensor that is not")

    def local(value: Any, beside: Place) -> Any:
        if isinstance(value, ShardTensor):
            if _cut(value.place) != _cut(beside):
                refuse(value.place.name, f"is cut otherwise than {beside.name!r}: shard both models alike")
            return value.as_subclass(Tensor)
        if isinstance(value, Tensor) and value.ndim:
            if value.shape != beside.shape:
                refuse(beside.name, f"is split over the ranks, and {func.__name__} was given a {tuple(value.shape)}")
            return beside.state.part_of(beside.index, value).to(beside.resting.device)
        return value

    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple)) and _holds_parts(value)]
    if lists:
        places = [value.place for value in lists[0]]
        as_local = [_each(value, local, places) for value in args]
        results = func(*as_local, **{key: _each(value, local, places) for key, value in kwargs.items()})
    else:
        places = [place]
        results = func(*[local(value, place) for value in args], **{k: local(v, place) for k, v in kwargs.items()})
    if in_place:
        for target in targets:
            if target.is_master and target.place.lender is not None:
                target.place.state.publish()
                target.place.lender.was_rewritten()
        return None if lists else targets[0]
    if lists:
        return [_as_part(result, its, is_master=False) for result, its in zip(results, places, strict=True)]
    # Functions that return their input (`detach`, `.to` that changes nothing) return the same memory.
    is_same = any(isinstance(v, ShardTensor) and v.is_master and v.data_ptr() == results.data_ptr() for v in args)
    return _as_part(results, place, is_master=is_same)


def _each(value: Any, change: Callable[[Any, Place], Any], places: list[Place]) -> Any:
    if not isinstance(value, (list, tuple)) or len(value) != len(places):
        return value
    return [change(item, place) for item, place in zip(value, places, strict=True)]


def _holds_parts(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, ShardTensor) for value in values)


def is_in_place(func: Any, kwargs: Any) -> bool:
    name = func.__name__
    is_dunder = name.startswith("__")
    return (
        (name.endswith("_") and not is_dunder)
        or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__", "__iter__"))
        or name in ("__setitem__", "__delitem__")
        or kwargs.get("out") is not None
    )


def targets_of(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an in-place operation changes."""
    target = kwargs.get("out", args[0] if args else kwargs.get("tensor", kwargs.get("input")))
    return list(target) if isinstance(target, (list, tuple)) else [target]


def tensors_in(args: Any, kwargs: Any) -> Iterator[Any]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value
