"""Memory as byte counts, and the graph that decides how long it lives: the values that a tape works on."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

ROUND_BYTES = 512


def rounded(num_bytes: int) -> int:
    """As torch's allocator for GPUs does."""
    return -(-num_bytes // ROUND_BYTES) * ROUND_BYTES


class Meter:
    __slots__ = ("live", "peak")

    def __init__(self) -> None:
        self.live = self.peak = 0


class Storage:
    __slots__ = ("meter", "num_bytes", "uses")

    def __init__(self, meter: Meter, num_bytes: int) -> None:
        self.meter, self.uses = meter, 0
        self.num_bytes = rounded(num_bytes)
        meter.live += self.num_bytes
        meter.peak = max(meter.peak, meter.live)


class Tensor:
    """`node` is what made it, if a gradient goes there; `slot` says which of the node's results it is."""

    __slots__ = ("itemsize", "node", "num_elems", "slot", "storage")

    def __init__(self, storage: Storage, num_elems: int, itemsize: int, node: "Node | None" = None, slot: int = 0):
        self.storage, self.num_elems, self.itemsize, self.node, self.slot = storage, num_elems, itemsize, node, slot
        storage.uses += 1

    def __del__(self) -> None:
        self.storage.uses -= 1
        if not self.storage.uses:
            self.storage.meter.live -= self.storage.num_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_elems * self.itemsize

    def alias(self, num_elems: int | None = None) -> "Tensor":
        """Another reference to the memory, which no gradient goes through."""
        return Tensor(self.storage, self.num_elems if num_elems is None else num_elems, self.itemsize)


Gradients = list[Tensor | None]


class Node:
    """`backward` takes the gradients of the results out of its list, and returns those of the inputs."""

    __slots__ = ("backward", "inputs", "num_outputs", "saved", "sequence")

    def __init__(self, sequence: int, inputs: Sequence[Tensor], num_outputs: int = 1) -> None:
        self.sequence = sequence
        self.inputs = [None if tensor.node is None else (tensor.node, tensor.slot) for tensor in inputs]
        self.num_outputs = num_outputs
        self.saved: list[Tensor] = []
        self.backward: Callable[[Gradients], Iterable[Tensor | None]] | None = None


@dataclass(frozen=True, slots=True)
class Weight:
    """`is_direct`: its gradient is written straight to where it belongs, and never is a tensor of autograd's."""

    num_elems: int
    trainable: bool = True
    is_direct: bool = False
