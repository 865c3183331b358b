"""How the engine learns where the model is: hooks on the units' modules and on the tensors between them.

A unit's forward is seen by module hooks. Its backward begins when the gradient of one of its outputs arrives,
and ends when autograd reaches a marker put on one of its inputs: autograd runs what was recorded last first,
so everything the unit recorded has run by then. Units none of whose inputs needs a gradient end with the backward.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .runtime import Engine, ForwardCall


class _Marker(torch.autograd.Function):
    """The identity; its backward tells that all that came after it in the forward is done."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, on_backward: Callable[[], None]) -> Tensor:
        ctx.on_backward = on_backward
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.on_backward()
        return grad, None


class _UnitHooks:
    """The hooks of one unit. `_calls` are the forwards under way, innermost last."""

    def __init__(self, engine: Engine, index: int) -> None:
        self._engine = engine
        self._index = index
        self._calls: list[_Call] = []

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        engine = self._engine
        if _is_recompute():
            engine.make_ready(self._index)
            return None
        engine.before_forward(self._index)
        call = _Call(engine)
        self._calls.append(call)
        return _mark_one(args, kwargs, call.on_end) if torch.is_grad_enabled() else None

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if _is_recompute():
            return
        call = self._calls.pop()
        recorded = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        call.forward = self._engine.after_forward(self._index, bool(recorded))
        if call.forward is not None:
            for tensor in recorded:
                tensor.register_hook(call.on_begin)


def _mark_one(args: tuple[Any, ...], kwargs: dict[str, Any], on_backward: Callable[[], None]) -> Any:
    """Put the marker on one input that needs a gradient; None when there is no such input."""
    for position, value in enumerate(args):
        if isinstance(value, Tensor) and value.requires_grad:
            marked = _Marker.apply(value, on_backward)  # type: ignore[no-untyped-call]
            return (*args[:position], marked, *args[position + 1 :]), kwargs
    is_marked = False

    def mark(tensor: Tensor) -> Tensor:
        nonlocal is_marked
        if is_marked or not tensor.requires_grad:
            return tensor
        is_marked = True
        return _Marker.apply(tensor, on_backward)  # type: ignore[no-untyped-call]

    changed = map_tensors(args, mark), map_tensors(kwargs, mark)
    return changed if is_marked else None


class _Call:
    """One forward of a unit, as the tensors around it remember it."""

    __slots__ = ("_engine", "forward")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.forward: ForwardCall | None = None

    def on_begin(self, grad: Tensor) -> None:
        if self.forward is not None:
            self._engine.before_backward(self.forward)

    def on_end(self) -> None:
        if self.forward is not None:
            self._engine.after_backward(self.forward)


class _ScaleGradient(torch.autograd.Function):
    """The model's output in fp32; its gradient comes back multiplied by the loss scale, in fp32, then cast."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: Tensor) -> Tensor:
        ctx.dtype = tensor.dtype
        ctx.scale = scale
        return tensor.float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad * ctx.scale).to(ctx.dtype), None


def install_root_hooks(engine: Engine, model: nn.Module, loss_scale: Tensor | None) -> None:
    """What happens once per forward of the model: a clean start, inputs cast, outputs scaled for fp16."""
    compute = engine.precision.compute

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(compute) if tensor.is_floating_point() and tensor.dtype != compute else tensor

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _is_recompute():
            engine.begin_forward()
        return map_tensors(args, cast), map_tensors(kwargs, cast)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        def scale(tensor: Tensor) -> Tensor:
            if tensor.grad_fn is None:
                return tensor
            return _ScaleGradient.apply(tensor, loss_scale)  # type: ignore[no-untyped-call]

        return map_tensors(output, scale)

    model.register_forward_pre_hook(_opaque(before), with_kwargs=True, prepend=True)
    if loss_scale is not None:
        model.register_forward_hook(_opaque(after))


def install_cast_hooks(modules: list[nn.Module], compute: torch.dtype) -> None:
    """Modules kept in fp32: inputs in the compute dtype come in as fp32, outputs go out in the compute dtype."""

    def enter(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype == compute else tensor

    def leave(tensor: Tensor) -> Tensor:
        return tensor.to(compute) if tensor.dtype == torch.float32 else tensor

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return map_tensors(args, enter), map_tensors(kwargs, enter)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return map_tensors(output, leave)

    for module in modules:
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)


def install_hooks(engine: Engine, modules: dict[str, nn.Module]) -> None:
    """Put hooks on every unit's module, outermost so that the user's own hooks see gathered parameters."""
    for unit in engine.units:
        hooks = _UnitHooks(engine, unit.index)
        unit.module.register_forward_pre_hook(_opaque(hooks.before), with_kwargs=True, prepend=True)
        unit.module.register_forward_hook(_opaque(hooks.after))
        if engine.schedule.units[unit.index].holds_units:
            _install_on_owners(engine, unit.index, modules)


def _install_on_owners(engine: Engine, index: int, modules: dict[str, nn.Module]) -> None:
    """Parts of a model may be called without its root (an encoder in `generate`): gather what they own then."""
    unit = engine.units[index]

    def make_ready(module: nn.Module, args: Any) -> None:
        engine.make_ready(index)

    owners = {site.module for state in unit.states for spec in state.flat.params for site in spec.sites}
    for path in owners:
        if modules[path] is not unit.module:
            modules[path].register_forward_pre_hook(_opaque(make_ready), prepend=True)


def _is_recompute() -> bool:
    """Whether this forward runs inside a backward: activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def _opaque(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Compilers call the hook; they do not look into it."""
    return torch.compiler.disable(hook)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a module's output: bare, in containers, in dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same value with its tensors changed; what holds none that change comes back as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if isinstance(value, tuple) and type(value) is not tuple else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {name: map_tensors(item, change) for name, item in found.items()}
        if all(changed[name] is found[name] for name in found):
            return value
        return dataclasses.replace(value, **changed)
    if isinstance(value, Mapping):
        pairs = {key: map_tensors(item, change) for key, item in value.items()}
        if all(pairs[key] is value[key] for key in pairs):
            return value
        return pairs if type(value) is dict else type(value)(pairs)  # type: ignore[call-arg]
    return value
