"""A cluster of equal nodes, from words: `8xH100-80GB`, two nodes, InfiniBand.

Values that are not given are those that such machines usually have; they are part of the result, so that they can be
shown. Rates are achieved rates, not data-sheet ones, except FLOP/s and memory bandwidth: the plan knows the share of
these that each kind of work reaches. Of a network's line rate, collectives reach 95 % with InfiniBand, 90 % with RoCE,
and 80 % with EFA and with TCP over Ethernet. GPUs of a node share a network that belongs to the node.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...base.errors import ConfigurationError, did_you_mean
from .gpus import DATA, HOST_LATENCY_US, LATENCY_US, TO_HOST, WITHIN, Gpu, gpu_named
from .links import GIGABYTES_PER_S, Fabric, Link, quantity

MOST = {"node_size": 1024, "num_nodes": 100_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster of `num_nodes` equal nodes. Host and disk are per node, `inter` and `pcie` per GPU."""

    gpu: Gpu
    node_size: int
    num_nodes: int
    intra: Link
    inter: Link
    pcie: Link
    switch: Link | None = None
    network: str = ""  # the text that `inter` was made from
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
        """Axes of the mesh that its GPUs form: the size of each, and the coordinate of the first rank."""
        return {"world": (self.world_size, 0), "node": (self.node_size, 0), "replicate": (self.num_nodes, 0)}

    @property
    def fabric(self) -> Fabric:
        return Fabric(self.num_nodes, self.node_size, self.intra, self.inter)

    def __str__(self) -> str:
        nodes = f"{self.num_nodes} x " if self.num_nodes > 1 else ""
        return f"{nodes}{self.node_size} x {self.gpu.name}"


_BYTES = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}
_BYTES |= {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}

_MOST_OF_A_QUANTITY = 1e18  # bytes, or GB/s


def bytes_of(text: str | int, what: str) -> int:
    """Parse `512GB`, `1.5 TB`, `64GiB`; a bare number is bytes. `what`: its name in errors."""
    value = _quantity(str(text), what, {**_BYTES, "": 1}, "512GB")
    if value < 1e6:
        raise ConfigurationError(f"{what}: {text} is {value:g} bytes; write {text}GB")
    return round(value)


def link_of(text: str, latency_us: float, what: str) -> Link:
    """Parse a rate in each direction: `25GB/s`, `400Gbit/s`."""
    return Link(_quantity(text, what, GIGABYTES_PER_S, "50GB/s"), latency_us)


def _quantity(text: str, what: str, units: Mapping[str, float], example: str) -> float:
    value = quantity(text.strip().lower(), {name.lower(): factor for name, factor in units.items()})
    if value is None:
        raise ConfigurationError(f"{what}: {text!r} is no quantity; write {example}")
    if not 0 < value <= _MOST_OF_A_QUANTITY:
        bound = "more than 0" if value <= 0 else f"a quantity that there is, like {example}"
        raise ConfigurationError(f"{what}: {text!r}, but it must be {bound}")
    return value


EXAMPLE = "8xH100-80GB"


NETWORKS: dict[str, tuple[float, float, float, bool]] = DATA["networks"]


def parse_gpus(text: str) -> tuple[int, Gpu]:
    """Parse number and model of a node's GPUs: `8xH100-80GB`, `4 x A100-80GB`; `h100` is one GPU."""
    if not isinstance(text, str):
        raise ConfigurationError(f"--gpus: {text!r} names no GPU; write {EXAMPLE}")
    found = re.fullmatch(r"\s*(?:([^\sx*]+)\s*[x*]\s*)?(\S.*?)\s*", text, re.IGNORECASE)
    if found is None:
        raise ConfigurationError(f"--gpus: {text!r} names no GPU; write {EXAMPLE}")
    count, name = found[1] or "1", found[2]
    if not re.fullmatch(r"[+-]?\d[\d.,]*", count):
        count, name = "1", text.strip()
    most = MOST["node_size"]
    if not count.isdecimal() or len(count) > len(str(most)) or not 1 <= int(count) <= most:
        raise ConfigurationError(f"--gpus: {count} GPUs in {text!r}, but a node has a whole number from 1 to {most}")
    return int(count), gpu_named(name)


def make_cluster(
    gpus: str,
    nodes: int = 1,
    *,
    network: str | None = None,
    intra: str | None = None,
    pcie: str | None = None,
    memory: str | int | None = None,
    host_memory: str | int | None = None,
    disk: str | int | None = None,
) -> Cluster:
    """Make a cluster. `gpus`: GPUs of a node. `network` (between nodes), `intra` (inside them) and `pcie` (to the host)
    are names, or rates per GPU in each direction. `memory` is per GPU, `host_memory` and `disk` are per node."""
    node_size, gpu = parse_gpus(gpus)
    if type(nodes) is not int or not 1 <= nodes <= MOST["num_nodes"]:
        raise ConfigurationError(f"--nodes: {nodes}, but it must be a whole number from 1 to {MOST['num_nodes']:,}")
    for what, word in (("--network", network), ("--intra", intra), ("--pcie", pcie)):
        if word is not None and not isinstance(word, str):
            raise ConfigurationError(f"{what}: {word!r} is no name and no rate; write '50GB/s'")
    if memory is not None:
        gpu = replace(gpu, memory_bytes=bytes_of(memory, "--gpu-memory"))
    link = gpu.intra if intra is None else _within(intra, gpu)
    host = gpu.host
    return Cluster(
        gpu=gpu,
        node_size=node_size,
        num_nodes=nodes,
        intra=link,
        inter=between(network or gpu.network, node_size, link),
        pcie=gpu.pcie if pcie is None else _named_or_rate(pcie, TO_HOST, HOST_LATENCY_US, "--pcie"),
        switch=gpu.switch if link == gpu.intra else None,
        network=network or gpu.network,
        host_bytes=node_size * host.memory_bytes if host_memory is None else bytes_of(host_memory, "--host-memory"),
        disk_bytes=node_size * host.disk_bytes if disk is None else bytes_of(disk, "--disk"),
        disk_read_bytes_per_s=node_size * host.disk_read_bytes_per_s,
        disk_write_bytes_per_s=node_size * host.disk_write_bytes_per_s,
        host_adam_elems_per_s=node_size * host.adam_elems_per_s,
    )


def _within(text: str, gpu: Gpu) -> Link:
    if text.lower() == "nvlink":
        if gpu.intra.gigabytes_per_s <= WITHIN["pcie5"].gigabytes_per_s:
            raise ConfigurationError(
                f"--intra: a {gpu.name} has no NVLink to all of its node; give a rate like 100GB/s"
            )
        return gpu.intra
    return _named_or_rate(text, WITHIN, LATENCY_US, "--intra")


def between(text: str, node_size: int, intra: Link) -> Link:
    name = text.lower().replace("_", "-")
    name = DATA["aliases of networks"].get(name, name)
    if name in NETWORKS:
        gigabits_per_s, share, latency_us, is_shared = NETWORKS[name]
        rate = gigabits_per_s * share / 8
        return Link(rate / node_size if is_shared else rate, latency_us)
    if name == "nvlink":  # a rack is one NVLink domain
        return intra
    several = [known for known in NETWORKS if known.startswith(f"{name}-")]
    if len(several) > 1:
        raise ConfigurationError(f"--network: {text!r} comes at several rates: {', '.join(several)}")
    return _named_or_rate(text, {**dict.fromkeys(NETWORKS), "nvlink": intra}, 15.0, "--network")


def _named_or_rate(text: str, known: dict[str, Link] | dict[str, Link | None], latency_us: float, what: str) -> Link:
    found = known.get(text.lower().replace("_", "-"))
    if found is not None:
        return found
    if not text.lstrip()[:1].isdigit():
        raise ConfigurationError(f"{what}: {text!r} is no name and no rate like 50GB/s; {did_you_mean(text, known)}")
    return link_of(text, latency_us, what)
