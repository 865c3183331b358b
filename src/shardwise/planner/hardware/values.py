"""What a plan is made for, as values: a GPU, and a cluster of equal nodes of them.

Rates are what is reached, not what is printed on the box, except FLOP/s and device memory: of these, a plan knows the
share that work of a given kind gets. Where named ones come from is said in `gpus.py`.
"""

import re
from dataclasses import dataclass

from ...base.errors import ConfigurationError
from .links import Fabric, Link

GIB = 1 << 30
MOST = {"node_size": 1024, "num_nodes": 100_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """`flops`: dense, in 16 bits. `memory_bytes`: all that torch sees. `context_bytes`: what the driver takes of it for
    a process before any tensor is there, the collectives' buffers not counted.

    `intra` and `pcie`: to the other GPUs of its node, as collectives use it, and to the host, each way. `switch`: what
    an all-reduce inside a node reaches where the switch adds up (NVLS), in bus bandwidth.
    """

    name: str
    memory_bytes: int
    flops: float
    fp32_flops: float
    hbm_bytes_per_s: float
    intra: Link
    pcie: Link
    switch: Link | None = None
    context_bytes: int = 900 * 10**6  # as on one H200, kernels of torch loaded
    has_bf16: bool = True
    node_size: int = 8  # as they are usually built
    network: str = ""  # with which they usually are
    device: str = ""  # words of the name that the driver gives it
    host: "Host"

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "flops", "fp32_flops", "hbm_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"gpu {self.name!r}: {name} is {getattr(self, name)}, but must be above 0")
        if not 0 <= self.context_bytes < self.memory_bytes:
            raise ConfigurationError(
                f"gpu {self.name!r}: a context of {self.context_bytes} bytes in a memory of {self.memory_bytes}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A GPU's share of its node: memory, disks, and the parameters that the cores can update in a second."""

    memory_bytes: int
    disk_bytes: int
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    adam_elems_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`num_nodes` equal nodes. Host and disk are a node's, `inter` and `pcie` a GPU's."""

    gpu: Gpu
    node_size: int
    num_nodes: int
    intra: Link
    inter: Link
    pcie: Link
    switch: Link | None = None
    network: str = ""  # what `inter` was asked for as
    host_bytes: int
    disk_bytes: int
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    host_adam_elems_per_s: float

    def __post_init__(self) -> None:
        for name in ("node_size", "num_nodes"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MOST[name]:
                raise ConfigurationError(
                    f"cluster: {name} is {value!r}, but must be a whole number from 1 to {MOST[name]:,}"
                )
        for name in ("host_bytes", "disk_bytes"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"cluster: {name} is {getattr(self, name)}, but must be 0 or more")
        for name in ("disk_read_bytes_per_s", "disk_write_bytes_per_s", "host_adam_elems_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"cluster: {name} is {getattr(self, name)}, but must be above 0")

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.node_size

    @property
    def axes(self) -> dict[str, tuple[int, int]]:
        """Of the mesh that its GPUs form: sizes, and the first rank's place."""
        return {"world": (self.world_size, 0), "node": (self.node_size, 0), "replicate": (self.num_nodes, 0)}

    @property
    def fabric(self) -> Fabric:
        return Fabric(self.num_nodes, self.node_size, self.intra, self.inter)

    def __str__(self) -> str:
        nodes = f"{self.num_nodes} x " if self.num_nodes > 1 else ""
        return f"{nodes}{self.node_size} x {self.gpu.name}"


_BYTES = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}
_BYTES |= {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}
_RATES = {f"{unit}/s": factor / 1e9 for unit, factor in _BYTES.items()}
_RATES |= {
    f"{unit}{ending}": rate
    for unit, rate in (("M", 1.25e-4), ("G", 0.125), ("T", 125.0))
    for ending in ("bit/s", "bps")
}


_MOST_OF_A_QUANTITY = 1e18  # bytes, or GB/s


def bytes_of(text: str | int, what: str) -> int:
    """`512GB`, `1.5 TB`, `64GiB`; a bare number is bytes. `what` is what the user calls it."""
    value = _quantity(str(text), what, {**_BYTES, "": 1}, "512GB")
    if value < 1e6:
        raise ConfigurationError(f"{what}: {text} is {value:g} bytes; write {text}GB")
    return round(value)


def link_of(text: str, latency_us: float, what: str) -> Link:
    """`25GB/s`, `400Gbit/s`, each way."""
    return Link(_quantity(text, what, _RATES, "50GB/s"), latency_us)


def _quantity(text: str, what: str, units: dict[str, float], example: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)\s*([a-z/]*)", text.strip(), re.IGNORECASE)
    unit = {name.lower(): factor for name, factor in units.items()}.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise ConfigurationError(f"{what}: {text!r} is no quantity; write {example}")
    value = float(found[1]) * unit
    if not 0 < value <= _MOST_OF_A_QUANTITY:
        bound = "more than 0" if value <= 0 else f"a quantity that there is, like {example}"
        raise ConfigurationError(f"{what}: {text!r}, but it must be {bound}")
    return value
