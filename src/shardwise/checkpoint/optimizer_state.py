"""The optimizer's part of a checkpoint: its state of each parameter, and the settings of its groups.

State with the shape of a rank's part of a parameter is sharded like the parameter. Quantised state (torchao's 8-bit
optimizers) has blocks whose borders depend on the sharding, so it is saved as fp32 and quantised again when it is
loaded. A block never lies in two shards, so the loaded values are the saved ones.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ..base.errors import CheckpointError, ConfigurationError
from ..core.engine.runtime import Engine
from ..core.optim.groups import shard_groups
from ..core.optim.probe import KNOWN_PACKAGES
from ..core.optim.sharded_optimizer import ShardedOptimizer
from ..core.unit.state import OnDisk
from ..core.unit.user_parameter import place_of
from .index import NAMES, Optimizer, Plain, Saved, Stored

# These settings choose how updates are computed, not their values: the running program sets them.
_RUNTIME_SETTINGS = ("params", "foreach", "fused", "capturable", "differentiable")

# Zero or more optimizers of one model. A checkpoint holds their groups one after the other.
Optimizers = Sequence[ShardedOptimizer]


def own_optimizers(engine: Engine, optimizer: object) -> Optimizers:
    """Return the optimizers; refuse one that `sw.shard` did not return together with the model."""
    one: list[Any] = [] if optimizer is None else [optimizer]
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else one
    for each in given:
        if not isinstance(each, ShardedOptimizer) or not each.belongs_to(engine):
            what = f"this {type(each).__name__} is not the model's"
            raise ConfigurationError(f"{what}: give the one that sw.shard returned with the model")
    return given


@dataclass(frozen=True, slots=True)
class Home:
    """The optimizer and the group that update a parameter, and the group's number in a checkpoint."""

    optimizer: ShardedOptimizer
    number: int
    settings: dict[str, Any]


def owning_groups(optimizers: Optimizers) -> dict[Tensor, Home]:
    """Return the `Home` of each parameter. The keys are this rank's parts of the parameters."""
    groups = [
        (each, group, shards)
        for each in optimizers
        for group, shards in zip(each.inner.param_groups, shard_groups(each.inner), strict=True)
    ]
    return {shard: Home(each, number, group) for number, (each, group, shards) in enumerate(groups) for shard in shards}


def names_in_groups(optimizers: Optimizers) -> list[list[str]]:
    groups = (map(place_of, group["params"]) for group in _groups_of(optimizers))
    return [[place.name for place in group if place is not None] for group in groups]


def _groups_of(optimizers: Optimizers) -> list[dict[str, Any]]:
    return [group for each in optimizers for group in each.inner.param_groups]


def _name_of(optimizers: Optimizers) -> str:
    return "+".join(type(each.inner).__name__ for each in optimizers)


def _number(value: object) -> float:
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise TypeError
    return value.item()


def describe_optimizers(optimizers: Optimizers) -> Optimizer | None:
    if not optimizers:
        return None
    groups = []
    for group in _groups_of(optimizers):
        plain = {}
        for key, value in group.items():
            # Values that JSON cannot hold (a function, for example) are not saved: the running program sets them.
            with suppress(TypeError, ValueError):
                if key not in _RUNTIME_SETTINGS and isinstance(value, (Tensor, list, tuple, Plain)):
                    plain[key] = json.loads(json.dumps(value, default=_number))
        groups.append(plain)
    # All optimizers share one scaler.
    scaler = optimizers[0].scaler
    return Optimizer(_name_of(optimizers), tuple(groups), None if scaler is None else scaler.state())


def restore_optimizers(optimizers: Optimizers, saved: Optimizer, keep_groups: bool) -> None:
    for group, key, value in () if keep_groups else _settings(optimizers, saved):
        now = group.get(key)
        if isinstance(now, Tensor):
            # In place: schedulers, compiled updates and CUDA graphs hold this tensor.
            now.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(now, tuple) else value
    scaler = optimizers[0].scaler
    if scaler is not None and saved.scaler is not None:
        scaler.restore(saved.scaler)


def _settings(optimizers: Optimizers, saved: Optimizer) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield each group with the name and the value of each saved setting that belongs in it."""
    for group, settings in zip(_groups_of(optimizers), saved.groups, strict=True):
        yield from ((group, key, value) for key, value in settings.items() if key not in _RUNTIME_SETTINGS)


def require_same_optimizers(optimizers: Optimizers, saved: Optimizer | None, keep_groups: bool) -> None:
    if saved is None:
        raise CheckpointError("the checkpoint holds no optimizer, and one is to be loaded: load the model alone")
    name, num_groups, scaler = _name_of(optimizers), len(_groups_of(optimizers)), optimizers[0].scaler
    # Other libraries do not always save the class; then only the state has to fit.
    if saved.name not in ("", name):
        raise CheckpointError(f"the checkpoint's optimizer is {saved.name}, this one is {name}: build the same one")
    if not keep_groups and len(saved.groups) != num_groups:
        both = f"has {len(saved.groups)} groups, this one has {num_groups}"
        raise CheckpointError(f"the checkpoint's optimizer {both}: build the same groups")
    for group, key, value in () if keep_groups else _settings(optimizers, saved):
        now = group.get(key)
        if isinstance(now, tuple):
            is_alike = isinstance(value, (list, tuple)) and len(value) == len(now)
        else:
            is_alike = not isinstance(now, (int, float, Tensor)) or isinstance(value, (int, float))
        if not is_alike:
            both = f"the checkpoint's optimizer has {key}={value!r}, this one has {key}={now!r}"
            raise CheckpointError(f"{both}: load with keep_groups=True to continue with this one's settings")
    if scaler is not None and saved.scaler is not None:
        wanted = set(scaler.state())
        if not wanted <= {key for key, value in saved.scaler.items() if isfinite(value)}:
            raise CheckpointError(f"the checkpoint's loss scaler is {saved.scaler}: it lacks one of {sorted(wanted)}")


def describe_state(
    optimizer: ShardedOptimizer, name: str, resting: Tensor, shape: tuple[int, ...]
) -> dict[str, Stored | Plain]:
    """Describe the optimizer's state of a parameter of this shape, of which `resting` is this rank's part.

    It is empty before the first update. State that could not be loaded again is refused.
    """
    found: dict[str, Stored | Plain] = {}
    is_part = resting.numel() < torch.Size(shape).numel()
    for key, value in optimizer.inner.state.get(resting, {}).items():
        what = f"the optimizer {type(optimizer.inner).__name__} keeps {key!r} of parameter {name!r}"
        if isinstance(value, Plain):
            found[key] = value
            continue
        if not isinstance(value, Tensor) or (type(value) not in (Tensor, OnDisk) and not _is_low_bit(optimizer)):
            raise CheckpointError(f"{what} as a {type(value).__name__}, which a checkpoint cannot hold")
        is_like_param = value.shape == resting.shape and key != "step"
        if is_part and not is_like_param and value.numel() > 1:
            both = f"with shape {tuple(value.shape)} for a shard of {tuple(resting.shape)}, so it cannot be cut"
            raise CheckpointError(f"{what} {both} for another world: use a layout whose optimizer is 'whole'")
        dtype = _stored_dtype(optimizer, value)
        if dtype not in NAMES:
            raise CheckpointError(f"{what} as {value.dtype}, which a checkpoint cannot hold")
        found[key] = Stored(shape if is_like_param else tuple(value.shape), NAMES[dtype], ())
    return found


def stored_row(optimizer: ShardedOptimizer, resting: Tensor, key: str, part: slice = slice(None)) -> Tensor:
    """Return a state tensor, or a part of it, as it is written: one-dimensional, and not quantised."""
    value = optimizer.stored_state(resting, key)
    if type(value) is not Tensor:
        value = value.dequantize()
    return value.to(_stored_dtype(optimizer, value)).reshape(-1)[part]


def _stored_dtype(optimizer: ShardedOptimizer, value: Tensor) -> torch.dtype:
    """Return the dtype to write: fp32 if the optimizer quantises, also for short shards, which it does not quantise."""
    return torch.float32 if _is_low_bit(optimizer) and value.is_floating_point() else value.dtype


def _is_low_bit(optimizer: ShardedOptimizer) -> bool:
    return type(optimizer.inner).__module__.startswith(KNOWN_PACKAGES)


def restore_state(home: Home, resting: Tensor, saved: Saved, read: Callable[[str, Tensor], None]) -> None:
    """Set the optimizer's state of a parameter; `read` fills a row with this rank's part of a tensor.

    Existing tensors are overwritten in place, because a step in a CUDA graph reads them at their address.
    """
    inner = home.optimizer.inner
    state = inner.state[resting]
    for key in [key for key in state if key not in saved.state]:
        del state[key]
    for key, item in saved.state.items():
        if isinstance(item, Stored):
            state[key] = _restored(home, resting, saved, key, state.get(key), read)
        elif key == "step" and isinstance(item, (int, float)) and isinstance(state.get(key), Tensor):
            state[key].fill_(item)
        elif key == "step" and isinstance(item, (int, float)) and type(inner).__module__.startswith("torch.optim"):
            state[key] = torch.tensor(float(item), device=_device_of_steps(home, resting))  # like torch's own
        else:
            state[key] = item
    if not state:
        del inner.state[resting]
    home.optimizer.was_restored(resting)


def _restored(
    home: Home, resting: Tensor, saved: Saved, key: str, target: Any, read: Callable[[str, Tensor], None]
) -> Tensor:
    """Read a state tensor into `target`, or into a new tensor if `target` has another shape or dtype."""
    item, is_split, is_low_bit = saved.stored_state[key], saved.is_split(key), _is_low_bit(home.optimizer)
    shape = resting.shape if is_split else torch.Size(item.shape)
    # If the state had the dtype of the saved masters, it gets the dtype of the masters now.
    dtype = resting.dtype if is_split and item.dtype == saved.dtype else item.torch_dtype
    is_reused = isinstance(target, Tensor) and not isinstance(target, OnDisk) and target.shape == shape
    # Only quantised state accepts values of any dtype.
    is_reused &= type(target) is not Tensor or (target.dtype == dtype and target.is_contiguous())
    if not is_reused and is_split and is_low_bit:
        # The optimizer itself decides what it quantises. It quantises second moments (`*_sq`) without a sign.
        target = home.optimizer.inner._new_buffer(resting, not key.endswith("_sq"))  # type: ignore[attr-defined]
    elif not is_reused:
        device = _device_of_steps(home, resting) if key == "step" else resting.device
        target = torch.empty(shape, dtype=dtype, device=device)
    if type(target) is Tensor:
        read(key, target.view(-1))
        return target
    values = torch.empty(shape, dtype=item.torch_dtype, device=resting.device)
    read(key, values.view(-1))
    # torchao's quantisation levels include 1 but not -1. If the largest element of a block is negative, it becomes the
    # lowest level times the scale, which is smaller, and the block would shrink with every save. So divide this element
    # by the lowest level first: values that were quantised before get the same codes again.
    if "qmap" in target.__tensor_flatten__()[0] and target.qmap[0] < 0:
        blocks = values.view(-1, target.block_size)
        low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
        lowest = (blocks == low) & (-low >= high)
        values = torch.where(lowest, blocks / -target.qmap[0], blocks).view(values.shape)
    target.copy_(values)
    return target


def _device_of_steps(home: Home, resting: Tensor) -> torch.device:
    """Return the device of a step count, as torch loads it: the CPU, unless the update reads it on the device."""
    settings = home.settings
    return resting.device if settings.get("capturable") or settings.get("fused") else torch.device("cpu")
