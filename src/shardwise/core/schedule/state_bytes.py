"""Bytes of training state per rank, from the flats alone."""

from collections.abc import Iterable
from dataclasses import dataclass

from ...base.dtypes import BF16
from .flat import Flat

# The dtype of encoding errors that are saved for feedback.
LOST = BF16


@dataclass(frozen=True, slots=True)
class StateBytes:
    """`params` are copies that stay between steps, in the compute dtype or encoded. `optimizer` is master and moments.
    `grads` includes encoding errors that are saved for feedback."""

    params: int
    grads: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.params + self.grads + self.optimizer

    def __str__(self) -> str:
        parts = {"params": self.params, "grads": self.grads, "optimizer": self.optimizer}
        return ", ".join(f"{name} {num_bytes / 1e6:.1f} MB" for name, num_bytes in parts.items())


def state_bytes(flats: Iterable[Flat], num_moments: float = 2) -> StateBytes:
    """Bytes of a rank between backward and step, padding included. Adam has two moments in the master's dtype; moments
    in fewer bits count as fractions."""
    flats = list(flats)
    states = [device_state(flat, num_moments) for flat in flats]
    return StateBytes(
        params=sum(params for params, _ in states),
        grads=resting_grads(flats) + kept_losses(flats),
        optimizer=sum(optimizer for _, optimizer in states),
    )


def device_state(flat: Flat, num_moments: float) -> tuple[int, int]:
    """Bytes of parameters and of the optimizer that stay on the device between steps. A master that is the parameters
    themselves counts as them."""
    params = optimizer = 0
    if flat.depth_of_params == 0 and not flat.master_is_whole:
        params += flat.num_elems * flat.compute.itemsize
    if flat.rest_on == "device":
        params += flat.rest_bytes
    master = flat.num_master * flat.master.itemsize if flat.master_on == "device" else 0
    if flat.trainable:
        optimizer += round(master * num_moments)
    if flat.trainable and flat.master != flat.compute:
        return params, optimizer + master
    return params + master, optimizer


def resting_grads(flats: Iterable[Flat]) -> int:
    """Bytes of gradients on the device between micro-batches."""
    return sum(flat.num_grads * flat.reduce.itemsize for flat in flats if flat.trainable and not flat.grads_on_host)


def kept_losses(flats: Iterable[Flat]) -> int:
    """Bytes of the saved encoding errors of gradients, on the device from the first reduction on."""
    return sum(flat.num_lost * LOST.itemsize for flat in flats)
