"""A machine as `shardwise doctor --measure` found it: the file, and the cluster that a plan takes from it.

A device in the table keeps its peak, on which utilisation is based, and gets the share of it that large products
reached. For an unknown device, or a CPU, the measured rate is the peak.
"""

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

from ...base.errors import ConfigurationError, did_you_mean
from ...base.json_file import find, read_object
from .cluster import Cluster, between
from .gpus import HOST_LATENCY_US, LATENCY_US, Efficiency, Gpu, Host, efficiency_of, gpu_of_device
from .links import Link

VERSION = 1
CPU_RANKS = 2  # as the trainer starts them
MATRIX = 8192  # rows and columns of the products that GPUs are measured with


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured rates and sizes of a machine. `flops` and `fp32_flops`: rates of large products in 16 and 32 bits. All
    `num_devices` are alike; a CPU is one. None: not measured, because there is one device, or it is the host."""

    version: int = VERSION
    device: str
    kind: Literal["cuda", "cpu"]
    num_devices: int
    memory_bytes: int
    context_bytes: int
    flops: float
    fp32_flops: float
    memory_bytes_per_s: float
    to_host_bytes_per_s: float | None = None
    from_host_bytes_per_s: float | None = None
    gather_bytes_per_s: float | None = None  # bus bandwidth, as nccl-tests defines it
    all_reduce_bytes_per_s: float | None = None
    collective_latency_us: float | None = None
    host_memory_bytes: int
    host_adam_elems_per_s: float
    disk_bytes: int
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float

    def __post_init__(self) -> None:
        for name in ("device", "kind"):
            if not isinstance(getattr(self, name), str):
                raise ConfigurationError(f"hardware: {name} is {getattr(self, name)!r}, but must be a word")
        for name in (entry.name for entry in fields(self) if entry.name not in ("device", "kind")):
            value, is_whole, may_be_0 = getattr(self, name), name in _WHOLE, name in _MAY_BE_0
            is_number = type(value) is int or (type(value) is float and not is_whole)
            if value is None and name in _OPTIONAL:
                continue
            if not is_number or not (0 if may_be_0 else 1e-9) <= value < math.inf:
                what, above = "a whole number" if is_whole else "a number", "of at least 0" if may_be_0 else "above 0"
                raise ConfigurationError(f"hardware: {name} is {value!r}, but must be {what} {above}")
        if self.kind not in ("cuda", "cpu"):
            raise ConfigurationError(f"hardware: kind {self.kind!r}; {did_you_mean(self.kind, ('cuda', 'cpu'))}")
        if self.version != VERSION:
            raise ConfigurationError(f"hardware: version {self.version}, but {VERSION} is needed: measure again")


_WHOLE = {"version", "num_devices", "memory_bytes", "context_bytes", "host_memory_bytes", "disk_bytes"}
_MAY_BE_0 = {"context_bytes", "disk_bytes", "collective_latency_us"}
_OPTIONAL = {entry.name for entry in fields(Measured) if entry.default is None}


def read_measured(path: str | Path) -> Measured:
    """Read the file and check every value."""
    file = find(path)
    if file is None:
        raise ConfigurationError(
            f"hardware {str(path)!r}: there is no such file; make it with shardwise doctor --measure {path}"
        )
    found = read_object(file, f"hardware {str(path)!r}")
    known = [entry.name for entry in fields(Measured)]
    for key in found:
        if key not in known:
            raise ConfigurationError(f"hardware {str(path)!r}: unknown key {key!r}; {did_you_mean(key, known)}")
    missing = [name for name in known if name not in found and name not in _OPTIONAL]
    if missing:
        raise ConfigurationError(f"hardware {str(path)!r} has no {', no '.join(missing)}: measure again")
    return Measured(**found)


def write_measured(measured: Measured, path: str | Path) -> None:
    Path(path).expanduser().write_text(json.dumps(asdict(measured), indent=1) + "\n", encoding="utf-8")


# The GPU whose other constants an unknown device gets.
_NEAREST = "H100-80GB"
_SEEN = {"products": 1.0, "attention": 0.5, "memory": 1.0, "prologue": 0.0, "tail": 0.0}


def efficiency_in(measured: Measured) -> Efficiency:
    """Return the share of the peak of `gpu_in(measured)` that is reached."""
    known = gpu_of_device(measured.device)
    if known is None:
        return replace(efficiency_of(_NEAREST), **_SEEN, source="measured by doctor")
    usual = efficiency_of(known.name)
    lost = (1 + usual.prologue / MATRIX) * (1 + usual.tail / MATRIX**2)
    products = min(1.0, measured.flops / known.flops * lost)
    return replace(usual, products=products, source=f"products measured by doctor; else {usual.source}")


def gpu_in(measured: Measured, num_ranks: int = 1) -> Gpu:
    """Return the device of a rank. A CPU is divided among `num_ranks`."""
    known = gpu_of_device(measured.device)
    num_sharing = num_ranks if measured.kind == "cpu" else 1
    slower = min(measured.to_host_bytes_per_s or math.inf, measured.from_host_bytes_per_s or math.inf)
    to_host = slower if slower < math.inf else measured.memory_bytes_per_s / num_sharing
    host = Host(
        memory_bytes=measured.host_memory_bytes // num_ranks,
        disk_bytes=measured.disk_bytes // num_ranks,
        disk_read_bytes_per_s=measured.disk_read_bytes_per_s / num_ranks,
        disk_write_bytes_per_s=measured.disk_write_bytes_per_s / num_ranks,
        adam_elems_per_s=measured.host_adam_elems_per_s / num_ranks,
    )
    pcie = Link(to_host / 1e9, HOST_LATENCY_US)
    if known is not None:
        return replace(
            known,
            memory_bytes=measured.memory_bytes,
            context_bytes=measured.context_bytes,
            pcie=pcie,
            intra=_intra(measured, known.intra),
            host=host,
        )
    return Gpu(
        name=measured.device,
        memory_bytes=measured.memory_bytes // num_sharing,
        flops=measured.flops / num_sharing,
        fp32_flops=measured.fp32_flops / num_sharing,
        hbm_bytes_per_s=measured.memory_bytes_per_s / num_sharing,
        # Shared memory: one rank writes, the other reads.
        intra=_intra(measured, Link(to_host / 2e9, LATENCY_US)),
        pcie=pcie,
        context_bytes=min(measured.context_bytes, measured.memory_bytes // num_sharing - 1),
        node_size=num_ranks,
        network="ethernet-10",
        host=host,
    )


def _intra(measured: Measured, otherwise: Link) -> Link:
    if measured.gather_bytes_per_s is None:
        return otherwise
    latency_us = measured.collective_latency_us
    return Link(measured.gather_bytes_per_s / 1e9, otherwise.latency_us if latency_us is None else latency_us)


def cluster_in(measured: Measured, num_ranks: int | None = None, nodes: int = 1, network: str | None = None) -> Cluster:
    """Return `nodes` machines like the measured one, with `num_ranks` in each; default: one rank per device."""
    most = measured.num_devices if measured.kind == "cuda" else None
    num_ranks = num_ranks or most or CPU_RANKS
    if most is not None and num_ranks > most:
        raise ConfigurationError(f"--gpus: {num_ranks}, but {most} were measured; name GPUs of the table instead")
    gpu = gpu_in(measured, num_ranks)
    name = network or gpu.network
    reduced = measured.all_reduce_bytes_per_s
    gathered = measured.gather_bytes_per_s
    has_switch = reduced is not None and gathered is not None and reduced > 1.15 * gathered
    return Cluster(
        gpu=gpu,
        node_size=num_ranks,
        num_nodes=nodes,
        intra=gpu.intra,
        inter=between(name, num_ranks, gpu.intra),
        pcie=gpu.pcie,
        switch=Link(reduced / 1e9, gpu.intra.latency_us) if has_switch and reduced is not None else None,
        network=name,
        host_bytes=measured.host_memory_bytes,
        disk_bytes=measured.disk_bytes,
        disk_read_bytes_per_s=measured.disk_read_bytes_per_s,
        disk_write_bytes_per_s=measured.disk_write_bytes_per_s,
        host_adam_elems_per_s=measured.host_adam_elems_per_s,
    )
