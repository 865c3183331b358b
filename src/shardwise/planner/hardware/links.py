"""A fabric as a value: its nodes and ranks, the speed of their links, and the time of an operation on them.

Each rank has two full-duplex wires: `intra` to the other ranks of its node, and `inter`, its own NIC, to other nodes. A
group inside one node uses `intra` only, a group with one rank per node `inter` only. Other groups have one ring per
NIC, and every ring passes through all ranks: the bytes go over `intra` and, divided by the group's ranks in a node,
over `inter` at the same time. A ring of N moves (N-1)/N of the buffer for an all-gather or a reduce-scatter; an
all-reduce is both. A broadcast is a chain that the whole buffer passes. In an all-to-all every rank sends a part to
each other. Not modelled: kernels that compete for SMs, reductions in the switch (NVLS), trees, congestion, stragglers.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ...base.errors import ABOVE_0, FINITE, ConfigurationError, require_limits
from ...base.text import key_values

Wire = Literal["intra", "inter"]
Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"]

WIRES: tuple[Wire, ...] = get_args(Wire)
EXAMPLE = "2x8,intra=400GB/s,inter=50GB/s,latency=20us"

GIGABYTES_PER_S = {
    "B/s": 1e-9, "kB/s": 1e-6, "KB/s": 1e-6, "MB/s": 1e-3, "GB/s": 1.0, "TB/s": 1e3, "PB/s": 1e6,
    "KiB/s": 1024e-9, "MiB/s": 1024**2 / 1e9, "GiB/s": 1024**3 / 1e9, "TiB/s": 1024**4 / 1e9,
    "kbit/s": 1.25e-7, "Mbit/s": 1.25e-4, "Gbit/s": 0.125, "Tbit/s": 125.0, "Mbps": 1.25e-4, "Gbps": 0.125,
    "Tbps": 125.0,
}  # fmt: skip
_MICROSECONDS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}


@dataclass(frozen=True, slots=True)
class Link:
    """Speed and latency of one wire of a rank, in each direction."""

    gigabytes_per_s: float
    latency_us: float

    def __post_init__(self) -> None:
        require_limits("link", self, {"gigabytes_per_s": (ABOVE_0, math.inf), "latency_us": (0, FINITE)})

    def seconds(self, num_bytes: float) -> float:
        """Seconds for the bytes, without latency."""
        return num_bytes / (self.gigabytes_per_s * 1e9)


INTRA = Link(360.0, 20.0)
INTER = Link(50.0, 15.0)


@dataclass(frozen=True, slots=True)
class Fabric:
    """`num_nodes` nodes of `node_size` ranks; rank r sits in node r // node_size."""

    num_nodes: int
    node_size: int
    intra: Link = INTRA
    inter: Link = INTER

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.node_size < 1:
            raise ConfigurationError(
                f"fabric: {self.num_nodes} nodes of {self.node_size} ranks; give 1 or more of each"
            )

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.node_size

    def __str__(self) -> str:
        """Return the text from which `parse` makes this value."""
        links = {"intra": self.intra, "inter": self.inter}
        rates = [f"{wire}={_number(link.gigabytes_per_s)}GB/s" for wire, link in links.items()]
        latencies = [f"{wire}-latency={_number(link.latency_us)}us" for wire, link in links.items()]
        return ",".join([f"{self.num_nodes}x{self.node_size}", *rates, *latencies])


@dataclass(frozen=True, slots=True)
class Transfer:
    """Load of one operation on a rank's wires: bytes and seconds of each, and the latency at the end."""

    moved_bytes: dict[Wire, float]
    occupied_s: dict[Wire, float]
    latency_s: float


def plan_transfer(fabric: Fabric, kind: Kind, num_bytes: int, ranks: Sequence[int], rank: int) -> Transfer:
    """The load of an operation over `ranks` on the wires of `rank`. `num_bytes` is the size of the whole buffer."""
    num_ranks, node = len(ranks), rank // fabric.node_size
    by_node = _spread(ranks, fabric.node_size, node)
    crosses, stays = len(by_node) > 1, max(by_node.values()) > 1
    rounds = 2 if kind == "all_reduce" else 1
    moved: dict[Wire, float]
    if num_ranks == 1:
        moved = dict.fromkeys(WIRES, 0.0)
    elif kind == "all_to_all":
        neighbours = by_node[node] - 1
        others = num_ranks - 1 - neighbours
        moved = {"intra": num_bytes * neighbours / num_ranks, "inter": num_bytes * others / num_ranks}
    else:
        ring_bytes = float(num_bytes) if kind == "broadcast" else rounds * num_bytes * (num_ranks - 1) / num_ranks
        # The node with the fewest ranks, and so NICs, limits the ring.
        moved = {"intra": ring_bytes * stays, "inter": ring_bytes * crosses / min(by_node.values())}
    links = {"intra": fabric.intra, "inter": fabric.inter}
    latency_us = rounds * (fabric.intra.latency_us * stays + fabric.inter.latency_us * crosses)
    return Transfer(
        moved_bytes=moved,
        occupied_s={wire: links[wire].seconds(moved[wire]) for wire in WIRES},
        latency_s=latency_us * 1e-6,
    )


def _spread(ranks: Sequence[int], node_size: int, node: int) -> Mapping[int, int]:
    """Count the ranks of each node. A `range` may have millions of ranks, so only some of its nodes are counted:
    `node`, the first, the last, and the nodes after the first until the counts repeat."""
    if not isinstance(ranks, range) or len(ranks) < 2 or ranks.step < 1:
        return Counter(rank // node_size for rank in ranks)
    first, last = ranks[0] // node_size, ranks[-1] // node_size
    if ranks.step >= node_size:
        return dict.fromkeys((first, last, node), 1)
    period = ranks.step // math.gcd(ranks.step, node_size)
    nodes = {node, last, *range(first, min(first + period, last) + 1)}
    # For each node, the index in `ranks` of the first rank that is in this node or a later one.
    before = {
        at: max(0, -(-(at * node_size - ranks.start) // ranks.step)) for at in {*nodes, *(at + 1 for at in nodes)}
    }
    return {at: len(ranks[before[at] : before[at + 1]]) for at in nodes}


_KEYS = ("intra", "inter", "latency", "intra-latency", "inter-latency")


def parse(text: str) -> Fabric:
    """Parse a fabric like `2x8,intra=400GB/s,inter=50GB/s` or `8,intra=1TB/s,latency=10us`."""

    def refused(why: str) -> ConfigurationError:
        return ConfigurationError(f"fabric {text!r}: {why}; an example: {EXAMPLE}")

    shape, *words = [part.strip() for part in text.split(",")]
    found = re.fullmatch(r"(?:0*([1-9]\d*)x)?0*([1-9]\d*)", shape)
    if found is None:
        raise refused(f"{shape!r} is no shape: nodes x ranks of a node, or the ranks of one node")
    given = key_values(words, _KEYS, refused)

    def number(key: str, units: Mapping[str, float], default: float) -> float:
        value = quantity(given[key], units) if key in given else default
        if value is None:
            raise refused(f"{key}={given[key]!r} is not a number with a unit ({', '.join(units)})")
        return value

    links = []
    for wire, default in (("intra", INTRA), ("inter", INTER)):
        latency_us = number("latency", _MICROSECONDS, default.latency_us)
        latency_us = number(f"{wire}-latency", _MICROSECONDS, latency_us)
        rate = number(wire, GIGABYTES_PER_S, default.gigabytes_per_s)
        try:
            links.append(Link(rate, latency_us))
        except ConfigurationError as error:
            parts = ", ".join(f"{key}={value!r}" for key, value in given.items())
            raise refused(f"{parts}: {error}") from None
    intra, inter = links
    return Fabric(int(found[1] or 1), int(found[2]), intra, inter)


def quantity(text: str, units: Mapping[str, float]) -> float | None:
    """Parse a number with one of these units; None if the text is anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+|inf)\s*([A-Za-z/]*)", text)
    return None if found is None or found[2] not in units else float(found[1]) * units[found[2]]


def _number(value: float) -> str:
    """Return the shortest text that reads back as the same number."""
    return repr(float(value)).removesuffix(".0")
