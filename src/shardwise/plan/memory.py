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
    params = grads = optimizer = 0
    for flat in flats:
        master = flat.spans[flat.depth_of_master].num_elems
        if flat.trainable:
            optimizer += round(master * flat.master.itemsize * num_moments)
            grads += flat.spans[flat.depth_of_grads].num_elems * flat.reduce.itemsize
        if flat.depth_of_params == 0 and not flat.master_is_whole:
            params += flat.num_elems * flat.compute.itemsize
        if flat.has_rest:
            params += flat.spans[flat.depth_of_params].num_elems * flat.compute.itemsize
        # A master that is the parameters themselves counts as them.
        if flat.master == flat.compute or not flat.trainable:
            params += master * flat.master.itemsize
        else:
            optimizer += master * flat.master.itemsize
    return StateBytes(params, grads, optimizer)
