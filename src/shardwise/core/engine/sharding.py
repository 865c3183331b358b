"""Shard a model and its optimizers: check everything on all ranks, then replace weights by flats and install hooks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ...base.dtypes import FP32
from ...base.errors import ConfigurationError, StateError
from ..layout import Layout
from ..mesh import Axes, connect, device, local_rank, num_local_ranks
from ..native.cores import cores_for
from ..offload.host_memory import HostMemory
from ..optim.clip import LossScaler
from ..optim.groups import cut_state, optimizer_of_each, settings_number
from ..optim.host_updates import HostUpdates, is_eight_bit
from ..optim.probe import refuse_unless_elementwise, refuse_unless_rows, state_tensor_names
from ..optim.sharded_optimizer import ShardedOptimizer
from ..precision import Precision
from ..schedule.flat import Flat, flats_of
from ..schedule.model import UnitSpec
from ..schedule.step_schedule import Schedule, UnitPlan, make_schedule
from ..schedule.units import Units, find_units
from ..unit.shard_tensor import Place
from ..unit.state import FlatState, Unit
from ..unit.user_parameter import adopt, place_of
from ..wire.collectives import Channel
from .casts import install_casts, kept_patterns, refuse_idle_patterns
from .direct_gradients import install_direct_gradients
from .guards import find_engine, guard, refuse_shared_memory, refuse_wrapped
from .hooks import install_encoder_hooks, install_hooks, install_root_hooks
from .initialise import MetaModel
from .pretrained import serve_save_pretrained
from .rank_agreement import Facts, all_or_none, facts_about, facts_about_optimizer, require_agreement
from .runtime import Engine, channels_of

# A function from the units of a model, and the patterns of modules that stay in fp32, to the layout of each unit.
ChooseLayouts = Callable[[list[UnitSpec], tuple[str, ...]], list[Layout]]


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """The arguments of `sw.shard`, except the strategy."""

    precision: Precision
    axes: Axes
    units: Units = "auto"
    memory_budget: int | None = None
    early_update: bool = False
    skip_nonfinite: bool = False
    seed: int | None = None
    disk_path: Path | None = None


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Everything that is decided before anything is changed."""

    found: list[UnitSpec]
    schedule: Schedule
    keep_fp32: tuple[str, ...]
    row_names: list[tuple[str, ...]]  # by optimizer: the tensors that it keeps where the host updates
    unoptimized: list[str]  # trainable parameters that no optimizer has
    facts: Facts


@dataclass(frozen=True, slots=True)
class Sharded:
    engine: Engine
    optimizers: list[ShardedOptimizer]
    unoptimized: list[str]  # trainable parameters that no optimizer has


def shard_model(
    world: Channel,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    request: ShardRequest,
    choose_layouts: ChooseLayouts,
) -> Sharded:
    """Hook the module and wrap its optimizers. A refusal on one rank is raised on all, before anything is changed."""
    plan = all_or_none(world, lambda: _prepare(model, optimizers, request, choose_layouts))
    require_agreement(world, plan.facts)
    mesh = connect(request.axes)
    host = all_or_none(world, lambda: _host_memory(plan, mesh.device, request.disk_path))
    built, places = _build_units(model, plan, mesh.device, request.seed, host)
    scaler = LossScaler(mesh.device) if request.precision.loss_scaling else None
    loss_scale = None if scaler is None else scaler.scale
    engine = Engine(mesh, plan.schedule, built, request.precision, request.memory_budget, loss_scale, host)
    for _, place in places:
        place.lender = engine
    modules = dict(model.named_modules())
    install_hooks(engine, modules)
    install_encoder_hooks(engine, modules)
    install_direct_gradients(engine, modules)
    install_casts(modules, built, request.precision, plan.keep_fp32)
    install_root_hooks(engine, model)
    sharded = []
    for number, each in enumerate(optimizers):
        cut_state(each, places)
        on_host = HostUpdates(each, plan.row_names[number], cores_for(local_rank(), num_local_ranks()))
        own = [state for state in engine.trainable_states if state.flat.optimizer == number]
        # An optimizer that has stepped before keeps its state.
        known = [state for state in own if any(p in each.state for p in state.resting_params)]
        on_host.take_over([state for state in known if state.flat.host_updates])
        reduce = channels_of(mesh, "reduce")
        sharded.append(
            ShardedOptimizer(each, engine, own, reduce, scaler, request.early_update, on_host, request.skip_nonfinite)
        )
    if request.early_update:
        engine.updates.make_early(sharded[0].update_early)
    engine.gradients.settings = partial(settings_number, optimizers)

    def zero_grad(set_to_none: bool = True) -> None:
        for each in sharded:
            each.zero_grad(set_to_none)
        if not sharded:
            engine.forget_gradients(engine.trainable_states, set_to_none)

    guard(model, engine, zero_grad)
    serve_save_pretrained(model)
    return Sharded(engine, sharded, plan.unoptimized)


def _prepare(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    request: ShardRequest,
    choose_layouts: ChooseLayouts,
) -> _Prepared:
    precision, axes = request.precision, request.axes
    if any(find_engine(module) is not None for module in model.modules()):
        raise StateError(
            f"this {type(model).__name__}, or a part of it, is sharded already: sw.shard may be called once for a model"
        )
    refuse_wrapped(model)
    found = find_units(model, request.units)
    refuse_shared_memory(model)
    if not found:
        raise ConfigurationError(f"this {type(model).__name__} has no parameters: there is nothing to shard")
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    optimizer_of = optimizer_of_each(optimizers, names)
    found = [_numbered(unit, optimizer_of) for unit in found]
    unoptimized = [
        param.name for unit in found for param in unit.params if param.trainable and param.name not in optimizer_of
    ]
    refuse_idle_patterns(dict(model.named_modules()), precision.keep_fp32)
    keep_fp32 = kept_patterns(model, precision)
    layouts = choose_layouts(found, keep_fp32)
    plans = [
        UnitPlan(
            unit.name,
            layout,
            flats_of(unit, layout, precision, axes.sizes_and_indices, keep_fp32),
            unit.holds_units,
            unit.backward_reads,
        )
        for unit, layout in zip(found, layouts, strict=True)
    ]
    for plan in plans:
        for flat in plan.flats:
            _refuse_codecs_of(flat, plan.name, precision)
    schedule = make_schedule(plans, range(len(plans)), request.memory_budget)
    flats = [flat for plan in plans for flat in plan.flats]
    row_names: list[tuple[str, ...]] = []
    for param, name in names.items():
        if param.grad is not None and bool(param.grad.any()):
            raise ConfigurationError(
                f"parameter {name!r} has a gradient already, which would be lost: call optimizer.step() and "
                "optimizer.zero_grad() before sw.shard"
            )
    for number, optimizer in enumerate(optimizers):
        own = [flat for flat in flats if flat.trainable and flat.optimizer == number]
        row_names.append(state_tensor_names(optimizer) if any(flat.host_updates for flat in own) else ())
        if any(flat.depth_of_master or flat.master_on == "disk" for flat in own):
            refuse_unless_elementwise(optimizer, device())
        if any(flat.master_on == "disk" for flat in own):
            refuse_unless_rows(optimizer)
        if is_eight_bit(optimizer) and any(flat.host_updates and flat.master != FP32 for flat in own):
            raise ConfigurationError(
                f"optimizer {type(optimizer).__name__} on the host with master weights in {precision.master}: the host "
                "updates 8-bit moments beside fp32 masters; use precision='bf16', or leave the optimizer on the device"
            )
    if request.early_update and len(optimizers) > 1:
        raise ConfigurationError(
            "early_update=True with several optimizers: a backward would step all of them; leave early_update"
        )
    if request.early_update and (not optimizers or precision.loss_scaling):
        raise ConfigurationError(
            "early_update=True without an optimizer: there is nothing to update"
            if not optimizers
            else "early_update=True with fp16: a step that overflowed is skipped, and is found out after the backward; "
            "use bf16, or leave early_update"
        )
    if request.early_update and request.skip_nonfinite:
        raise ConfigurationError(
            "early_update=True with skip_nonfinite=True: weights are updated before all gradients are known; leave one"
        )
    if any(param.is_meta for param in names) and request.seed is None:
        raise ConfigurationError(
            "the model is on the meta device: give sw.shard a seed= to initialise its weights with"
        )
    settings = {
        "the precision": precision,
        "the ranks per node (node_size)": axes.node_size,
        "memory_budget": request.memory_budget,
        "early_update": request.early_update,
        "skip_nonfinite": request.skip_nonfinite,
        "seed": request.seed,
    }
    facts = list(facts_about(model, found, plans, settings))
    for each in optimizers or (None,):
        facts += facts_about_optimizer(each, names)
    return _Prepared(found, schedule, keep_fp32, row_names, unoptimized, facts)


def _numbered(unit: UnitSpec, optimizer_of: dict[str, int]) -> UnitSpec:
    """Add the number of its optimizer to each parameter; 0 where no optimizer has it."""
    return replace(
        unit, params=tuple(replace(param, optimizer=optimizer_of.get(param.name, 0)) for param in unit.params)
    )


def _refuse_codecs_of(flat: Flat, unit_name: str, precision: Precision) -> None:
    """Refuse codecs that do not fit the dtypes; a layout refuses the rest."""
    if flat.params_codec is not None and not flat.params_codec.has_scales and flat.compute.itemsize == 2:
        raise ConfigurationError(
            f"unit {unit_name!r}: params_as='{flat.params_codec}' with parameters in {flat.compute.name}: they would "
            "travel in as many bits as they have, rounded for nothing; leave it, or use int8 or fp8"
        )
    if flat.grads_codec is not None and flat.grads_codec.has_feedback and precision.loss_scaling:
        raise ConfigurationError(
            f"unit {unit_name!r}: grads_as='{flat.grads_codec}' with loss scaling: what was lost of one gradient "
            "would be added to another under another scale; use bf16, or leave feedback"
        )


def _host_memory(plan: _Prepared, where: torch.device, disk_path: Path | None) -> HostMemory:
    units = [unit.flats for unit in plan.schedule.units]
    names = dict.fromkeys(name for names in plan.row_names for name in names)
    return HostMemory(units, tuple(names), disk_path, where.type == "cuda")


def _build_units(
    model: nn.Module, plan: _Prepared, where: torch.device, seed: int | None, host: HostMemory
) -> tuple[list[Unit], list[tuple[nn.Parameter, Place]]]:
    """Copy the weights into flats. The user's parameters stand for them afterwards; their memory is freed."""
    modules = dict(model.named_modules())
    meta = MetaModel(model, seed or 0, where)
    built = []
    places: list[tuple[nn.Parameter, Place]] = []
    for index, (found, unit_plan) in enumerate(zip(plan.found, plan.schedule.units, strict=True)):
        states = [FlatState(flat, where, found.name, host) for flat in unit_plan.flats]
        sites = [site for param in found.params for site in param.sites]
        originals = [modules[site.module]._parameters[site.attribute] for site in sites]
        by_name = {site.name: original for site, original in zip(sites, originals, strict=True)}
        meta.fill(found)
        for state in states:
            with state.writing():
                for position, spec in enumerate(state.flat.params):
                    original, site = by_name[spec.name], spec.sites[0]
                    value = modules[site.module]._parameters[site.attribute]
                    assert original is not None
                    assert value is not None
                    state.write(position, value)
                    state.compute_params[position].__dict__.update(original.__dict__)
                    state.user_params.append(original)
                    places.append((original, Place(state, position)))
        # Back to the meta device: the initialisation of other units must not write to this one's parameters.
        for site, original in zip(sites, originals, strict=True):
            modules[site.module]._parameters[site.attribute] = original
        built.append((index, found.name, modules[found.path], states))
    meta.fill_buffers()
    for original, place in places:
        adopt(original, place)
    for module in modules.values():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(where)
        for param in module._parameters.values():
            if param is not None and place_of(param) is None:
                param.data = param.data.to(where)
    return [Unit(*parts, modules) for parts in built], places
