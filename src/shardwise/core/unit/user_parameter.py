"""The Parameter objects of the user, after `sw.shard`, and this rank's parts of weights that are split.

`adopt` turns a Parameter into a `UserParameter`, in place: the same object, with the shape, compute dtype and device of
the weight, and no memory. So old references, parameter lists and optimizer groups stay valid. Every operation on it
passes `UserParameter.__torch_function__`, which has four answers:

    described  shape, dtype, device, ...: the object answers itself.
    served     the operation runs on another tensor: the compute parameter while the model computes, the weight itself
               inside `sw.whole`, the master where this rank holds all of it.
    in parts   elementwise operations on a weight that is split work on this rank's part (`ShardTensor`), so that moving
               averages and weight clipping run on every layout.
    refused    everything else raises an error that says what to write instead.

Compute parameters are plain tensors, so a training step does not go through any of this.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from ...base.errors import StateError
from .state import FlatState, OnDisk, StandIn


class Lender(Protocol):
    """The part of the engine that the user's parameters call."""

    @property
    def is_computing(self) -> bool: ...
    def lend(self, state: FlatState, index: int) -> nn.Parameter: ...
    def await_host_of(self, state: FlatState) -> None: ...
    def was_rewritten(self) -> None: ...


class Place:
    """The place of a user's parameter in its flat. Inside `sw.whole`, operations run on `shown` instead."""

    def __init__(self, state: FlatState, index: int) -> None:
        self.state, self.index = state, index
        self.name = state.flat.params[index].name
        self.shape = torch.Size(state.flat.params[index].shape)
        self.resting, self.compute = state.resting_params[index], state.compute_params[index]
        self.cut = (self.shape, state.slice_of(index))  # equal if two parts have the same elements
        self.is_empty = not self.resting.numel()
        self.lender: Lender | None = None
        self.shown: nn.Parameter | None = None

    @property
    def is_whole(self) -> bool:
        """True if this rank holds all of the weight, on its device."""
        flat = self.state.flat
        return flat.num_master == flat.num_elems and flat.master_on == "device" and flat.stored_codec is None

    @property
    def location_text(self) -> str:
        if self.state.flat.stored_codec is not None:
            return f"is stored as {self.state.flat.stored_codec}"
        on = {"device": "split over the ranks", "disk": "offloaded to disk"}
        return f"is {on.get(self.state.flat.master_on, 'offloaded to host memory')}"


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
_DESCRIBES = frozenset({
    "__get__", "__set__", "size", "numel", "nelement", "dim", "ndimension", "element_size", "stride", "get_device",
    "data_ptr", "untyped_storage", "__len__", "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "type_as",
    "storage_offset", "retain_grad", "has_names",
})
# fmt: on
# Attributes that are tensors themselves.
_VALUES = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}
_OWN_TENSORS = {getattr(Tensor, name).__get__ for name in ("grad", "_grad", "_base")}
_DATA_GET: Any = Tensor.data.__get__  # type: ignore[attr-defined]
_SHAPE_GETTERS = {Tensor.shape.__get__, Tensor.ndim.__get__}  # type: ignore[attr-defined]


def _describes(func: Any) -> bool:
    name: str = func.__name__
    return (name in _DESCRIBES and func not in _VALUES) or name.startswith("is_")


class ShardTensor(Tensor):
    """This rank's part of a tensor that is shaped like a parameter.

    Elementwise operations combine it with tensors that are split in the same way, with numbers, and with whole tensors
    of its shape, of which each rank takes its part. `is_master`: it shares memory with the weight.
    """

    place: Place
    is_master: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = next(tensor for tensor in _tensors_in(args, kwargs) if isinstance(tensor, ShardTensor))
        place, name = first.place, func.__name__
        if func == _DATA_GET:
            return first
        if func in _SHAPE_GETTERS or name in ("size", "numel", "nelement", "dim", "__len__"):
            return func(torch.empty(place.shape, device="meta"), *args[1:], **kwargs)
        if name == "__repr__":
            return f"this rank's part of {place.name!r}, shaped {tuple(place.shape)}"
        if _describes(func) and name != "__set__" and func not in _OWN_TENSORS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name.removeprefix("_foreach_").strip("_") not in _ELEMENTWISE:
            refuse(place.name, f"{place.location_text}, and {name} needs all of it")
        return _run_in_parts(func, args, kwargs, place)


def _as_part(local: Tensor, place: Place, is_master: bool) -> ShardTensor:
    made = local.as_subclass(ShardTensor)
    made.place, made.is_master = place, is_master
    if is_master:
        place.state.note_lent(made)
    return made


def _run_in_parts(func: Any, args: Any, kwargs: Any, place: Place) -> Any:
    targets = _targets_of(func, args, kwargs)
    for target in targets:
        if not isinstance(target, ShardTensor):
            refuse(place.name, f"is split over the ranks, and {func.__name__} writes it to a tensor that is not")

    def local(value: Any, beside: Place) -> Any:
        if isinstance(value, ShardTensor):
            if value.place.cut != beside.cut:
                refuse(value.place.name, f"is cut otherwise than {beside.name!r}: shard both models alike")
            if value.is_master and value.place.lender is not None:
                value.place.lender.await_host_of(value.place.state)  # the part may be from before the last step
            return value.as_subclass(Tensor)
        if isinstance(value, Tensor) and value.ndim:
            if value.shape != beside.shape:
                refuse(beside.name, f"is split over the ranks, and {func.__name__} was given a {tuple(value.shape)}")
            return beside.state.part_of(beside.index, value).to(beside.resting.device)
        return value

    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple)) and value]
    lists = [value for value in lists if all(isinstance(item, ShardTensor) for item in value)]
    places = [value.place for value in lists[0]] if lists else [place]

    def given(value: Any) -> Any:
        if not lists:
            return local(value, place)
        is_list = isinstance(value, (list, tuple)) and len(value) == len(places)
        return [local(item, its) for item, its in zip(value, places, strict=True)] if is_list else value

    results = func(*map(given, args), **{key: given(value) for key, value in kwargs.items()})
    if targets:
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


def _targets_of(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The tensors that an in-place operation changes; none for other operations."""
    name, out = func.__name__, kwargs.get("out")
    is_in_place = (
        (name.endswith("_") and not name.startswith("__"))
        or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__", "__iter__"))
        or name in ("__setitem__", "__delitem__")
        or out is not None
    )
    if not is_in_place:
        return []
    target = out if out is not None else args[0] if args else kwargs.get("tensor", kwargs.get("input"))
    return list(target) if isinstance(target, (list, tuple)) else [target]


def place_of(param: Tensor) -> Place | None:
    """The place of a parameter of a sharded model; None for any other tensor."""
    return param.place if isinstance(param, UserParameter) else None


class UserParameter(nn.Parameter):
    place: Place

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        place = self.place
        how = "whole on this rank" if place.is_whole else "split over the ranks"
        return f"Parameter {place.name!r} of a sharded model: {tuple(place.shape)}, {self.dtype}, {how}"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse(self.place.name, "belongs to a sharded model, and cannot be copied alone")

    def set_(self, *_: Any, **__: Any) -> NoReturn:
        refuse(self.place.name, "belongs to a sharded model, and cannot be given other memory")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse(self.place.name, "belongs to a sharded model, and cannot be pickled alone")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer(*args, **kwargs)
        if _describes(func) or (func.__name__ in _SHAPED_LIKE and not isinstance(args[0], UserParameter)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return _serve(func, args, kwargs)


def adopt(original: nn.Parameter, place: Place) -> None:
    """Turn the user's Parameter into a `UserParameter` for the weight at `place`, and free its old memory."""
    blank = place.state.blank.expand(place.shape)
    with torch.no_grad():
        original.grad = None
        if original.is_meta:
            torch.utils.swap_tensors(original, nn.Parameter(blank, original.requires_grad))
        else:
            original.data = blank
    original.__class__ = UserParameter
    user: Any = original
    user.place = place
    # Move hooks to the compute parameter, which gets the gradients. The dicts are shared, so that handles still work.
    with torch._C.DisableTorchFunctionSubclass():
        hooks, after = original._backward_hooks, original._post_accumulate_grad_hooks
        if hooks:
            place.compute._backward_hooks = hooks
    for hook in (after or {}).values():
        _register_after(original, hook)
    place.compute.requires_grad_(original.requires_grad)


# Functions that read only the shape of the second tensor.
_SHAPED_LIKE = frozenset({"view_as", "expand_as", "reshape_as"})
_NEVER = frozenset({"resize_", "resize_as_", "share_memory_", "apply_", "map_", "__setstate__"})


def _tensors_in(args: Any, kwargs: Any) -> Iterator[Any]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _replace(value: Any, change: Callable[[Any], Tensor]) -> Any:
    """Change the user's parameters in lists and tuples, and in their subclasses, which torch's pytree leaves out."""
    if isinstance(value, UserParameter):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_replace(item, change) for item in value)
    return value


def _serve(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation with other tensors in the place of the user's parameters."""
    changed = _targets_of(func, args, kwargs)
    targets = [tensor for tensor in changed if isinstance(tensor, UserParameter)]
    if func.__name__ in _NEVER:
        user = next(tensor for tensor in _tensors_in(args, kwargs) if isinstance(tensor, UserParameter))
        refuse(user.place.name, f"belongs to a sharded model, which {func.__name__} would break")
    is_initialising = getattr(func, "__module__", "") == nn.init.__name__  # nn.init disables gradients itself
    if torch.is_grad_enabled() and not is_initialising and any(target.requires_grad for target in targets):
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    for target in targets:
        if target.place.shown is None and target.place.lender is not None and target.place.lender.is_computing:
            refuse(target.place.name, f"was changed by {func.__name__} while the model computes with it")
    stand_in = partial(_stand_in, wants_grad=torch.is_grad_enabled() and not changed, what=func.__name__)
    result = func(*_replace(args, stand_in), **{key: _replace(value, stand_in) for key, value in kwargs.items()})
    if not changed:
        return result
    for target in targets:
        if target.place.shown is None and target.place.is_whole and target.place.lender is not None:
            target.place.lender.was_rewritten()
    return targets[0] if len(targets) == 1 and isinstance(result, Tensor) else result


def _stand_in(param: Any, wants_grad: bool, what: str) -> Tensor:
    place: Place = param.place
    lender = place.lender
    if place.shown is not None:
        return place.shown
    if lender is not None and (lender.is_computing or (place.is_whole and wants_grad and param.requires_grad)):
        return lender.lend(place.state, place.index)
    if place.is_whole:
        interval = place.state.flat.intervals[place.index]
        return place.state.master[interval.start : interval.stop].view(place.shape).detach()
    if wants_grad and param.requires_grad:
        refuse(place.name, f"{place.location_text}, and {what} outside the forward of its unit has no gradient")
    if isinstance(place.state.master, OnDisk) or place.state.flat.stored_codec is not None:
        refuse(place.name, place.location_text)
    if lender is not None:
        lender.await_host_of(place.state)
    return _as_part(place.resting.detach().view(-1), place, is_master=True)


# Operations with an implementation of their own.


def _grad(param: Any) -> Tensor | None:
    place: Place = param.place
    if place.shown is not None:
        return place.shown.grad
    if place.compute.grad is not None:
        return place.compute.grad  # during a backward: the gradient of this rank alone
    gradient = place.state.gradient
    if gradient.stage == "empty" or not gradient.used[place.index]:
        return None
    return StandIn.like(place.shape, param.dtype, param.device)


def _set_grad(param: Any, value: Tensor | None = None) -> None:
    place: Place = param.place
    if place.shown is not None:
        place.shown.grad = value
    elif value is not None or _grad(param) is not None:
        raise StateError(
            f"the gradient of {place.name!r} was set by hand: clear gradients with zero_grad() of the optimizer that "
            "sw.shard returned, change them inside `with sw.whole(model, grads=True, write=True):`"
        )


def _data(param: Any) -> Tensor:
    return _stand_in(param, wants_grad=False, what="data").detach()


def _set_data(param: Any, value: Tensor) -> None:
    name, shape = param.place.name, param.place.shape
    if value.shape != shape:
        raise StateError(f"the data of {name!r} is {tuple(shape)} and was set to a {tuple(value.shape)}: reshape it")
    with torch.no_grad():
        param.copy_(value)


def _set_requires_grad(param: Any, flag: bool = True) -> Any:
    place: Place = param.place
    if flag and not place.state.flat.trainable:
        fix = "call sw.shard while it requires a gradient, and freeze it afterwards"
        raise StateError(f"parameter {place.name!r} was frozen when sw.shard was called: {fix}")
    with torch._C.DisableTorchFunctionSubclass():
        param.requires_grad_(flag)
    place.compute.requires_grad_(flag)
    if place.shown is not None:
        place.shown.requires_grad_(flag)
    return param


def _register_after(param: Any, hook: Callable[[Tensor], None]) -> Any:
    return param.place.compute.register_post_accumulate_grad_hook(lambda _: hook(param))


def _autograd_grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    def of_graph(param: Any) -> Tensor:
        place: Place = param.place
        if place.state.flat.layout.gathered_until != "always":
            refuse(place.name, "is split over the ranks, so torch.autograd.grad has no tensor for its gradient")
        return place.compute

    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    return torch.autograd.grad(outputs, _replace(inputs, of_graph), *args, **kwargs)


_GRAD: Any = Tensor.grad
_ANSWERS: dict[Any, Callable[..., Any]] = {
    _GRAD.__get__: _grad,
    _GRAD.__set__: _set_grad,
    _GRAD.__delete__: _set_grad,
    _DATA_GET: _data,
    Tensor.detach: _data,
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.requires_grad.__set__: _set_requires_grad,  # type: ignore[attr-defined]
    Tensor.requires_grad_: _set_requires_grad,
    Tensor.register_hook: lambda param, hook: param.place.compute.register_hook(hook),
    Tensor.register_post_accumulate_grad_hook: _register_after,
    Tensor.__format__: lambda param, spec: repr(param),
    torch.autograd.grad: _autograd_grad,
}
