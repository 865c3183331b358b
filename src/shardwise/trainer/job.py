"""The inputs of a step: the model, the optimizer, and this rank's share of the samples.

The global batch decides the training. How it is split does not change the result:

    global batch = ranks x micro-batches x samples of a micro-batch

If two of the three are given, the third follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..base.errors import ConfigurationError
from .data.samples import Batch, Samples
from .settings import Settings

DEFAULT_GLOBAL_BATCH = 16


@dataclass(frozen=True, slots=True)
class Batching:
    num_ranks: int
    num_micro: int  # micro-batches of a step on one rank
    micro_size: int  # samples of a micro-batch

    @property
    def global_size(self) -> int:
        return self.num_ranks * self.num_micro * self.micro_size

    def share(self, samples: Sequence[int], rank: int) -> list[Sequence[int]]:
        """Return the micro-batches of a rank: consecutive samples of one step, in order."""
        first = rank * self.num_micro * self.micro_size
        starts = range(first, first + self.num_micro * self.micro_size, self.micro_size)
        return [samples[start : start + self.micro_size] for start in starts]

    def __str__(self) -> str:
        return (
            f"{self.global_size} = {self.num_ranks} ranks x {self.num_micro} micro-batches x {self.micro_size} samples"
        )


def batching_of(settings: Settings, num_ranks: int) -> Batching:
    """Complete the batch sizes that were given, or refuse them with the whole equation."""
    micro, num_micro = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    whole = settings.global_batch_size
    if whole is None:
        if micro is None and num_micro is None:
            whole = DEFAULT_GLOBAL_BATCH
        else:
            return Batching(num_ranks, num_micro or 1, micro or 1)
    if num_micro is None:
        num_micro = whole // (num_ranks * micro) if micro is not None else 1
    if micro is None:
        micro = whole // (num_ranks * num_micro)
    if num_ranks * num_micro * micro != whole:
        # Sizes that were given stay; the others are at least 1.
        least = num_ranks * (settings.gradient_accumulation_steps or 1) * (settings.per_device_train_batch_size or 1)
        raise ConfigurationError(
            f"global_batch_size {whole} is not {num_ranks} ranks x {num_micro or 1} gradient_accumulation_steps x "
            f"{micro or 1} per_device_train_batch_size = {num_ranks * (num_micro or 1) * (micro or 1)}; "
            f"make it a multiple of {least}"
        )
    return Batching(num_ranks, num_micro, micro)


@dataclass(frozen=True, slots=True)
class Job:
    settings: Settings
    model: nn.Module
    optimizer: Any
    samples: Samples
    batching: Batching
    rank: int
    device: torch.device
    num_steps: int
    # Units are updated inside the backward, before the norm of all gradients could be known.
    updates_early: bool = False
    # Steps done, and samples of the endless order used, when this start of the run began.
    first_step: int = 0
    first_sample: int = 0

    def num_samples_before(self, step: int) -> int:
        return self.first_sample + (step - self.first_step) * self.batching.global_size

    def samples_of(self, step: int) -> list[int]:
        return self.samples.order(self.num_samples_before(step), self.batching.global_size)

    def micro_batches(self, step: int) -> list[Batch]:
        """Return this rank's part of a step, in host memory from which the device can copy without waiting."""
        shares = self.batching.share(self.samples_of(step), self.rank)
        batches = [self.samples.batch(share) for share in shares]
        return [batch.pinned() for batch in batches] if self.device.type == "cuda" else batches
