"""The optimizer's part of a checkpoint: its state of each parameter, and the settings of its groups.

State with the shape of a rank's part of a parameter is cut like the parameter. Quantised state (torchao's 8 bits) is
stored in blocks that depend on the cut, so it is saved as fp32 and quantised again when it is loaded. A block never
crosses a shard, so the loaded values are the saved ones.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ..base.errors import CheckpointError, ConfigurationError
from ..core.engine.runtime import Engine
from ..core.optim.clip import LossScaler
from ..core.optim.groups import shard_groups
from ..core.optim.probe import KNOWN_PACKAGES
from ..core.optim.sharded_optimizer import ShardedOptimizer
from ..core.unit.stand_ins import OnDisk
from ..core.unit.user_parameter import place_of
from .index import NAMES, Optimizer, Plain, Saved, Stored

# These settings choose how updates are computed, not their values: the running program sets them.
_RUNTIME_SETTINGS = ("params", "foreach", "fused", "capturable", "differentiable")

_PLAIN = (bool, int, float, str, type(None))


# The optimizers of a model, none, one or several: a checkpoint holds their groups one after the other.
Optimizers = Sequence[ShardedOptimizer]


def own_optimizers(engine: Engine, optimizer: object) -> Optimizers:
    """Return the optimizers; refuse one that `sw.shard` did not return together with the model."""
    given: list[Any] = [] if optimizer is None else [optimizer]
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else given
    for each in given:
        if not isinstance(each, ShardedOptimizer) or not each.belongs_to(engine):
            raise ConfigurationError(
                f"this {type(each).__name__} is not the model's sharded optimizer: give the one that sw.shard "
                "returned with the model"
            )
    return given


@dataclass(frozen=True, slots=True)
class Home:
    """The optimizer and the group that update a parameter, and the group's number in a checkpoint."""

    optimizer: ShardedOptimizer
    number: int
    settings: dict[str, Any]


def homes_in(optimizers: Optimizers) -> dict[Tensor, Home]:
    """Return the home of each parameter, by this rank's part of it."""
    groups = [
        (each, group, shards)
        for each in optimizers
        for group, shards in zip(each.inner.param_groups, shard_groups(each.inner), strict=True)
    ]
    return {shard: Home(each, number, group) for number, (each, group, shards) in enumerate(groups) for shard in shards}


def names_in_groups(optimizers: Optimizers) -> list[list[str]]:
    places = [[place_of(param) for param in group["params"]] for group in _groups_of(optimizers)]
    return [[place.name for place in group if place is not None] for group in places]


def _groups_of(optimizers: Optimizers) -> list[dict[str, Any]]:
    return [group for each in optimizers for group in each.inner.param_groups]


def _name_of(optimizers: Optimizers) -> str:
    return "+".join(type(each.inner).__name__ for each in optimizers)


def describe_optimizers(optimizers: Optimizers) -> Optimizer | None:
    if not optimizers:
        return None
    # The running program sets values that are not plain (a function, for example).
    groups = tuple(
        {key: _plain(value) for key, value in group.items() if key not in _RUNTIME_SETTINGS and _is_plain(value)}
        for group in _groups_of(optimizers)
    )
    # All optimizers share one scaler.
    scaler = optimizers[0].scaler
    return Optimizer(_name_of(optimizers), groups, None if scaler is None else scaler.state())


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(part) for part in value)
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, _PLAIN)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value.item() if isinstance(value, Tensor) else value


def restore_optimizers(optimizers: Optimizers, saved: Optimizer, keep_groups: bool) -> None:
    for group, settings in () if keep_groups else zip(_groups_of(optimizers), saved.groups, strict=True):
        for key, value in settings.items():
            now = group.get(key)
            if key in _RUNTIME_SETTINGS:
                continue
            if isinstance(now, Tensor):
                # In place: schedulers, compiled updates and recordings hold this tensor.
                now.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(now, tuple) else value
    scaler: LossScaler | None = optimizers[0].scaler
    if scaler is not None and saved.scaler is not None:
        scaler.restore(saved.scaler)


def require_same_optimizers(optimizers: Optimizers, saved: Optimizer | None, keep_groups: bool) -> None:
    if saved is None:
        raise CheckpointError("the checkpoint holds no optimizer, and one is to be loaded: load the model alone")
    name, groups, scaler = _name_of(optimizers), _groups_of(optimizers), optimizers[0].scaler
    # Other libraries do not always save the class; then only the state has to fit.
    if saved.name not in ("", name):
        raise CheckpointError(f"the checkpoint's optimizer is {saved.name}, this one is {name}: build the same one")
    if not keep_groups and len(saved.groups) != len(groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(saved.groups)} groups, this one has {len(groups)}: build the same "
            "groups"
        )
    for group, settings in () if keep_groups else zip(groups, saved.groups, strict=True):
        for key, value in settings.items():
            if key not in _RUNTIME_SETTINGS and not _is_alike(group.get(key), value):
                raise CheckpointError(
                    f"the checkpoint's optimizer has {key}={value!r}, this one has {key}={group[key]!r}: load with "
                    "keep_groups=True to go on with this one's settings"
                )
    if scaler is not None and saved.scaler is not None:
        wanted = set(scaler.state())
        if not wanted <= {key for key, value in saved.scaler.items() if isfinite(value)}:
            raise CheckpointError(f"the checkpoint's loss scaler is {saved.scaler}: it lacks one of {sorted(wanted)}")


def _is_alike(now: Any, value: Any) -> bool:
    """Return whether a saved setting can replace the current one."""
    if isinstance(now, tuple):
        return isinstance(value, (list, tuple)) and len(value) == len(now)
    return not isinstance(now, (int, float, Tensor)) or isinstance(value, (int, float))


def refuse_homeless_state(optimizers: Optimizers, params: Container[Tensor]) -> None:
    keys: list[tuple[ShardedOptimizer, Any]] = [(each, key) for each in optimizers for key in each.inner.state]
    for each, key in keys:
        if key not in params:
            what = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
            raise CheckpointError(
                f"the optimizer {type(each.inner).__name__} keeps state for {what}, which is no parameter of the "
                "model: a checkpoint cannot hold it"
            )


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
        if isinstance(value, Tensor):
            if type(value) not in (Tensor, OnDisk) and not _is_low_bit(optimizer):
                raise CheckpointError(f"{what} as a {type(value).__name__}, which a checkpoint cannot hold")
            is_like_param = value.shape == resting.shape and key != "step"
            if is_part and not is_like_param and value.numel() > 1:
                raise CheckpointError(
                    f"{what} with shape {tuple(value.shape)} for a shard of {tuple(resting.shape)}: it cannot be "
                    "cut for another world; use a layout whose optimizer is 'whole'"
                )
            dtype = NAMES.get(_stored_dtype(optimizer, value), "")
            if not dtype:
                raise CheckpointError(f"{what} as {value.dtype}, which a checkpoint cannot hold")
            found[key] = Stored(shape if is_like_param else tuple(value.shape), dtype, ())
        elif isinstance(value, _PLAIN):
            found[key] = value
        else:
            raise CheckpointError(f"{what} as a {type(value).__name__}, which a checkpoint cannot hold")
    return found


def stored_row(optimizer: ShardedOptimizer, resting: Tensor, key: str) -> Tensor:
    """Return a tensor of state as a row of plain numbers, as it is written."""
    value = optimizer.kept(resting, key)
    if type(value) is not Tensor:
        value = value.dequantize()
    return value.to(_stored_dtype(optimizer, value)).reshape(-1)


def _stored_dtype(optimizer: ShardedOptimizer, value: Tensor) -> torch.dtype:
    """Return fp32 for quantised state: whether a shard is quantised depends on its length, and all are stored alike."""
    return torch.float32 if _is_low_bit(optimizer) and value.is_floating_point() else value.dtype


def _is_low_bit(optimizer: ShardedOptimizer) -> bool:
    return type(optimizer.inner).__module__.startswith(KNOWN_PACKAGES)


def restore_state(
    optimizer: ShardedOptimizer,
    resting: Tensor,
    group: Mapping[str, Any],
    saved: Saved,
    read: Callable[[str, Tensor], None],
) -> None:
    """Set the optimizer's state of a parameter; `read` fills a row with this rank's part of a tensor.

    Existing tensors are overwritten in place, because a step in a CUDA graph reads them at their address.
    """
    kept = optimizer.inner.state[resting]
    for key in [key for key in kept if key not in saved.state]:
        del kept[key]
    for key, item in saved.state.items():
        if not isinstance(item, Stored):
            kept[key] = _counted(optimizer, resting, group, item, kept.get(key)) if key == "step" else item
            continue
        target = kept.get(key)
        shape = resting.shape if saved.is_split(key) else torch.Size(item.shape)
        dtype = dtype_of_state(saved, key, resting.dtype)
        if not _fits(target, shape, dtype):
            target = _fresh(optimizer, resting, group, key, saved)
        if type(target) is Tensor:
            read(key, target.view(-1))
        else:
            row = torch.empty(shape.numel(), dtype=item.torch_dtype, device=resting.device)
            read(key, row)
            _quantise(target, row.view(shape))
        kept[key] = target
    if not kept:
        del optimizer.inner.state[resting]
    optimizer.was_restored(resting)


def dtype_of_state(saved: Saved, key: str, master: torch.dtype) -> torch.dtype:
    """Return the dtype of loaded state: the masters' dtype where it was saved in theirs, else its own."""
    item = saved.state[key]
    assert isinstance(item, Stored)
    follows = saved.is_split(key) and item.dtype == saved.dtype
    return master if follows else item.torch_dtype


def _quantise(target: Any, values: Tensor) -> None:
    """Quantise so that values which were quantised before get the same codes again.

    torchao's levels include 1 but not -1: a block whose largest element is negative becomes smaller, by the lowest
    level, and would shrink again with every save. So that element gets its old size back.
    """
    names, _ = target.__tensor_flatten__()
    if "qmap" in names and target.qmap[0] < 0:
        blocks = values.view(-1, target.block_size)
        low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
        lowest = (blocks == low) & (-low >= high)
        values = torch.where(lowest, blocks / -target.qmap[0], blocks).view(values.shape)
    target.copy_(values)


def _fits(target: Any, shape: torch.Size, dtype: torch.dtype) -> bool:
    if not isinstance(target, Tensor) or isinstance(target, OnDisk) or target.shape != shape:
        return False
    # Quantised state accepts values of any dtype.
    return type(target) is not Tensor or (target.dtype == dtype and target.is_contiguous())


def _fresh(optimizer: ShardedOptimizer, resting: Tensor, group: Mapping[str, Any], key: str, saved: Saved) -> Tensor:
    dtype = dtype_of_state(saved, key, resting.dtype)
    if saved.is_split(key):
        if _is_low_bit(optimizer):
            # The optimizer itself decides what it quantises; its squares have no sign.
            buffer: Tensor = optimizer.inner._new_buffer(resting, not key.endswith("_sq"))  # type: ignore[attr-defined]
            return buffer
        return torch.empty(resting.shape, dtype=dtype, device=resting.device)
    item = saved.state[key]
    assert isinstance(item, Stored)
    return torch.empty(
        item.shape, dtype=dtype, device=_device_of_steps(resting, group) if key == "step" else resting.device
    )


def _device_of_steps(resting: Tensor, group: Mapping[str, Any]) -> torch.device:
    """Return the device of a count of steps, as torch loads it: the host, unless the update reads it on the device."""
    return resting.device if group.get("capturable") or group.get("fused") else torch.device("cpu")


def _counted(
    optimizer: ShardedOptimizer, resting: Tensor, group: Mapping[str, Any], steps: Plain, now: Any
) -> Tensor | Plain:
    """Return a count of steps that was saved as a number; torch's optimizers count in tensors, in place."""
    if isinstance(now, Tensor) and isinstance(steps, (int, float)):
        return now.fill_(steps)
    if not type(optimizer.inner).__module__.startswith("torch.optim") or not isinstance(steps, (int, float)):
        return steps
    return torch.tensor(float(steps), device=_device_of_steps(resting, group))
