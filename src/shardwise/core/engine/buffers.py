"""Buffers of modules. Every rank has its own: running statistics come from its batches, and differ between ranks."""

import logging

import torch
from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase

from ..mesh import Mesh
from ..wire.collectives import broadcast_from_first, mean_over
from .guards import engine_of

logger = logging.getLogger("shardwise")


def sync_buffers(model: nn.Module) -> None:
    """Give every rank the same buffers: the mean over the ranks of floating ones, rank 0's of all others.

    Every rank calls it, before an evaluation or a checkpoint. Nothing else does: `sw.save` writes rank 0's buffers.
    """
    world = engine_of(model).mesh.world
    averaged = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if averaged:
        # In fp64 the mean of equal values is that value, however many there are.
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


def warn_about_running_statistics(model: nn.Module, mesh: Mesh) -> None:
    """Warn once that each rank will have running statistics of its own."""
    own = [
        path
        for path, module in model.named_modules()
        if isinstance(module, _NormBase) and not isinstance(module, SyncBatchNorm) and module.running_mean is not None
    ]
    if own and mesh.rank == 0 and mesh.world_size > 1:
        logger.warning(
            "%d modules (%s, ...) keep running statistics, which every rank takes from its own batches, and sw.save "
            "writes rank 0's: call sw.sync_buffers(model) on all ranks before evaluating or saving, or convert the "
            "model with nn.SyncBatchNorm.convert_sync_batchnorm before sw.shard",
            len(own),
            own[0],
        )
