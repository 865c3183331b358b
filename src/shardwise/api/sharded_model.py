"""Small functions about a sharded model: micro-batches, traffic, a description, and the buffers of its modules."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby

import torch
from torch import nn

from ..core.engine.guards import engine_of
from ..core.mesh import local_rank, num_local_ranks
from ..core.native.cores import cores_for
from ..core.schedule.state_bytes import state_bytes
from ..core.wire.collectives import broadcast_from_first, mean_over
from ..core.wire.ledger import Traffic


def num_cores() -> int:
    """Number of processor cores that run updates on the host for this rank."""
    return len(cores_for(local_rank(), num_local_ranks()))


@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Run all micro-batches but the last inside: gradients are summed, and reduced only over axes that shard them."""
    engine = engine_of(model)
    before = engine.is_sync
    engine.is_sync = False
    try:
        yield
    finally:
        engine.is_sync = before


def traffic(model: nn.Module) -> Traffic:
    """Bytes that this rank sent in the last complete step, by axis, collective and dtype; and of its offload copies."""
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
    if host.spare_bytes:
        lines.append(f"included: {host.spare_bytes / 1e6:,.1f} MB for updates before the gradients' norm is known")
    for layout, plans in groupby(engine.schedule.units, key=lambda plan: plan.layout):
        names = [plan.name for plan in plans]
        span = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        lines.append(f"{len(names)} units, {span}: {layout}")
    return "\n".join(lines)


def sync_buffers(model: nn.Module) -> None:
    """Make buffers equal on all ranks: floating-point ones become their mean over the ranks, others those of rank 0.

    Call it on all ranks before an evaluation or a checkpoint. shardwise never does: `sw.save` writes rank 0's buffers.
    """
    world = engine_of(model).mesh.world
    averaged = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if averaged:
        # In fp64 the mean of equal values is exactly that value, for any number of ranks.
        flat = torch.cat([buffer.detach().reshape(-1).double() for buffer in averaged])
        mean_over(world, flat)
        parts = flat.split([buffer.numel() for buffer in averaged])
        with torch.no_grad():
            for buffer, part in zip(averaged, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))
    for buffer in model.buffers():
        if not buffer.is_floating_point():
            first = buffer.detach().contiguous()
            broadcast_from_first(world, first)
            buffer.copy_(first)
