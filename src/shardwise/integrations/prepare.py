"""Calling `sw.shard` for a model in a script of another library.

Such scripts name precisions differently, may initialise each rank with different weights (DistributedDataParallel
broadcasts those of the first rank), and may have replaced a model's forward.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..api.preparation import checksum
from ..api.sharding import shard
from ..base.errors import ConfigurationError, did_you_mean
from ..core.mesh import device, everyone
from ..core.schedule.units import find_blocks
from ..core.wire.collectives import broadcast_from_first, exchange

# Keywords of `sw.shard`.
WORDS = frozenset(inspect.signature(shard).parameters) - {"model", "optimizer"}

# The `precision` of `sw.shard` for a model of this dtype, if no mixed precision is given.
_UNMIXED = {torch.float32: "fp32", torch.bfloat16: "pure-bf16"}


def refuse_unknown(where: str, words: Iterable[str], known: Iterable[str] = WORDS) -> None:
    """Raise ConfigurationError for an unknown keyword."""
    for word in sorted(set(words) - set(known)):
        raise ConfigurationError(f"{where}: unknown keyword {word!r}; {did_you_mean(word, known)}")


def shard_for_script(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, words: Mapping[str, Any], mixed_precision: str
) -> Any:
    """Shard a model in place, with the keywords `words` of `sw.shard`. Return the sharded optimizer."""
    _share_first_weights(model)
    given = {word: value for word, value in words.items() if value is not None}
    dtypes = {param.dtype for param in model.parameters() if param.is_floating_point()}
    unmixed = _UNMIXED.get(next(iter(dtypes))) if len(dtypes) == 1 else None
    precision = unmixed if mixed_precision == "no" else mixed_precision
    found = {"precision": precision, "units": _units(model), **given}
    if found["precision"] is None:
        kinds = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        what = f"this {type(model).__name__} has parameters in {kinds}, but no mixed precision was given"
        raise ConfigurationError(f"{what}: set precision='bf16' (fp32 masters), 'fp32' or 'pure-bf16'")
    return shard(model, optimizer, **found)[1]


def _units(model: nn.Module) -> Any:
    """The `units` argument: only blocks if a forward was replaced, else "auto".

    A replaced forward (TRL's fused head, Liger's kernels) may read the weights of the output layer without calling it.
    With blocks as the only units, all other weights are available throughout the forward.
    """
    blocks = find_blocks(model)
    if not blocks or not any("forward" in vars(module) for module in model.modules()):
        return "auto"
    return sorted({type(model.get_submodule(path)).__name__ for path in blocks})


def _share_first_weights(model: nn.Module) -> None:
    """Broadcast the first rank's parameters and buffers where ranks differ, as do adapters initialised at random."""
    world = everyone()
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = exchange(world, {name: (tuple(value.shape), str(value.dtype)) for name, value in tensors.items()})
    if any(other != shapes[0] for other in shapes):
        return  # different models, which `shard` reports
    sums = exchange(world, {name: checksum(value) for name, value in tensors.items()})
    for name, value in tensors.items():
        if any(other[name] != sums[0][name] for other in sums) and not value.is_meta:
            buffer = value.detach().to(device(), copy=True).contiguous()
            broadcast_from_first(world, buffer)
            with torch.no_grad():
                value.copy_(buffer)
