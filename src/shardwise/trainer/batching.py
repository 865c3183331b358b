"""The global batch is the contract: how it is split over ranks and micro-batches, and which samples a rank takes.

    global batch = ranks x micro-batches x samples of a micro-batch

Whoever says two of the three gets the third; the training depends on the product alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..base.errors import ConfigurationError
from .settings import Settings

DEFAULT_GLOBAL_BATCH = 16


@dataclass(frozen=True, slots=True)
class Batching:
    num_ranks: int
    num_micro: int  # of a step and rank
    micro_size: int  # samples

    @property
    def global_size(self) -> int:
        return self.num_ranks * self.num_micro * self.micro_size

    def share(self, samples: Sequence[int], rank: int) -> list[Sequence[int]]:
        """The micro-batches of a rank, out of the samples of one step: consecutive ones, in order."""
        first = rank * self.num_micro * self.micro_size
        starts = range(first, first + self.num_micro * self.micro_size, self.micro_size)
        return [samples[start : start + self.micro_size] for start in starts]

    def __str__(self) -> str:
        return (
            f"{self.global_size} = {self.num_ranks} ranks x {self.num_micro} micro-batches x {self.micro_size} samples"
        )


def batching_of(settings: Settings, num_ranks: int) -> Batching:
    """From what was said; what was not said follows. Refused with the whole equation where it cannot be solved."""
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
        # What was said is kept; what was not is at least 1.
        least = num_ranks * (settings.gradient_accumulation_steps or 1) * (settings.per_device_train_batch_size or 1)
        raise ConfigurationError(
            f"global_batch_size {whole} is not {num_ranks} ranks x {num_micro or 1} gradient_accumulation_steps x "
            f"{micro or 1} per_device_train_batch_size = {num_ranks * (num_micro or 1) * (micro or 1)}; "
            f"make it a multiple of {least}"
        )
    return Batching(num_ranks, num_micro, micro)
