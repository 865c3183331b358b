"""The public verbs: `shard` and what goes with it."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from ..away import HostMemory
from ..cgroup import cgroup_values, memory_limit
from ..dtypes import FP32, DTypeLike
from ..errors import ConfigurationError, StateError
from ..layout import AUTO, Layout, Strategy, layouts_for
from ..mesh import Axes, connect, device, everyone, local_rank, make_axes, num_local_ranks
from ..optim.groups import cut_state, optimizer_of_each
from ..optim.host.cores import cores_for
from ..optim.host_updates import HostUpdates, is_eight_bit
from ..optim.probe import refuse_unless_elementwise, refuse_unless_rows, rows_kept
from ..optim.scaler import LossScaler
from ..optim.sharded import ShardedOptimizer, settings_number
from ..plan.assess import Machine
from ..plan.flat import Flat, flats_of
from ..plan.memory import state_bytes
from ..plan.model import FoundUnit
from ..plan.plan import Plan
from ..plan.schedule import Schedule, UnitPlan, make_schedule
from ..plan.search import moves_behind_auto
from ..plan.training import Training
from ..plan.units import Units, find_units
from ..precision import Precision, precision_of
from ..unit.shard_tensor import Place
from ..unit.state import FlatState
from ..unit.unit import Unit
from ..unit.user_parameter import adopt, place_of
from ..wire.collectives import Channel, exchange
from ..wire.ledger import Traffic
from .agree import Facts, all_or_none, facts_about, facts_about_optimizer, require_agreement
from .auto import Asked, Batch, choose, layouts_in, machine_here
from .buffers import tell_of_statistics
from .casts import install_casts, kept_patterns, refuse_idle_patterns
from .direct import install_direct_gradients
from .guards import engine_of, find_engine, guard, refuse_shared_memory, refuse_wrapped
from .hooks import install_encoder_hooks, install_hooks, install_root_hooks
from .initialise import MetaModel
from .moments import num_moments
from .own_flats import OwnFlats
from .pretrained import serve_save_pretrained
from .runtime import Engine, channels_of

logger = logging.getLogger("shardwise")

M = TypeVar("M", bound=nn.Module)


class _Words(TypedDict, total=False):
    """The keywords of `shard`, for type checkers."""

    precision: str | Precision
    reduce_dtype: DTypeLike | None
    node_size: int | None
    units: Units
    memory_budget: int | None
    early_update: bool
    skip_nonfinite: bool
    seed: int | None
    batch: Batch | None
    disk_path: str | Path | None


@overload
def shard(model: M, optimizer: None = None, strategy: Strategy = AUTO, **words: Unpack[_Words]) -> tuple[M, None]: ...
@overload
def shard(
    model: M, optimizer: torch.optim.Optimizer, strategy: Strategy = AUTO, **words: Unpack[_Words]
) -> tuple[M, ShardedOptimizer]: ...
@overload
def shard(
    model: M, optimizer: Sequence[torch.optim.Optimizer], strategy: Strategy = AUTO, **words: Unpack[_Words]
) -> tuple[M, list[ShardedOptimizer]]: ...
def shard(
    model: M,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    strategy: Strategy = AUTO,
    *,
    precision: str | Precision = "bf16",
    reduce_dtype: DTypeLike | None = None,
    node_size: int | None = None,
    units: Units = "auto",
    memory_budget: int | None = None,
    early_update: bool = False,
    skip_nonfinite: bool = False,
    seed: int | None = None,
    batch: Batch | None = None,
    disk_path: str | Path | None = None,
) -> tuple[M, ShardedOptimizer | list[ShardedOptimizer] | None]:
    """Shard a model and its optimizer; returns the same module, hooked, and an optimizer that steps on shards.

    optimizer: or several, each with parameters of its own; then a list comes back. In fp16 they share one loss scale.
    strategy: a preset's name, a `Layout`, or a mapping from patterns of unit names to either; "auto" takes the fastest
        plan that fits into the memory that is free. Behind a name, what rests elsewhere: "zero3+optimizer=host:0.6",
        and what travels in fewer bits: "hsdp+grads_as=int8".
    precision: fp32, bf16 (fp32 masters), bf16-autocast (fp32 weights, the model runs under torch.autocast), fp16 (fp32
        masters, loss scaling), pure-bf16, or a `Precision`.
    reduce_dtype: what gradients travel as and are summed in, if not what the precision says.
    node_size: ranks per node; torchrun's local world size unless given.
    units: "auto", class names of the modules that travel as one, or a number of parameters.
    memory_budget: bytes for units gathered ahead; unless given, one unit is gathered ahead of the one computing.
    early_update: update a unit as soon as its gradient is final, while the backward of others still runs. No clipping,
        and nobody may read weights between backward() and step().
    skip_nonfinite: leave out steps whose gradient is not finite, on all ranks, as fp16 does always; else a NaN becomes
        weights. The host waits for the gradients' norm.
    seed: for weights of a model built on the meta device.
    batch: for "auto", what activations depend on: sequences of a micro-batch, tokens of each, and how many
        micro-batches make a step (one unless given). Without it a quarter of the memory is left to them.
    disk_path: a folder on a local disk for what rests on disk; nothing is left in it afterwards. "auto" uses it where
        the host is short, too.
    """
    world = everyone()
    whole_numbers = {"node_size": node_size, "memory_budget": memory_budget, "seed": seed}
    optimizers = all_or_none(world, lambda: _given(model, optimizer, whole_numbers))
    path = None if disk_path is None else Path(disk_path)
    machine = None if moves_behind_auto(strategy) is None else _machine(world, node_size, path)
    plan = all_or_none(
        world,
        lambda: _prepare(
            model, optimizers, strategy, precision_of(precision, reduce_dtype), make_axes(node_size), units,
            memory_budget, early_update, skip_nonfinite, seed, machine, batch, path,
        ),
    )  # fmt: skip
    require_agreement(world, plan.facts)
    mesh = connect(plan.axes)
    host = all_or_none(world, lambda: _host_memory(plan, mesh.device, path))
    built, places = _build_units(model, plan, mesh.device, seed, host)
    scaler = LossScaler(mesh.device) if plan.precision.loss_scaling else None
    loss_scale = None if scaler is None else scaler.scale
    engine = Engine(mesh, plan.schedule, built, plan.precision, memory_budget, loss_scale, host)
    engine.chosen = plan.chosen
    for _, place in places:
        place.lender = engine
    modules = dict(model.named_modules())
    install_hooks(engine, modules)
    install_encoder_hooks(engine, modules)
    install_direct_gradients(engine, modules)
    install_casts(modules, built, plan.precision, plan.keep_fp32)
    install_root_hooks(engine, model)
    sharded = []
    for number, each in enumerate(optimizers):
        cut_state(each, places)
        on_host = HostUpdates(each, plan.row_names[number], cores_for(local_rank(), num_local_ranks()))
        own = OwnFlats(engine, number)
        # What it keeps already, if it has stepped before.
        known = [state for state in own.trainable_states if any(p in each.state for p in state.resting_params)]
        on_host.take_over([state for state in known if state.flat.host_updates])
        sharded.append(
            ShardedOptimizer(each, own, channels_of(mesh, "reduce"), scaler, early_update, on_host, skip_nonfinite)
        )
    if early_update:
        engine.updates.make_early(sharded[0].update_early)
    engine.gradients.settings = partial(settings_number, optimizers)

    def zero_grad(set_to_none: bool = True) -> None:
        for each in sharded:
            each.zero_grad(set_to_none)
        if not sharded:
            engine.forget_gradients(engine.trainable_states, set_to_none)

    guard(model, engine, zero_grad)
    serve_save_pretrained(model)
    if mesh.rank == 0:
        logger.info("%s", describe(model))
        if sharded and plan.idle:
            logger.warning("trained by no optimizer, though requires_grad is True: %s", _some(plan.idle))
    tell_of_statistics(model, mesh)
    return model, (None if optimizer is None else sharded[0] if optimizer in optimizers else sharded)


def _given(model: Any, optimizer: Any, whole_numbers: dict[str, Any]) -> list[torch.optim.Optimizer]:
    """The optimizers. Arguments of another kind than they should be are refused."""
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"sw.shard(model, optimizer, strategy): the model is a {_kind(model)}, no nn.Module")
    found = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer or []
    if isinstance(found, str):
        raise ConfigurationError(
            f"sw.shard(model, {found!r}): the second argument is the optimizer; write sw.shard(model, optimizer, "
            f"{found!r}), or strategy={found!r}"
        )
    if not isinstance(found, Sequence) or not all(isinstance(each, torch.optim.Optimizer) for each in found):
        raise ConfigurationError(
            f"sw.shard(model, optimizer, strategy): the optimizer is a {_kind(optimizer)}; give a "
            "torch.optim.Optimizer, a list of them, or None"
        )
    for name, value in whole_numbers.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ConfigurationError(f"{name}={value!r}: give a whole number, not a {type(value).__name__}")
    return list(found)


def _kind(value: object) -> str:
    members = ", ".join(sorted({type(each).__name__ for each in value})) if isinstance(value, (list, tuple)) else ""
    name = f"class {value.__name__}" if isinstance(value, type) else type(value).__name__
    return f"{name} of {members}" if members else name


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything that is decided before anything is changed."""

    axes: Axes
    precision: Precision
    found: list[FoundUnit]
    schedule: Schedule
    keep_fp32: tuple[str, ...]
    row_names: list[tuple[str, ...]]  # of what each optimizer keeps where the host updates
    idle: list[str]  # parameters that are trained, and that no optimizer has
    facts: Facts
    chosen: Plan | None  # by "auto"


def _prepare(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    strategy: Strategy,
    precision: Precision,
    axes: Axes,
    units: Units,
    memory_budget: int | None,
    early_update: bool,
    skip_nonfinite: bool,
    seed: int | None,
    machine: Machine | None,
    batch: Batch | None,
    disk_path: Path | None,
) -> _Plan:
    if any(find_engine(module) is not None for module in model.modules()):
        raise StateError(
            f"this {type(model).__name__}, or a part of it, is sharded already: sw.shard may be called once for a model"
        )
    refuse_wrapped(model)
    found = find_units(model, units)
    refuse_shared_memory(model)
    if not found:
        raise ConfigurationError(f"this {type(model).__name__} has no parameters: there is nothing to shard")
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    optimizer_of = optimizer_of_each(optimizers, names)
    found = [_numbered(unit, optimizer_of) for unit in found]
    idle = [param.name for unit in found for param in unit.params if param.trainable and param.name not in optimizer_of]
    refuse_idle_patterns(dict(model.named_modules()), precision.keep_fp32)
    keep_fp32 = kept_patterns(model, precision)
    chosen = None
    if machine is not None:
        training = _training(optimizers, precision, batch)
        moves = moves_behind_auto(strategy) or ()
        asked = Asked(training, batch, units, memory_budget, keep_fp32, moves, disk_path)
        chosen = choose(model, found, asked, machine)
    elif batch is not None:
        raise ConfigurationError(f"batch={batch} with strategy={strategy!r}: only 'auto' asks for it; leave it out")
    layouts = layouts_for(strategy, [unit.name for unit in found]) if chosen is None else layouts_in(chosen)
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
    if disk_path is not None and chosen is None and not any("disk" in plan.layout.places for plan in plans):
        raise ConfigurationError(
            f"disk_path={str(disk_path)!r} with strategy={strategy!r}, which puts nothing on disk; leave it out, or "
            "say what goes there, as in zero3+optimizer=disk"
        )
    schedule = make_schedule(plans, range(len(plans)), memory_budget)
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
        row_names.append(rows_kept(optimizer) if any(flat.host_updates for flat in own) else ())
        if any(flat.depth_of_master or flat.master_on == "disk" for flat in own):
            refuse_unless_elementwise(optimizer, device())
        if any(flat.master_on == "disk" for flat in own):
            refuse_unless_rows(optimizer)
        if is_eight_bit(optimizer) and any(flat.host_updates and flat.master != FP32 for flat in own):
            raise ConfigurationError(
                f"optimizer {type(optimizer).__name__} on the host with master weights in {precision.master}: the host "
                "updates 8-bit moments beside fp32 masters; use precision='bf16', or leave the optimizer on the device"
            )
    if early_update and len(optimizers) > 1:
        raise ConfigurationError(
            "early_update=True with several optimizers: a backward would step all of them; leave early_update"
        )
    if early_update and (not optimizers or precision.loss_scaling):
        raise ConfigurationError(
            "early_update=True without an optimizer: there is nothing to update"
            if not optimizers
            else "early_update=True with fp16: a step that overflowed is skipped, and is found out after the backward; "
            "use bf16, or leave early_update"
        )
    if early_update and skip_nonfinite:
        raise ConfigurationError(
            "early_update=True with skip_nonfinite=True: weights are updated before all gradients are known; leave one"
        )
    if any(param.is_meta for param in names) and seed is None:
        raise ConfigurationError(
            "the model is on the meta device: give sw.shard a seed= to initialise its weights with"
        )
    settings = {
        "the precision": precision,
        "the ranks per node (node_size)": axes.node_size,
        "memory_budget": memory_budget,
        "early_update": early_update,
        "skip_nonfinite": skip_nonfinite,
        "seed": seed,
    }
    facts = list(facts_about(model, found, plans, settings))
    for each in optimizers or (None,):
        facts += facts_about_optimizer(each, names)
    return _Plan(axes, precision, found, schedule, keep_fp32, row_names, idle, facts, chosen)


def _numbered(unit: FoundUnit, optimizer_of: dict[str, int]) -> FoundUnit:
    """With the optimizer of each parameter; what no optimizer has goes with the first."""
    return replace(
        unit, params=tuple(replace(param, optimizer=optimizer_of.get(param.name, 0)) for param in unit.params)
    )


def _refuse_codecs_of(flat: Flat, unit_name: str, precision: Precision) -> None:
    """What depends on dtypes; the rest a layout refuses."""
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


def num_cores() -> int:
    """That update on the host for this rank."""
    return len(cores_for(local_rank(), num_local_ranks()).ids)


def _host_memory(plan: _Plan, where: torch.device, disk_path: Path | None) -> HostMemory:
    units = [unit.flats for unit in plan.schedule.units]
    names = dict.fromkeys(name for names in plan.row_names for name in names)
    return HostMemory(units, tuple(names), disk_path, where.type == "cuda")


@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """A micro-batch that is not the last: gradients are added up, and reduced only as far as the layout wants."""
    engine = engine_of(model)
    before = engine.is_sync
    engine.is_sync = False
    try:
        yield
    finally:
        engine.is_sync = before


def traffic(model: nn.Module) -> Traffic:
    """What this rank sent in the last complete step, by axis, collective and dtype, and moved between its memories."""
    engine = engine_of(model)
    engine.finish_updates()
    return replace(engine.mesh.ledger.traffic(), moves=engine.host.last_moves.by_way())


def describe(model: nn.Module) -> str:
    """What runs: the mesh, the precision, and every unit's layout."""
    engine = engine_of(model)
    mesh, precision = engine.mesh, engine.precision
    autocast = "" if precision.autocast is None else f" under autocast to {precision.autocast}"
    held = state_bytes(flat for plan in engine.schedule.units for flat in plan.flats)
    lines = [
        f"world {mesh.world_size} = {mesh.world_size // mesh.node_size} nodes x {mesh.node_size}, on {mesh.device}",
        f"computes in {precision.compute}{autocast}, updates in {precision.master}, reduces in {precision.reduce}",
        f"state per rank (Adam): {held}",
    ]
    host = engine.host
    if host.size.host:
        kind = "pinned" if host.arena.is_pinned else "not pinned"
        lines.append(f"on the host: {host.size.host / 1e6:,.1f} MB per rank, {kind}, updated by {num_cores()} cores")
    if host.disk is not None:
        lines.append(f"on disk: {host.size.disk / 1e6:,.1f} MB per rank in {host.disk.folder}, removed at the end")
    runs: list[tuple[Layout, list[str]]] = []
    for plan in engine.schedule.units:
        if not runs or runs[-1][0] != plan.layout:
            runs.append((plan.layout, []))
        runs[-1][1].append(plan.name)
    for layout, names in runs:
        span = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        lines.append(f"{len(names)} units, {span}: {layout}")
    return "\n".join(lines)


def _machine(world: Channel, node_size: int | None, disk_path: Path | None) -> Machine:
    """What this rank's device can do, with the memory that is free on every rank and links as fast as they are."""
    axes = make_axes(node_size)
    return machine_here(world, axes, min(exchange(world, free_bytes_here())), disk_path)


def _training(optimizers: list[torch.optim.Optimizer], precision: Precision, batch: Batch | None) -> Training:
    micro_batch, seq, num_micro_batches = (*(batch or (1, 1)), 1)[:3]
    return Training(
        precision=precision,
        micro_batch=micro_batch,
        seq=seq,
        num_micro_batches=num_micro_batches,
        moments=max((num_moments(each, precision) for each in optimizers), default=0),
    )


def free_bytes_here() -> int:
    """Memory that this rank could take: its GPU's, or its share of the machine's."""
    where = device()
    if where.type == "cuda":
        return torch.cuda.mem_get_info(where)[0]
    page = os.sysconf("SC_PAGE_SIZE")
    free, total = os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    limit = memory_limit(cgroup_values("memory.max", "memory.limit_in_bytes"), total)
    return min(free, total if limit is None else limit) // num_local_ranks()


def _build_units(
    model: nn.Module, plan: _Plan, where: torch.device, seed: int | None, host: HostMemory
) -> tuple[list[Unit], list[tuple[nn.Parameter, Place]]]:
    """Take the weights into flats. The user's parameters stand for them afterwards; their memory is let go."""
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
        # On the meta device again: the initialisation of other units must not find this one's parts.
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
