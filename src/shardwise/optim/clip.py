"""The norm of all gradients, from whatever each rank holds of them.

Squares are summed in fp64, so that the result does not depend on how the gradients are split: every layout and
every rank gets the same fp32 number. Of gradients that have left the device the sum was taken on their way, unless they
were changed on the host.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..unit.carrier import Channels
from ..unit.gradient import sum_of_squares
from ..unit.state import FlatState
from ..wire.collectives import finish, start_all_reduce


def global_norm(states: Iterable[FlatState], channels: Channels, device: torch.device) -> Tensor:
    sums: dict[tuple[str, ...], Tensor] = {}
    for state in states:
        flat, gradient = state.flat, state.gradient
        if gradient.stage != "final":
            continue
        # Axes behind the optimizer's depth hold equal copies, which must be counted once.
        axes = flat.layout.chain[: flat.depth_of_master]
        square = sum_of_squares(gradient.final_at_hand) if gradient.square is None else gradient.square
        square = square.to(device)
        sums[axes] = sums[axes] + square if axes in sums else square
    total = torch.zeros((), dtype=torch.float64, device=device)
    for axes in sorted(sums):
        part = sums[axes].reshape(1)
        for axis in axes:
            finish(start_all_reduce(channels[axis], part, "the gradients' norm", sums=True))
        total = total + part[0]
    return total.sqrt().float()
