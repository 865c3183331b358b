"""From a model as a script of another library has it to what `sw.shard` takes.

Such scripts say their precision in words of their own, may give every rank other weights to begin with (torch's
DistributedDataParallel sends the first rank's to all), and may have replaced a model's forward.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..api import shard
from ..base.errors import ConfigurationError, did_you_mean
from ..core.engine.rank_agreement import checksum
from ..core.mesh import device, everyone
from ..core.precision import DTYPES, precision_of
from ..core.schedule.units import find_blocks
from ..core.wire.collectives import broadcast_from_first, exchange

# Keywords of `sw.shard`.
WORDS = frozenset(inspect.signature(shard).parameters) - {"model", "optimizer"}

# What computes as it is stored: the precision that trains such parameters without any mixture.
_UNMIXED = {torch.float32: "fp32", torch.bfloat16: "pure-bf16"}


def refuse_unknown(where: str, words: Iterable[str], known: Iterable[str] = WORDS) -> None:
    """Keywords that nobody would read."""
    for word in sorted(set(words) - set(known)):
        raise ConfigurationError(f"{where}: unknown keyword {word!r}; {did_you_mean(word, known)}")


def refuse_contradiction(words: Mapping[str, Any], mixed_precision: str) -> None:
    """A precision that is said twice must be the same one."""
    asked = words.get("precision")
    if asked is None or mixed_precision == "no":
        return
    if precision_of(asked, None).products != DTYPES[mixed_precision]:
        raise ConfigurationError(
            f"precision={asked!r} and mixed_precision={mixed_precision!r} (bf16= or fp16= of TrainingArguments, or "
            "`accelerate launch`) contradict each other: leave one of them out"
        )


def shard_as_asked(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, words: Mapping[str, Any], mixed_precision: str
) -> Any:
    """Shard a model that a script prepares, in place; gives back the sharded optimizer."""
    _share_first_weights(model)
    said = {word: value for word, value in words.items() if value is not None}
    found = {"precision": _precision(model, mixed_precision), "units": _units(model), **said}
    if found["precision"] is None:
        kinds = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in _dtypes(model)))
        raise ConfigurationError(
            f"this {type(model).__name__} has parameters in {kinds}, and no mixed precision was asked for: say "
            "precision='bf16' (fp32 masters), 'fp32' or 'pure-bf16'"
        )
    return shard(model, optimizer, **found)[1]


def _precision(model: nn.Module, mixed_precision: str) -> str | None:
    if mixed_precision != "no":
        return mixed_precision
    dtypes = _dtypes(model)
    return _UNMIXED.get(next(iter(dtypes))) if len(dtypes) == 1 else None


def _dtypes(model: nn.Module) -> set[torch.dtype]:
    return {param.dtype for param in model.parameters() if param.is_floating_point()}


def _units(model: nn.Module) -> Any:
    """A forward that was put in the place of a model's own (TRL's fused head, Liger's kernels) may read the weights of
    the output layer without calling it. Then only blocks are units, and the rest is there throughout the forward."""
    blocks = find_blocks(model)
    if not blocks or not any("forward" in vars(module) for module in model.modules()):
        return "auto"
    return sorted({type(model.get_submodule(path)).__name__ for path in blocks})


def _share_first_weights(model: nn.Module) -> None:
    """The first rank's parameters and buffers on every rank, where they differ: adapters are drawn at random."""
    world = everyone()
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = exchange(world, {name: (tuple(value.shape), str(value.dtype)) for name, value in tensors.items()})
    if any(other != shapes[0] for other in shapes):
        return  # not the same model, which `shard` will say
    sums = exchange(world, {name: checksum(value) for name, value in tensors.items()})
    for name, value in tensors.items():
        if any(other[name] != sums[0][name] for other in sums) and not value.is_meta:
            travelling = value.detach().to(device(), copy=True).contiguous()
            broadcast_from_first(world, travelling)
            with torch.no_grad():
                value.copy_(travelling)
