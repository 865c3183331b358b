"""The Parameter objects of the user, after `sw.shard`.

`adopt` turns a Parameter into a `UserParameter`, in place: the same object, with the shape, compute dtype and device of
the weight, and no memory. So old references, parameter lists and optimizer groups stay valid. Every operation on it
passes `UserParameter.__torch_function__`, which has four answers:

    tells      shape, dtype, device, ...: answered by the object itself.
    served     by another tensor in its place: the compute parameter while the model computes, the weight itself inside
               `sw.whole`, the master where this rank holds all of it.
    in parts   elementwise operations on a weight that is split work on this rank's part (`ShardTensor`), so that moving
               averages and weight clipping run on every layout.
    refused    everything else, with the line to write instead.

Compute parameters are plain tensors, so a training step does not go through any of this.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...base.errors import StateError
from .shard_tensor import DATA_GET, TELLS, Place, is_in_place, refuse, targets_of, tensors_in
from .stand_ins import StandIn


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

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse(self.place.name, "belongs to a sharded model, and cannot be pickled alone")

    def set_(self, *_: Any, **__: Any) -> NoReturn:
        refuse(self.place.name, "belongs to a sharded model, and cannot be given other memory")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer(*args, **kwargs)
        if _only_tells(func, args):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return _serve(func, args, kwargs)


def adopt(original: nn.Parameter, place: Place) -> nn.Parameter:
    """Make the user's own Parameter stand for a weight at a place, and free its old memory."""
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
    _move_hooks(original, place.compute)
    place.compute.requires_grad_(original.requires_grad)
    return original


def _move_hooks(original: nn.Parameter, compute: nn.Parameter) -> None:
    """Move hooks to the compute parameter, where gradients come. The dicts are shared, so that handles still work."""
    with torch._C.DisableTorchFunctionSubclass():
        hooks, after = original._backward_hooks, original._post_accumulate_grad_hooks
        if hooks:
            compute._backward_hooks = hooks
    for hook in (after or {}).values():
        _register_after(original, hook)


_VALUES = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}
# They read only the shape of the second tensor.
_SHAPED_LIKE = frozenset({"view_as", "expand_as", "reshape_as"})
_NEVER = frozenset({"resize_", "resize_as_", "share_memory_", "apply_", "map_", "__setstate__"})


def _only_tells(func: Any, args: Any) -> bool:
    name = func.__name__
    if name in _SHAPED_LIKE:
        return not isinstance(args[0], UserParameter)
    return (name in TELLS and func not in _VALUES) or name.startswith("is_")


def _replace(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, UserParameter):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_replace(item, change) for item in value)
    return value


def _serve(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation with other tensors in the place of the user's parameters."""
    in_place = is_in_place(func, kwargs)
    targets = [t for t in targets_of(args, kwargs) if isinstance(t, UserParameter)] if in_place else []
    if func.__name__ in _NEVER:
        user = next(tensor for tensor in tensors_in(args, kwargs) if isinstance(tensor, UserParameter))
        refuse(user.place.name, f"belongs to a sharded model, which {func.__name__} would break")
    is_initialising = getattr(func, "__module__", "") == nn.init.__name__  # without gradients, whoever calls it
    if torch.is_grad_enabled() and not is_initialising and any(target.requires_grad for target in targets):
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    for target in targets:
        if target.place.shown is None and target.place.lender is not None and target.place.lender.is_computing:
            refuse(target.place.name, f"was changed by {func.__name__} while the model computes with it")
    wants_grad = torch.is_grad_enabled() and not in_place

    def stand_in(param: Tensor) -> Tensor:
        return _stand_in(param, wants_grad, func.__name__)

    result = func(
        *[_replace(value, stand_in) for value in args], **{key: _replace(v, stand_in) for key, v in kwargs.items()}
    )
    if not in_place:
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
        return place.whole.detach()
    if wants_grad and param.requires_grad:
        refuse(place.name, f"{place.whereabouts}, and {what} outside the forward of its unit has no gradient")
    return place.part()


# Operations with an implementation of their own.


def _grad(param: Any) -> Tensor | None:
    place: Place = param.place
    if place.shown is not None:
        return place.shown.grad
    if place.compute.grad is not None:
        return place.compute.grad  # during a backward: this rank's own
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
    place: Place = param.place
    if value.shape != place.shape:
        raise StateError(
            f"the data of parameter {place.name!r} is {tuple(place.shape)} and was set to a {tuple(value.shape)}: a "
            "sharded parameter keeps its shape"
        )
    with torch.no_grad():
        param.copy_(value)


def _set_requires_grad(param: Any, flag: bool = True) -> Any:
    place: Place = param.place
    if flag and not place.state.flat.trainable:
        raise StateError(
            f"parameter {place.name!r} was frozen when sw.shard was called, so there is no master and no gradient for "
            "it: call sw.shard while it requires a gradient, and freeze it afterwards"
        )
    with torch._C.DisableTorchFunctionSubclass():
        param.requires_grad_(flag)
    place.compute.requires_grad_(flag)
    if place.shown is not None:
        place.shown.requires_grad_(flag)
    return param


def _register_hook(param: Any, hook: Callable[[Tensor], Tensor | None]) -> Any:
    return param.place.compute.register_hook(hook)


def _register_after(param: Any, hook: Callable[[Tensor], None]) -> Any:
    return param.place.compute.register_post_accumulate_grad_hook(lambda _: hook(param))


def _autograd_grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    def of_graph(param: Any) -> Tensor:
        place: Place = param.place
        if place.state.flat.layout.gathered_until != "always":
            refuse(place.name, "is split over the ranks, so torch.autograd.grad has no tensor for its gradient")
        return place.compute

    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    return torch.autograd.grad(outputs, [_replace(value, of_graph) for value in inputs], *args, **kwargs)


_GRAD: Any = Tensor.grad
_ANSWERS: dict[Any, Callable[..., Any]] = {
    _GRAD.__get__: _grad,
    _GRAD.__set__: _set_grad,
    _GRAD.__delete__: _set_grad,
    DATA_GET: _data,
    Tensor.detach: _data,
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.requires_grad.__set__: _set_requires_grad,  # type: ignore[attr-defined]
    Tensor.requires_grad_: _set_requires_grad,
    Tensor.register_hook: _register_hook,
    Tensor.register_post_accumulate_grad_hook: _register_after,
    Tensor.__format__: lambda param, spec: repr(param),
    torch.autograd.grad: _autograd_grad,
}
