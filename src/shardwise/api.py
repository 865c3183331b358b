"""The public function `shard`, and small functions about a sharded model."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack, overload
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .base.container_limits import cgroup_values, memory_limit
from .base.dtypes import DTypeLike
from .base.errors import ConfigurationError
from .core.engine.buffers import warn_about_running_statistics
from .core.engine.guards import engine_of
from .core.engine.rank_agreement import all_or_none
from .core.engine.sharding import ShardRequest, shard_model
from .core.layout import AUTO, Layout, Strategy, layouts_for
from .core.mesh import device, everyone, local_rank, make_axes, num_local_ranks
from .core.native.cores import cores_for
from .core.optim.probe import num_moments
from .core.optim.sharded_optimizer import ShardedOptimizer
from .core.precision import Precision, precision_of
from .core.schedule.model import UnitSpec
from .core.schedule.state_bytes import state_bytes
from .core.schedule.units import Units
from .core.wire.collectives import Channel, exchange
from .core.wire.ledger import Traffic
from .planner.assess import Machine
from .planner.auto import AutoRequest, Batch, choose, layouts_in, machine_here
from .planner.planning import Plan
from .planner.search import moves_behind_auto
from .planner.training import Training

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
) -> tuple[M, ShardedOptimizer | list[ShardedOptimizer] | None]:
    """Shard a model and its optimizer; returns the same module, with hooks, and an optimizer that updates shards.

    optimizer: one, or a list with different parameters; then a list is returned. In fp16 they share one loss scale.
    strategy: a preset's name, a `Layout`, or a mapping from patterns of unit names to either; "auto" takes the fastest
        plan that fits into the free memory. A name may be followed by offloaded state, "zero3+optimizer=host:0.6", and
        by codecs for collectives, "hsdp+grads_as=int8".
    precision: fp32, bf16 (fp32 masters), bf16-autocast (fp32 weights, the model runs under torch.autocast), fp16 (fp32
        masters, loss scaling), pure-bf16, or a `Precision`.
    reduce_dtype: the dtype in which gradients are sent and summed (default: that of the precision).
    node_size: ranks per node (default: torchrun's local world size).
    units: "auto", class names of the modules that are gathered as one unit, or a number of parameters.
    memory_budget: bytes for gathered units (default: two units, the one that computes and the next one).
    early_update: update a unit as soon as its gradient is final, while the backward of others still runs. Clipping is
        not possible then, and weights must not be read between backward() and step().
    skip_nonfinite: skip steps whose gradient is not finite, on all ranks, as fp16 always does; else a NaN gets into the
        weights. The host waits for the gradients' norm.
    seed: initialises the weights of a model built on the meta device.
    batch: for "auto", the size of the activations: sequences per micro-batch, tokens per sequence, and micro-batches
        per step (default: one). Without it a quarter of the memory is reserved for them.
    disk_path: a folder on a local disk for state on disk; no file is left in it afterwards. "auto" uses it if host
        memory is short.
    """
    world = everyone()
    whole_numbers = {"node_size": node_size, "memory_budget": memory_budget, "seed": seed}
    optimizers = all_or_none(world, lambda: _given(model, optimizer, whole_numbers))
    path = None if disk_path is None else Path(disk_path)
    machine = None if moves_behind_auto(strategy) is None else _machine(world, node_size, path)
    request = all_or_none(
        world,
        lambda: ShardRequest(
            precision_of(precision, reduce_dtype), make_axes(node_size), units, memory_budget, early_update,
            skip_nonfinite, seed, path,
        ),
    )  # fmt: skip

    def choose_layouts(found: list[UnitSpec], keep_fp32: tuple[str, ...]) -> list[Layout]:
        if machine is None:
            return _layouts_as_named(strategy, found, batch, path)
        training = _training(optimizers, request.precision, batch)
        asked = AutoRequest(training, batch, units, memory_budget, keep_fp32, moves_behind_auto(strategy) or (), path)
        chosen = _CHOSEN[model] = choose(model, found, asked, machine)
        return layouts_in(chosen)

    sharded = shard_model(world, model, optimizers, request, choose_layouts)
    mesh = sharded.engine.mesh
    if mesh.rank == 0:
        logger.info("%s", describe(model))
        if sharded.optimizers and sharded.unoptimized:
            logger.warning("trained by no optimizer, though requires_grad is True: %s", _some(sharded.unoptimized))
    warn_about_running_statistics(model, mesh)
    if optimizer is None:
        return model, None
    return model, sharded.optimizers[0] if optimizer in optimizers else sharded.optimizers


def chosen_plan(model: nn.Module) -> Plan | None:
    """The plan that "auto" chose for this model; None if the strategy was given."""
    return _CHOSEN.get(model)


def _layouts_as_named(
    strategy: Strategy, found: list[UnitSpec], batch: Batch | None, disk_path: Path | None
) -> list[Layout]:
    if batch is not None:
        raise ConfigurationError(f"batch={batch} with strategy={strategy!r}: only 'auto' asks for it; leave it out")
    layouts = layouts_for(strategy, [unit.name for unit in found])
    if disk_path is not None and not any("disk" in layout.places for layout in layouts):
        raise ConfigurationError(
            f"disk_path={str(disk_path)!r} with strategy={strategy!r}, which puts nothing on disk; leave it out, or "
            "say what goes there, as in zero3+optimizer=disk"
        )
    return layouts


def _given(model: Any, optimizer: Any, whole_numbers: dict[str, Any]) -> list[torch.optim.Optimizer]:
    """Return the optimizers as a list. Refuse arguments of a wrong type."""
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


def num_cores() -> int:
    """Number of processor cores that run updates on the host for this rank."""
    return len(cores_for(local_rank(), num_local_ranks()).ids)


@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Inside, run micro-batches before the last: gradients are summed, and reduced only as far as they are split."""
    engine = engine_of(model)
    before = engine.is_sync
    engine.is_sync = False
    try:
        yield
    finally:
        engine.is_sync = before


def traffic(model: nn.Module) -> Traffic:
    """Bytes that this rank sent in the last complete step, by axis, collective and dtype, and between its memories."""
    engine = engine_of(model)
    engine.finish_updates()
    return replace(engine.mesh.ledger.traffic(), moves=engine.host.last_moves.by_way())


def describe(model: nn.Module) -> str:
    """Describe what runs: the mesh, the precision and the layout of every unit."""
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
    """The device of this rank, with the memory that is free on every rank and the measured speed of the links."""
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
    """Free memory for this rank: that of its GPU, or its share of the machine's."""
    where = device()
    if where.type == "cuda":
        return torch.cuda.mem_get_info(where)[0]
    page = os.sysconf("SC_PAGE_SIZE")
    free, total = os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    limit = memory_limit(cgroup_values("memory.max", "memory.limit_in_bytes"), total)
    return min(free, total if limit is None else limit) // num_local_ranks()
