"""A cluster of equal nodes, from words (`8xH100-80GB`, two nodes, InfiniBand) or as `doctor --measure` found it.

Values that are not given have typical defaults; they are part of the result, so that they can be shown. Rates are
achieved rates. Only FLOP/s and memory bandwidth are those of data sheets: the plan knows the share of them that each
kind of work reaches. Collectives reach 95 % of a network's line rate with InfiniBand, 90 % with RoCE, and 80 % with EFA
and with TCP over Ethernet. Where the rate is that of a whole node, its GPUs share it.

A measured GPU that is in our table keeps the table's peak, on which utilisation is based. The measurement gives the
share of it that large matrix products reach. For an unknown device, or a CPU, the measured rate is the peak.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ...base.documents import find, read_object
from ...base.errors import ABOVE_0, FINITE, ConfigurationError, did_you_mean, require_limits
from .gpus import (
    DATA,
    GPUS,
    HOST_LATENCY_US,
    LATENCY_US,
    TO_HOST,
    WITHIN,
    Efficiency,
    Gpu,
    Host,
    efficiency_of,
    gpu_named,
    gpu_of_device,
    letters_of,
)
from .links import GIGABYTES_PER_S, Fabric, Link, quantity

MOST_GPUS = 1024  # of a node
MOST_IN_ALL = 100_000
_LIMITS = {
    "node_size": (1, MOST_GPUS),
    "num_nodes": (1, 100_000),
    **dict.fromkeys(("host_bytes", "disk_bytes"), (0, math.inf)),
    **dict.fromkeys(("disk_read_bytes_per_s", "disk_write_bytes_per_s", "host_adam_elems_per_s"), (ABOVE_0, math.inf)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Host):
    """A cluster of `num_nodes` equal nodes. Host and disk are per node, `inter` and `pcie` per GPU."""

    gpu: Gpu
    node_size: int
    num_nodes: int
    intra: Link
    inter: Link
    pcie: Link
    switch: Link | None = None  # for all-reduces that are summed in the switch of a node
    network: str = ""  # the text that `inter` was made from
    host_is_measured: bool = False  # if not, the rates of disks and of updates on the host are the table's

    def __post_init__(self) -> None:
        require_limits("cluster", self, _LIMITS)

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.node_size

    @property
    def axes(self) -> dict[str, tuple[int, int]]:
        """Axes of the mesh that its GPUs form: the size of each, and the coordinate of the first rank."""
        return {"world": (self.world_size, 0), "node": (self.node_size, 0), "replicate": (self.num_nodes, 0)}

    @property
    def fabric(self) -> Fabric:
        return Fabric(self.num_nodes, self.node_size, self.intra, self.inter)

    def __str__(self) -> str:
        nodes = f"{self.num_nodes} x " if self.num_nodes > 1 else ""
        return f"{nodes}{self.node_size} x {self.gpu.name}"


_BYTES = {
    "": 1, "B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15,
    "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4,
}  # fmt: skip
_MOST_OF_A_QUANTITY = 1e18  # bytes, or GB/s


def bytes_of(text: str | int, what: str) -> int:
    """Parse `512GB`, `1.5 TB`, `64GiB`; a bare number is bytes. `what`: its name in errors."""
    value = _quantity(str(text), what, _BYTES, "512GB")
    if value < 1e6:
        fix = f"write {text}GB" if str(text).strip().isdigit() else "give at least 1MB"
        raise ConfigurationError(f"{what}: {text} is {value:g} bytes; {fix}")
    return round(value)


def _quantity(text: str, what: str, units: Mapping[str, float], example: str) -> float:
    value = quantity(text.strip().lower(), {name.lower(): factor for name, factor in units.items()})
    if value is None or not 0 < value <= _MOST_OF_A_QUANTITY:
        raise ConfigurationError(f"{what}: {text!r} is no quantity above 0 and up to 1e18; write {example}")
    return value


EXAMPLE = "8xH100-80GB"
NETWORKS: dict[str, tuple[float, float, float, bool]] = DATA["networks"]
_COUNT = re.compile(r"([+-]?\d[\d.,]*)\s*[x*]\s*(\S.*)", re.IGNORECASE)
_INSTANCES: dict[str, tuple[str, str, str]] = {letters_of(name): row for name, row in DATA["instances"].items()}


def usual_node(gpu_name: str) -> int:
    """The number of GPUs that usually share NVLink or a host: 8 in a server, 72 in a rack of GB200."""
    return int(DATA["GPUs of a node"].get(gpu_name, 8))


def _counted(text: str) -> tuple[int, str]:
    """Parse number and name of a node's GPUs: `8xH100-80GB`, `4 x A100-80GB`; `h100` is one GPU."""
    words = str(text).strip()
    if not words:
        raise ConfigurationError(f"GPUs: {text!r} names no GPU; write {EXAMPLE}")
    found = _COUNT.fullmatch(words)
    count, name = found.groups() if found else ("1", words)
    if not re.fullmatch(r"\d{1,6}", count) or not 1 <= int(count) <= MOST_IN_ALL:
        raise ConfigurationError(f"GPUs: {count} GPUs in {text!r}; give a whole number from 1 to {MOST_IN_ALL}")
    return int(count), name


def make_cluster(
    gpus: str,
    nodes: int | None = None,
    *,
    network: str | None = None,
    intra: str | None = None,
    pcie: str | None = None,
    memory: str | int | None = None,
    host_memory: str | int | None = None,
    disk: str | int | None = None,
) -> Cluster:
    """Make a cluster. `gpus`: GPUs of a node (`8xH100-80GB`), or a cloud's instance (`p5.48xlarge`). Without `nodes`,
    also of a cluster: `4x8xH100`, `4xp5.48xlarge`; 32xH100 are then 4 nodes of 8. `network` (between nodes), `intra`
    (inside them) and `pcie` (to the host) are names, or rates per GPU in each direction. `memory` is per GPU,
    `host_memory` and `disk` are per node."""
    count, name = _counted(gpus)
    instance = _INSTANCES.get(letters_of(name).removeprefix("standard"))
    if instance or _COUNT.fullmatch(name):
        if nodes is not None and count > 1:
            raise ConfigurationError(f"GPUs: {gpus} has a number of nodes, but --nodes {nodes} too: leave one out")
        gpus, usual, host = instance or (name, None, None)
        nodes = count if nodes is None else nodes
        network, host_memory = network or usual, host_memory or host
    node_size, name = _counted(gpus)
    gpu = gpu_named(name)
    if nodes is None and node_size > (most := usual_node(gpu.name)):
        if node_size % most:
            raise ConfigurationError(
                f"GPUs: {node_size} GPUs are no multiple of a node of {most} {gpu.name}; give the GPUs of one node "
                f"and --nodes; --nodes 1 makes {node_size} GPUs one node"
            )
        node_size, nodes = most, node_size // most
    for what, word in (("--network", network), ("--intra", intra), ("--pcie", pcie)):
        if word is not None and not isinstance(word, str):
            raise ConfigurationError(f"{what}: {word!r} is no name and no rate; write '50GB/s'")
    if memory is not None:
        gpu = replace(gpu, memory_bytes=bytes_of(memory, "--gpu-memory"))
    link = gpu.intra if intra is None else _within(intra, gpu)
    node: dict[str, Any] = {name: node_size * share for name, share in asdict(gpu.host).items()}
    if host_memory is not None:
        node["host_bytes"] = bytes_of(host_memory, "--host-memory")
    if disk is not None:
        node["disk_bytes"] = bytes_of(disk, "--disk")
    return Cluster(
        gpu=gpu,
        node_size=node_size,
        num_nodes=1 if nodes is None else nodes,
        intra=link,
        inter=between(network or gpu.network, node_size, link),
        pcie=gpu.pcie if pcie is None else _named_or_rate(pcie, TO_HOST, HOST_LATENCY_US, "--pcie"),
        switch=gpu.switch if link == gpu.intra else None,
        network=network or gpu.network,
        **node,
    )


def _within(text: str, gpu: Gpu) -> Link:
    if text.lower() == "nvlink":
        if gpu.intra.gigabytes_per_s <= WITHIN["pcie5"].gigabytes_per_s:
            raise ConfigurationError(f"--intra: a {gpu.name} has no NVLink to all of its node; give a rate: 100GB/s")
        return gpu.intra
    return _named_or_rate(text, WITHIN, LATENCY_US, "--intra")


def between(text: str, node_size: int, intra: Link) -> Link:
    name = text.lower().replace("_", "-")
    name = DATA["aliases of networks"].get(name, name)
    several = [known for known in NETWORKS if known.startswith(f"{name}-")]
    if len(several) > 1 and name not in NETWORKS:
        raise ConfigurationError(f"--network: {text!r} comes at several rates: {', '.join(several)}")
    known = {"nvlink": intra}  # for a rack whose nodes are one NVLink domain
    for network, (gigabits_per_s, share, latency_us, is_shared) in NETWORKS.items():
        rate = gigabits_per_s * share / 8
        known[network] = Link(rate / node_size if is_shared else rate, latency_us)
    return known[name] if name in known else _named_or_rate(text, known, 15.0, "--network")


def _named_or_rate(text: str, known: dict[str, Link], latency_us: float, what: str) -> Link:
    found = known.get(text.lower().replace("_", "-"))
    if found is not None:
        return found
    if not text.lstrip()[:1].isdigit():
        raise ConfigurationError(f"{what}: {text!r} is no name and no rate like 50GB/s; {did_you_mean(text, known)}")
    return Link(_quantity(text, what, GIGABYTES_PER_S, "50GB/s"), latency_us)


VERSION = 1
CPU_RANKS = 2  # as the trainer starts them
MATRIX = 8192  # rows and columns of the products that GPUs are measured with
DeviceKind = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured rates and sizes of a machine. `flops`, `fp32_flops`: rates of large matrix products in 16 and 32 bits.
    All `num_devices` are equal; a CPU counts as one. A rate is None if a single device or a CPU does not have it."""

    version: int = VERSION
    device: str
    kind: DeviceKind
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
        if not isinstance(self.device, str):
            raise ConfigurationError(f"hardware: device is {self.device!r}, but must be a word")
        if self.kind not in get_args(DeviceKind):
            raise ConfigurationError(
                f"hardware: kind {self.kind!r}; {did_you_mean(str(self.kind), get_args(DeviceKind))}"
            )
        numbers = [entry.name for entry in fields(self) if entry.name not in ("device", "kind")]
        require_limits("hardware", self, {name: (0 if name in _MAY_BE_0 else ABOVE_0, FINITE) for name in numbers})
        if self.version != VERSION:
            raise ConfigurationError(f"hardware: version {self.version}, but {VERSION} is needed: measure again")


_MAY_BE_0 = ("context_bytes", "disk_bytes", "collective_latency_us")


def read_measured(path: str | Path) -> Measured:
    """Read a file that `shardwise doctor --measure` wrote, and check every value."""
    file, what = find(path), f"hardware {str(path)!r}"
    if file is None:
        raise ConfigurationError(f"{what}: there is no such file; make it with shardwise doctor --measure {path}")
    found = read_object(file, what)
    known = [entry.name for entry in fields(Measured)]
    for key in found:
        if key not in known:
            raise ConfigurationError(f"{what}: unknown key {key!r}; {did_you_mean(key, known)}")
    missing = [entry.name for entry in fields(Measured) if entry.name not in found and entry.default is not None]
    if missing:
        raise ConfigurationError(f"{what} has no {', no '.join(missing)}: measure again")
    return Measured(**found)


def write_measured(measured: Measured, path: str | Path) -> None:
    Path(path).expanduser().write_text(json.dumps(asdict(measured), indent=1) + "\n", encoding="utf-8")


# For an unknown device, values that are not measured are those of this GPU.
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
    attention = usual.attention * min(1.0, products / usual.products)  # less if the GPU is limited, such as in power
    source = f"products measured by doctor; else {usual.source}"
    return replace(usual, products=products, attention=attention, source=source)


def gpu_in(measured: Measured, num_ranks: int = 1) -> Gpu:
    """Return the device of one rank. The memory and speed of a CPU are divided among `num_ranks`."""
    num_sharing = num_ranks if measured.kind == "cpu" else 1
    copies = (measured.to_host_bytes_per_s, measured.from_host_bytes_per_s)
    to_host = min((rate for rate in copies if rate), default=measured.memory_bytes_per_s / num_sharing)
    gpu = gpu_of_device(measured.device)
    if gpu is None:
        gpu = replace(
            GPUS[_NEAREST],
            name=measured.device,
            device="",
            flops=measured.flops / num_sharing,
            fp32_flops=measured.fp32_flops / num_sharing,
            hbm_bytes_per_s=measured.memory_bytes_per_s / num_sharing,
            # Shared memory: one rank writes, the other reads.
            intra=Link(to_host / 2e9, LATENCY_US),
            switch=None,
            network="ethernet-10",
        )
    intra, latency_us = gpu.intra, measured.collective_latency_us
    if measured.gather_bytes_per_s is not None:
        intra = Link(measured.gather_bytes_per_s / 1e9, intra.latency_us if latency_us is None else latency_us)
    memory_bytes = measured.memory_bytes // num_sharing
    return replace(
        gpu,
        memory_bytes=memory_bytes,
        context_bytes=min(measured.context_bytes, memory_bytes - 1),
        intra=intra,
        pcie=Link(to_host / 1e9, HOST_LATENCY_US),
    )


def cluster_in(measured: Measured, num_ranks: int | None = None, nodes: int = 1, network: str | None = None) -> Cluster:
    """Return `nodes` machines like the measured one, with `num_ranks` in each; default: one rank per device."""
    most = measured.num_devices if measured.kind == "cuda" else None
    num_ranks = num_ranks or most or CPU_RANKS
    if most is not None and num_ranks > most:
        raise ConfigurationError(f"GPUs: {num_ranks}, but {most} were measured; name GPUs of the table instead")
    gpu = gpu_in(measured, num_ranks)
    name = network or gpu.network
    gathered, reduced = measured.gather_bytes_per_s, measured.all_reduce_bytes_per_s
    has_switch = gathered and reduced and reduced > 1.15 * gathered
    return Cluster(
        gpu=gpu,
        node_size=num_ranks,
        num_nodes=nodes,
        intra=gpu.intra,
        inter=between(name, num_ranks, gpu.intra),
        pcie=gpu.pcie,
        switch=Link(reduced / 1e9, gpu.intra.latency_us) if has_switch and reduced else None,
        network=name,
        host_bytes=measured.host_memory_bytes,
        disk_bytes=measured.disk_bytes,
        disk_read_bytes_per_s=measured.disk_read_bytes_per_s,
        disk_write_bytes_per_s=measured.disk_write_bytes_per_s,
        host_adam_elems_per_s=measured.host_adam_elems_per_s,
        host_is_measured=True,
    )
