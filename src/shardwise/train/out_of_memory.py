"""Out of memory, explained: what lay there by class, against the plan, and what would help most."""

import gc

import torch
from torch import nn

from ..engine.guards import engine_of
from ..engine.held import memory
from .batching import Batching
from .figures import size
from .settings import Settings


def explain(
    error: torch.OutOfMemoryError,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    batching: Batching,
) -> str:
    held = memory(model, optimizer)
    classes = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in held.by_class().items())
    planned = ", ".join(
        f"{name} {size(num_bytes)}"
        for name, num_bytes in (
            ("params", held.planned.params),
            ("grads", held.planned.grads),
            ("optimizer", held.planned.optimizer),
            ("buffers", held.planned_buffers),
        )
    )
    fixes = _fixes(held.peak_activations or 0, held.planned.total, _split_bytes(model), settings, batching)
    return "\n".join(
        [
            f"does not fit: {str(error).partition('. ')[0]}",
            f"  held now  {classes}; at the peak {size(held.peak)} in all",
            f"  planned   {planned}; activations come on top",
            f"  largest   {', '.join(_largest_tensors())}",
            "  what would help, the largest first:",
            *(f"    {fix}" for fix in fixes),
        ]
    )


def _largest_tensors(num: int = 3) -> list[str]:
    """What this process holds on its GPU, each storage once."""
    found = {
        tensor.untyped_storage().data_ptr(): tensor
        for tensor in gc.get_objects()
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda
    }
    largest = sorted(found.values(), key=lambda tensor: -tensor.untyped_storage().nbytes())[:num]
    return [
        f"{size(tensor.untyped_storage().nbytes())} ({tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')})"
        for tensor in largest
    ]


def _split_bytes(model: nn.Module) -> int:
    """State per rank if all of it were split over all ranks, with two moments."""
    engine = engine_of(model)
    flats = [flat for plan in engine.schedule.units for flat in plan.flats]
    whole = sum(
        flat.num_elems * (3 * flat.master.itemsize + flat.reduce.itemsize if flat.trainable else flat.master.itemsize)
        for flat in flats
    )
    return whole // engine.mesh.world_size


def _fixes(activations: int, state: int, split_state: int, settings: Settings, batching: Batching) -> list[str]:
    """With what each saves, as far as that is known: activations are what was there beside all else at the peak."""
    found: list[tuple[int, str]] = []
    if batching.micro_size > 1:
        saved = activations // 2
        smaller = batching.micro_size // 2
        found.append((saved, f"--per-device-train-batch-size {smaller}: {size(saved)} less, and more micro-batches"))
    if settings.gradient_checkpointing != "full":
        saved = activations * 3 // 4
        found.append((saved, f"--gradient-checkpointing full: up to {size(saved)} less, a third more computation"))
    if batching.num_ranks > 1 and split_state < state:
        saved = state - split_state
        found.append((saved, f"a strategy that splits all state over the ranks: {size(saved)} less, more traffic"))
    if settings.optimizer == "adamw":
        saved = split_state * 3 // 8
        found.append((saved, f"--optimizer adamw8bit: at least {size(saved)} less"))
    found.sort(key=lambda fix: -fix[0])
    return [*(text for _, text in found), "more ranks, or a smaller model"]
