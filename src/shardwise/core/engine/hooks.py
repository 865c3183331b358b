"""How the engine learns where the model is: hooks on the units' modules and on the tensors they return.

Module hooks report a unit's forward. Its backward begins when the gradient of one of its outputs arrives. It has ended
when the backward of something recorded before it begins: autograd runs in the reverse order of recording, so by then
everything the unit recorded has run. If nothing was recorded before a unit, it ends with the whole backward.

While a unit's forward runs, autocast does not cache cast weights. A later forward could use such a cached cast: its
values might be old, or its gradient might arrive after the unit's backward has ended.
"""

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from ...base.dtypes import FP32
from ...base.errors import StateError
from ..precision import Precision
from .guards import engine_of
from .nested_tensors import map_tensors, tensors_in
from .runtime import Engine

# The attributes that every nn.Module has. They are not searched for tensors.
_OF_TORCH = frozenset(vars(nn.Module()))
# The number of forwards in which a unit's modules are searched for tensors that they store as attributes.
NUM_LOOKS = 2
# The number of the backward that runs now, or NONE. A forward inside a backward is a recompute (activation
# checkpointing). Not a function of ours: each unit asks several times.
_backward, NONE = torch._C._current_graph_task_id, -1
# Keeps torch.compile from tracing a hook: compiled code calls the hook as a normal Python function.
_opaque: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.compiler.disable


class _UnitHooks:
    def __init__(self, engine: Engine, index: int) -> None:
        self._engine = engine
        self._index = index
        self._unit = unit = engine.units[index]
        is_leaf = not engine.schedule.units[index].holds_units
        self._inner = [module for module in unit.module.modules() if is_leaf and module is not unit.module]
        # The inputs of this forward, with their grad_fn: an input that is returned unchanged is no output of the unit.
        self._given: dict[int, tuple[Tensor, Any]] = {}
        self._watched: set[nn.Module] = set()
        self._num_looks = NUM_LOOKS
        # Tensors that leave this forward other than as its output: through the user's hooks, or as module attributes.
        self._seen_by_hooks: list[Tensor] = []
        self._keepers: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        # A stack of saved settings of autocast's cache: one for each call of the unit that has not returned.
        self._kept_casts: list[bool] = []

    def before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        self._kept_casts.append(torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        if _backward() != NONE:
            self._engine.gathers.make_ready(self._index, "backward")
        else:
            self._given = given = {}
            for value in args:
                if isinstance(value, Tensor):
                    given[id(value)] = (value, value.grad_fn)
            for inner in self._inner:
                if inner._forward_hooks and inner not in self._watched:
                    self._watched.add(inner)
                    inner.register_forward_hook(_opaque(self._watch))
            if torch._C._are_functorch_transforms_active():
                self._enter_transform()
            self._engine.before_forward(self._index)
            if self._engine.activations.hosted:
                self._engine.activations.before(self._index)

    def _enter_transform(self) -> None:
        """Refuse a transform of torch.func (vmap, jvp) if a gather would run inside it, because it traces every
        operation. It also wraps the outputs, so hooks on the parameters report the backward instead."""
        engine, index = self._engine, self._index
        gathered = [engine.statuses[unit] for unit in (index, *engine.schedule.before_forward[index])]
        if engine.statuses[index].plan.gathered_until != "always" or not all(
            status.is_ready("forward") or all(flat.master_is_whole for flat in status.plan.flats) for status in gathered
        ):
            raise StateError(
                f"a transform of torch.func around unit {self._unit.name!r}, whose weights are gathered when it runs: "
                "take whole weights (ddp), or torch.func.functional_call with sw.full_state_dict(model)"
            )
        for state in self._unit.trainable_states:
            for at in range(len(state.compute_params)):
                engine.lend(state, at)

    def _watch(self, module: nn.Module, args: Any, output: Any) -> None:
        """Record the output of an inner module on which the user has a hook: the hook may use it in a loss."""
        if _backward() == NONE:
            self._seen_by_hooks.extend(tensors_in(output))

    def _kept_by_modules(self) -> list[Tensor]:
        """Tensors that modules of the unit have as attributes, such as the auxiliary loss of a router."""
        if self._num_looks:
            self._num_looks -= 1
            for part in [self._unit.module, *self._inner]:
                for values in (vars(part), part._buffers):
                    for name, value in values.items():
                        is_candidate = name not in _OF_TORCH and isinstance(value, (Tensor, list, tuple, dict))
                        if is_candidate and any(tensor.grad_fn is not None for tensor in tensors_in(value)):
                            self._keepers[id(values), name] = (values, name)
        return [tensor for values, name in self._keepers.values() for tensor in tensors_in(values.get(name))]

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a forward. It is called after an error too, with None as output."""
        if self._kept_casts:
            torch.set_autocast_cache_enabled(self._kept_casts.pop())
        if output is None and self._engine.precision.compute != FP32:
            _explain(sys.exception(), self._unit.name, self._engine.precision)
        if _backward() != NONE:
            return
        if self._engine.activations.hosted:
            self._engine.activations.after(self._index)
        found = [output] if isinstance(output, Tensor) else list(tensors_in(output))
        self._engine.gathers.refuse_own_weights(self._index, found)
        given, self._given = self._given, {}
        candidates = found
        if self._num_looks or self._keepers or self._seen_by_hooks:
            candidates = [*found, *self._kept_by_modules(), *self._seen_by_hooks]
            self._seen_by_hooks.clear()
        recorded = []
        for tensor in () if torch._C._are_functorch_transforms_active() else candidates:
            _, recorder = given.get(id(tensor), (None, None))
            if tensor.grad_fn is not None and tensor.grad_fn is not recorder:
                recorded.append(tensor)
        call = self._engine.after_forward(self._index, bool(recorded))
        if call is not None:
            for tensor in recorded:
                tensor.register_hook(partial(self._engine.before_backward, call))
        elif not found and torch.is_grad_enabled() and sys.exception() is None and self._unit.trainable_states:
            raise StateError(
                f"no tensor was found in the {type(output).__name__} that unit {self._unit.name!r} returned, so its "
                "backward could not be followed: return tensors, or containers, dataclasses or objects that hold them"
            )


class _Scale(torch.autograd.Function):
    """Loss scaling for one input (`enters`) or output of the model. The backward multiplies the gradient of an output
    by the loss scale, and divides that of an input. An output is copied to fp32: callers may change it in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, engine: Engine, enters: bool) -> Tensor:
        ctx.dtype, ctx.engine, ctx.enters = tensor.dtype, engine, enters
        return tensor.view_as(tensor) if enters else tensor.to(torch.float32, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        scale = ctx.engine.scale.loss_scale
        ctx.engine.is_loss_scaled = ctx.engine.is_loss_scaled or not ctx.enters
        return (grad.float() / scale if ctx.enters else grad * scale).to(ctx.dtype), None, None


def install_root_hooks(engine: Engine, model: nn.Module) -> None:
    """Install the hooks of the whole model: they begin and end a forward, cast inputs, and scale the loss for fp16."""
    compute = engine.precision.compute.torch
    is_scaled = engine.scale.loss_scale is not None

    def enter(tensor: Tensor) -> Tensor:
        if is_scaled and tensor.requires_grad:
            tensor = _Scale.apply(tensor, engine, True)  # type: ignore[no-untyped-call]
        return tensor.to(compute) if tensor.is_floating_point() and tensor.dtype != compute else tensor

    def leave(tensor: Tensor) -> Tensor:
        return tensor if tensor.grad_fn is None else _Scale.apply(tensor, engine, False)  # type: ignore[no-untyped-call]

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _backward() == NONE:
            engine.begin_forward(torch.is_grad_enabled())
        return map_tensors(args, enter), map_tensors(kwargs, enter)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if _backward() == NONE:
            engine.end_forward(failed=sys.exc_info()[0] is not None)
        return map_tensors(output, leave) if is_scaled else None

    model.register_forward_pre_hook(_opaque(before), with_kwargs=True, prepend=True)
    model.register_forward_hook(_opaque(after), always_call=True)
    engine.entries[None] = [(before, after)]


def install_hooks(engine: Engine, modules: dict[str, nn.Module]) -> None:
    """Put hooks on every unit's module. Our pre-hooks run first, so that the user's pre-hooks see gathered parameters.

    Where other units lie inside a unit, the modules that own its parameters get the hooks as well: parts of a model
    may be called without its root (an encoder in `generate`).
    """
    for unit in engine.units:
        entries = {id(unit.module): unit.module}
        if engine.schedule.units[unit.index].holds_units:
            owners = {site.module for state in unit.states for spec in state.flat.params for site in spec.sites}
            entries |= {id(modules[path]): modules[path] for path in sorted(owners)}
        hooks = _UnitHooks(engine, unit.index)
        before, after = _opaque(hooks.before), _opaque(hooks.after)
        for module in entries.values():
            engine.entries.setdefault(module, []).append((before, after))
            module.register_forward_pre_hook(before, prepend=True)
            module.register_forward_hook(after, always_call=True)
    # Before its first layer runs, nn.TransformerEncoder checks whether that layer's parameters are plain tensors, and
    # skips padding if they are. It reads no values, so it may see compute parameters that are not gathered yet.
    encoders = [each for each in modules.values() if isinstance(each, nn.TransformerEncoder) and len(each.layers)]
    for encoder in encoders:
        inside = set(encoder.layers[0].modules())
        for unit in [unit for unit in engine.units if unit.module in inside]:
            encoder.register_forward_pre_hook(_opaque(lambda *_, unit=unit: unit.show_compute()))
            encoder.register_forward_hook(_opaque(lambda *_, unit=unit: unit.show_user_params()), always_call=True)


def register_forward(module: nn.Module, method: str) -> None:
    """Let another method of a sharded module, such as `encode`, compute with its weights as its forward does."""
    engine = engine_of(module)
    compute = getattr(module, method)

    @wraps(compute)
    def run(*args: Any, **kwargs: Any) -> Any:
        entries = [*([] if engine.is_computing else engine.entries[None]), *engine.entries.get(module, [])]
        for before, _ in entries:
            args, kwargs = before(module, args, kwargs) or (args, kwargs)
        output = None
        try:
            output = compute(*args, **kwargs)
        finally:
            for _, after in reversed(entries):
                changed = after(module, args, output)
                output = output if changed is None else changed
        return output

    module.__dict__[method] = run


def _explain(error: BaseException | None, unit_name: str, precision: Precision) -> None:
    """Add advice to the error of a forward in 16 bits, if it is about dtypes that do not mix."""
    words = str(error)
    is_about_dtypes = any(word in words for word in ("dtype", "scalar type", "BFloat16", "Half", "Input type"))
    if isinstance(error, RuntimeError) and is_about_dtypes and not getattr(error, "__notes__", None):
        error.add_note(
            f"unit {unit_name!r} computes in {precision.compute}, and its forward mixes that with another dtype, or "
            "has no kernel for it: keep such modules in fp32 with sw.Precision(..., keep_fp32=(pattern, ...)), or use "
            "precision='bf16-autocast', which casts operation by operation"
        )
