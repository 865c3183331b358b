"""How much an optimizer will keep for each parameter, before it has kept anything."""

import torch

from ..precision import Precision

# Bytes of an element of a moment in fewer bits, scales of its blocks included, by the end of the optimizer's name.
_SMALL_MOMENTS = {"8bit": 1 + 4 / 256, "Fp8": 1 + 4 / 256, "4bit": 0.5 + 4 / 128}


def num_moments(optimizer: torch.optim.Optimizer | None, precision: Precision) -> float:
    """Tensors of the master's size: Adam's two, unless the optimizer is known to differ."""
    if optimizer is None:
        return 0
    name, groups = type(optimizer).__name__, optimizer.param_groups
    if name == "SGD":
        return max(float(group["momentum"] != 0) for group in groups)
    moments = 2 + max(float(group.get("amsgrad", False)) for group in groups)
    for ending, num_bytes in _SMALL_MOMENTS.items():
        if name.endswith(ending):
            return moments * num_bytes / precision.master.itemsize
    return moments
