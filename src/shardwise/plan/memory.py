"""Bytes of training state per rank, from the flats alone."""

from collections.abc import Iterable
from dataclasses import dataclass

from .flat import Flat


@dataclass(frozen=True, slots=True)
class StateBytes:
    """`params` are copies in the compute dtype that stay between steps, `optimizer` is master and moments."""

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
    """What a rank holds between backward and step, padding included. Adam keeps two moments in the master's dtype.

    Moments in fewer bits are a fraction of one.
    """
    flats = list(flats)
    states = [device_state(flat, num_moments) for flat in flats]
    return StateBytes(
        params=sum(params for params, _ in states),
        grads=resting_grads(flats),
        optimizer=sum(optimizer for _, optimizer in states),
    )


def device_state(flat: Flat, num_moments: float) -> tuple[int, int]:
    """Bytes of parameters and of the optimizer that stay on the device between steps. A master that is the parameters
    themselves counts as them."""
    layout = flat.layout
    master = flat.spans[flat.depth_of_master].num_elems
    params = optimizer = 0
    if flat.depth_of_params == 0 and not flat.master_is_whole:
        params += flat.num_elems * flat.compute.itemsize
    if layout.params_on == "device" and (flat.has_rest or (elsewhere(flat) and flat.depth_of_params)):
        params += flat.spans[flat.depth_of_params].num_elems * flat.compute.itemsize
    if not flat.trainable:
        return params + (master * flat.master.itemsize if layout.params_on == "device" else 0), 0
    here = master - elsewhere(flat)
    optimizer += round(here * flat.master.itemsize * num_moments)
    if flat.master == flat.compute:
        return params + here * flat.master.itemsize, optimizer
    return params, optimizer + here * flat.master.itemsize


def resting_grads(flats: Iterable[Flat]) -> int:
    """On the device: of gradients that go to the host, those of the part of the optimizer that is kept here."""
    return sum(
        round(
            flat.spans[flat.depth_of_grads].num_elems
            * flat.reduce.itemsize
            * (1.0 if flat.layout.grads_on == "device" else flat.layout.kept)
        )
        for flat in flats
        if flat.trainable
    )


def elsewhere(flat: Flat) -> int:
    """Elements of the master that do not rest on the device."""
    if flat.layout.optimizer_on == "device":
        return 0
    return round(flat.spans[flat.depth_of_master].num_elems * (1 - flat.layout.kept))
