"""Norms of gradients, from the parts that each rank holds, the limits of clipping, and the loss scaling of fp16.

Powers are summed in fp64, so that the result does not depend on how the gradients are split: every layout and every
rank gets the same fp32 number. The sum of squares of a gradient that goes to the host is computed while it is copied,
and is used unless the gradient was changed on the host.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...base.errors import ConfigurationError
from ..unit.carrier import Channels
from ..unit.gradient import sum_of_squares
from ..unit.state import FlatState
from ..wire.collectives import all_gather, all_reduce

Axes = tuple[str, ...]


def global_norm(
    states: Iterable[FlatState], channels: Channels, device: torch.device, norm_type: float = 2.0
) -> Tensor:
    """Return the norm of all final gradients together, the same on every rank."""
    parts: dict[Axes, Tensor] = {}
    for state in states:
        gradient = state.gradient
        if gradient.stage != "final":
            continue
        part = gradient.square if norm_type == 2.0 else None
        part = (_power_of(gradient.final_for_optimizer, norm_type) if part is None else part).to(device)
        axes = _split_over(state)
        parts[axes] = _joined(parts[axes], part, norm_type) if axes in parts else part
    total = torch.zeros((), dtype=torch.float64, device=device)
    for axes in sorted(parts):
        total = _joined(total, _over_ranks(parts[axes].reshape(1), axes, channels, norm_type)[0], norm_type)
    return _root_of(total, norm_type).float()


def norms_by_param(
    states: Iterable[FlatState], channels: Channels, device: torch.device, norm_type: float
) -> dict[str, float]:
    """The norm of each parameter's final gradient, by name. Parameters without a gradient on any rank are left out."""
    parts: dict[Axes, list[tuple[str, bool, Tensor]]] = {}
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    for state in (state for state in states if state.gradient.stage == "final"):
        gradient, own = state.gradient, parts.setdefault(_split_over(state), [])
        for index, (spec, used) in enumerate(zip(state.flat.params, gradient.used, strict=True)):
            held = gradient.final_for_optimizer[state.held.get(index, slice(0, 0))]
            own.append((spec.name, used, _power_of(held, norm_type).to(device) if held.numel() else nothing))
    found: dict[str, float] = {}
    for axes in sorted(parts):
        row = _over_ranks(torch.stack([power for _, _, power in parts[axes]]), axes, channels, norm_type)
        norms = _root_of(row, norm_type).float().tolist()
        found |= {name: norm for (name, used, _), norm in zip(parts[axes], norms, strict=True) if used}
    return found


def require_norm_type(norm_type: float) -> float:
    if not float(norm_type) > 0:
        raise ConfigurationError(f"norm_type={norm_type}: the order of a norm must be positive, such as 1, 2 or inf")
    return float(norm_type)


def require_limit(name: str, limit: Any) -> None:
    """Refuse a limit that is not above 0: with it torch sets all gradients to 0, and other libraries do not clip."""
    if not isinstance(limit, int | float | Tensor) or not float(limit) > 0:
        raise ConfigurationError(
            f"{name}={limit!r}: it must be above 0. To clip nothing, leave the call out; "
            "clip_grad_norm(math.inf) only measures the norm"
        )


def _split_over(state: FlatState) -> Axes:
    """The axes over which a gradient is split. The others hold equal copies, which must be counted once."""
    return state.flat.layout.chain[: state.flat.depth_of_master]


def _power_of(row: Tensor, norm_type: float) -> Tensor:
    """The value that is joined over parts and ranks: the sum of the elements' powers, or the largest element."""
    if norm_type == 2.0:
        return sum_of_squares(row)
    if norm_type == math.inf:
        return row.abs().amax().double()
    return row.double().abs_().pow_(norm_type).sum()


def _joined(one: Tensor, other: Tensor, norm_type: float) -> Tensor:
    return torch.maximum(one, other) if norm_type == math.inf else one + other


def _root_of(powers: Tensor, norm_type: float) -> Tensor:
    if norm_type == 2.0:
        return powers.sqrt()
    return powers if norm_type == math.inf else powers.pow(1.0 / norm_type)


def _over_ranks(row: Tensor, axes: Axes, channels: Channels, norm_type: float) -> Tensor:
    for channel in (channels[axis] for axis in axes):
        if norm_type == math.inf:
            # Gathered: a communicator's own maximum may lose a NaN.
            rows = row.new_zeros(channel.num_ranks, row.numel())
            rows[channel.index] = row
            all_gather(channel, rows.view(-1), "the gradients' norm").run()
            row = rows.amax(0)
        else:
            all_reduce(channel, row, "the gradients' norm", sums=True).run()
    return row


class LossScaler:
    """Dynamic loss scaling for fp16. The loss is multiplied by `scale`, so that small gradients do not vanish, and the
    gradients are divided by it before the step. The scale halves when a gradient overflows, and doubles after
    `growth_interval` steps without an overflow."""

    def __init__(self, device: torch.device, initial: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.scale: Tensor = torch.full((), initial, dtype=torch.float32, device=device)
        self._growth_interval = growth_interval
        self._good_steps = 0
        self.num_skipped = 0

    def after_step(self, overflowed: bool) -> None:
        # In place: the hooks on the model's output hold this tensor.
        if overflowed:
            self.num_skipped += 1
            self._good_steps = 0
            self.scale.mul_(0.5).clamp_(min=1.0)
            return
        self._good_steps += 1
        if self._good_steps == self._growth_interval:
            self._good_steps = 0
            self.scale.mul_(2.0).clamp_(max=2.0**24)

    def state(self) -> dict[str, float]:
        """Plain numbers that `restore` takes."""
        return {"scale": float(self.scale), "good_steps": self._good_steps, "num_skipped": self.num_skipped}

    def restore(self, state: dict[str, float]) -> None:
        self.scale.fill_(state["scale"])
        self._good_steps, self.num_skipped = int(state["good_steps"]), int(state["num_skipped"])
