"""`sw.shard`: check everything on all ranks, then replace the weights of a model by flats and install hooks."""

import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack, overload
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase

from ..base.dtypes import DTypeLike
from ..base.errors import ConfigurationError
from ..base.processes import memory_limit
from ..core.engine.direct_gradients import install_direct_gradients
from ..core.engine.guards import engine_of, guard
from ..core.engine.hooks import install_hooks, install_root_hooks
from ..core.engine.rank_agreement import all_or_none, require_agreement
from ..core.engine.runtime import Engine
from ..core.layout import AUTO, Strategy
from ..core.mesh import connect, device, everyone, local_rank, make_axes, num_local_ranks
from ..core.native.cores import cores_for
from ..core.offload.host_memory import HostMemory
from ..core.optim.clip import LossScaler
from ..core.optim.groups import cut_state, settings_number
from ..core.optim.host_updates import HostUpdates, may_run_ahead
from ..core.optim.sharded_optimizer import ShardedOptimizer
from ..core.precision import Precision, precision_of
from ..core.schedule.flat import Flat
from ..core.schedule.state_bytes import HOST_SHARE, spares_of
from ..core.schedule.units import Units
from ..core.wire.collectives import Channel, exchange
from ..planner.auto import Batch, machine_here, shares_here
from ..planner.planning import Plan
from ..planner.search import changes_after_auto
from ..planner.training import num_bytes_of
from .building import build_units
from .casts import install_casts
from .full_weights import serve_save_pretrained
from .preparation import Prepared, Request, prepare
from .sharded_model import describe

logger = logging.getLogger("shardwise")

M = TypeVar("M", bound=nn.Module)
# The plan that "auto" chose, by model.
_CHOSEN: WeakKeyDictionary[nn.Module, Plan] = WeakKeyDictionary()


class _ShardKeywords(TypedDict, total=False):
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
    speculation: int | str


@overload
def shard(
    model: M, optimizer: None = None, strategy: Strategy = AUTO, **words: Unpack[_ShardKeywords]
) -> tuple[M, None]: ...
@overload
def shard(
    model: M, optimizer: torch.optim.Optimizer, strategy: Strategy = AUTO, **words: Unpack[_ShardKeywords]
) -> tuple[M, ShardedOptimizer]: ...
@overload
def shard(
    model: M, optimizer: Sequence[torch.optim.Optimizer], strategy: Strategy = AUTO, **words: Unpack[_ShardKeywords]
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
    speculation: int | str = AUTO,
) -> tuple[M, ShardedOptimizer | list[ShardedOptimizer] | None]:
    """Shard a model and its optimizer; returns the same module, with hooks, and an optimizer that updates shards.

    optimizer: one, or a list with different parameters; then a list is returned. In fp16 they share one loss scale.
    strategy: a preset's name, a `Layout`, or a mapping from patterns of unit names to either; "auto" takes the fastest
        plan that fits into the free memory. A name may be followed by offloads ("zero3+optimizer=host:0.6" offloads
        60 % of the optimizer state) and by codecs for collectives ("hsdp+grads_as=int8").
    precision: fp32, bf16 (fp32 masters), bf16-autocast (fp32 weights, the model runs under torch.autocast), fp16 (fp32
        masters, loss scaling), pure-bf16, or a `Precision`.
    reduce_dtype: the dtype in which gradients are sent and summed (default: that of the precision).
    node_size: ranks per node (default: torchrun's local world size).
    units: "auto", class names of the modules that are gathered as one unit, or a number of parameters.
    memory_budget: bytes for gathered units (default: two units, the one that computes and the next one).
    early_update: update a unit as soon as its gradient is final, while the backward of others still runs. Clipping is
        not possible then, and weights must not be read between backward() and step().
    skip_nonfinite: skip a step on all ranks if a gradient is not finite, as fp16 always does; otherwise NaN gets into
        the weights. The host then waits for the gradients' norm in each step.
    seed: initialises the weights of a model built on the meta device.
    batch: for "auto", the size of the activations: sequences per micro-batch, tokens per sequence, and micro-batches
        per step (default: one). Without it a quarter of the memory is reserved for them.
    disk_path: a folder on a local disk for state on disk; no file is left in it afterwards. "auto" uses it if host
        memory is short.
    speculation: memory of each rank, in bytes or as "8GB", in which updates on the host are computed before the
        norm of all gradients is known. They count if clip_grad_norm clips nothing; otherwise they are computed again,
        so results are the same. "auto" is half of the free memory if the device is a GPU and no activations are
        offloaded. 0 turns it off. A size includes space on disk, for state there.
    """
    world = everyone()
    whole_numbers = {"node_size": node_size, "memory_budget": memory_budget, "seed": seed}
    optimizers = all_or_none(world, lambda: _given(model, optimizer, whole_numbers))
    path = None if disk_path is None else Path(disk_path)
    machine = None
    if changes_after_auto(strategy) is not None:
        machine = machine_here(world, make_axes(node_size), min(exchange(world, free_bytes_here())), path)
    plan = all_or_none(
        world,
        lambda: prepare(
            Request(
                model, optimizers, strategy, machine, precision_of(precision, reduce_dtype), make_axes(node_size),
                units, memory_budget, early_update, skip_nonfinite, seed, batch, path, speculation,
            )
        ),
    )  # fmt: skip
    require_agreement(world, plan.facts)
    sharded = _shard(world, plan)
    if plan.chosen is not None:
        _CHOSEN[model] = plan.chosen
    mesh = engine_of(model).mesh
    if mesh.rank == 0:
        logger.info("%s", describe(model))
        _warn(plan, mesh.world_size)
    if optimizer is None:
        return model, None
    return model, sharded[0] if optimizer in optimizers else sharded


def _shard(world: Channel, plan: Prepared) -> list[ShardedOptimizer]:
    request, model, mesh = plan.request, plan.request.model, connect(plan.request.axes)
    row_names = tuple(dict.fromkeys(name for names in plan.row_names for name in names))
    flats = [unit.flats for unit in plan.schedule.units]
    pin = mesh.device.type == "cuda"
    # Measured before any rank takes its part.
    shares = exchange(world, shares_here(num_local_ranks(), request.disk_path))
    spared = all_or_none(world, lambda: _spared(plan, len(row_names), *map(min, zip(*shares, strict=True))))
    host = all_or_none(world, lambda: HostMemory(flats, row_names, request.disk_path, pin, spared))
    units, places = build_units(model, plan.specs, plan.schedule, mesh.device, request.seed, host)
    scaler = LossScaler(mesh.device) if request.precision.loss_scaling else None
    loss_scale = None if scaler is None else scaler.scale
    engine = Engine(mesh, plan.schedule, units, request.precision, request.memory_budget, loss_scale, host)
    for _, place in places:
        place.lender = engine
    modules = dict(model.named_modules())
    install_hooks(engine, modules)
    install_direct_gradients(units, modules)
    install_casts(modules, units, request.precision, plan.keep_fp32)
    install_root_hooks(engine, model)
    sharded = []
    for number, each in enumerate(request.optimizers):
        cut_state(each, places)
        on_host = HostUpdates(each, plan.row_names[number], cores_for(local_rank(), num_local_ranks()))
        own = [state for state in engine.trainable_states if state.flat.optimizer == number]
        # An optimizer that has stepped before keeps its state.
        known = [state for state in own if any(param in each.state for param in state.resting_params)]
        on_host.take_over([state for state in known if state.flat.host_updates])
        reduce, early, skip = mesh.channels["reduce"], request.early_update, request.skip_nonfinite
        sharded.append(ShardedOptimizer(each, engine, own, reduce, scaler, early, on_host, skip))
    if request.early_update:
        engine.reductions.update_early = sharded[0].update_early
    if spared:
        engine.reductions.update_ahead = [each.update_ahead for each in sharded]
    engine.reductions.settings = partial(settings_number, request.optimizers)

    def zero_grad(set_to_none: bool = True) -> None:
        for each in sharded:
            each.zero_grad(set_to_none)
        if not sharded:
            engine.forget_gradients(engine.trainable_states, set_to_none)

    guard(model, engine, zero_grad)
    serve_save_pretrained(model)
    return sharded


def _spared(plan: Prepared, num_rows: int, on_host: int, on_disk: int) -> list[Flat]:
    """The flats for which spare memory is taken."""
    request = plan.request
    ahead = {number for number, optimizer in enumerate(request.optimizers) if may_run_ahead(optimizer)}
    size = 0 if request.early_update else num_bytes_of(request.speculation)
    shares, is_gpu = (round(HOST_SHARE * on_host), on_disk), device().type == "cuda"
    spares = spares_of(plan.schedule, num_rows, size, shares, is_gpu, ahead)
    if spares.why_not:
        raise ConfigurationError(spares.why_not)
    return [flat for _, flat in spares.flats]


def _warn(plan: Prepared, world_size: int) -> None:
    """Warn about parameters that no optimizer updates, and about batch norms with different statistics per rank."""
    names = plan.unoptimized if plan.request.optimizers else []
    if names:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        logger.warning("trained by no optimizer, though requires_grad is True: %s%s", ", ".join(names[:8]), more)
    norms = [(path, each) for path, each in plan.request.model.named_modules() if isinstance(each, _NormBase)]
    own = [path for path, each in norms if not isinstance(each, SyncBatchNorm) and each.running_mean is not None]
    if own and world_size > 1:
        logger.warning(
            f"{len(own)} modules ({own[0]}, ...) keep running statistics, which every rank takes from its own batches, "
            "and sw.save writes rank 0's: call sw.sync_buffers(model) on all ranks before evaluating or saving, or "
            "convert the model with nn.SyncBatchNorm.convert_sync_batchnorm before sw.shard"
        )


def chosen_plan(model: nn.Module) -> Plan | None:
    """The plan that "auto" chose for this model; None if the strategy was given."""
    return _CHOSEN.get(model)


def _given(model: Any, optimizer: Any, whole_numbers: dict[str, Any]) -> list[torch.optim.Optimizer]:
    """Return the optimizers as a list. Refuse arguments of a wrong type."""
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"sw.shard(model, optimizer, strategy): the model is a {_kind(model)}, no nn.Module")
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer or []
    if not isinstance(optimizers, Sequence) or not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
        fix = "give a torch.optim.Optimizer, a list of them, or None"
        if isinstance(optimizers, str):
            fix = f"write sw.shard(model, optimizer, {optimizers!r}), or strategy={optimizers!r}"
        raise ConfigurationError(f"sw.shard(model, optimizer, strategy): the optimizer is a {_kind(optimizer)}; {fix}")
    for name, value in whole_numbers.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ConfigurationError(f"{name}={value!r}: give a whole number, not a {type(value).__name__}")
    return list(optimizers)


def _kind(value: object) -> str:
    members = ", ".join(sorted({type(each).__name__ for each in value})) if isinstance(value, (list, tuple)) else ""
    name = f"class {value.__name__}" if isinstance(value, type) else type(value).__name__
    return f"{name} of {members}" if members else name


def free_bytes_here() -> int:
    """Free memory for this rank: of its GPU, or on a CPU its share of the host memory."""
    where = device()
    if where.type == "cuda":
        return torch.cuda.mem_get_info(where)[0]
    page = os.sysconf("SC_PAGE_SIZE")
    free, total = os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    limit = memory_limit(total)
    return min(free, total if limit is None else limit) // num_local_ranks()
