"""GPUs by name, what they reach of their data sheets, and the FLOP that a token costs. All tables are in `gpus.json`.

Memory is what drivers report to torch (`total_memory`). FLOP/s (dense, summed in fp32) and memory bandwidth are from
data sheets. Links have the bus bandwidth that rings reach in nccl-tests. A GPU that was not measured has the efficiency
of the most similar measured one, and `source` says so. docs/planner.md has the sources of all constants.
"""

import json
import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...base.dtypes import BF16, FP16, DType
from ...base.errors import ABOVE_0, ConfigurationError, nearest_names, require_limits
from .links import Link

GIB = 1 << 30
LATENCY_US = 20.0
HOST_LATENCY_US = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host, or one GPU's share of it: memory, disks, and parameters per second that its cores update with Adam."""

    host_bytes: int
    disk_bytes: int
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    host_adam_elems_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU and its links.

    `flops`: dense FLOP/s in 16 bits. `memory_bytes`: total memory as torch reports it. `context_bytes`: memory that a
    process uses before its first tensor, without the buffers of collectives. `intra`: bandwidth of collectives inside
    the node. `pcie`: of copies to and from the host, in each direction. `switch`: bus bandwidth of an all-reduce inside
    the node if the NVLink switch does the sums (NVLS).
    """

    name: str
    memory_bytes: int
    flops: float
    fp32_flops: float
    hbm_bytes_per_s: float
    intra: Link
    pcie: Link
    switch: Link | None = None
    context_bytes: int = 900 * 10**6  # measured on one H200, with the kernels of torch loaded
    has_bf16: bool = True
    multiprocessors: int = 132
    network: str = ""  # usual network between nodes
    device: str = ""  # text in the driver's name of the device
    host: Host

    def __post_init__(self) -> None:
        above_0 = ("memory_bytes", "flops", "fp32_flops", "hbm_bytes_per_s")
        require_limits(f"gpu {self.name!r}", self, dict.fromkeys(above_0, (ABOVE_0, math.inf)))
        require_limits(f"gpu {self.name!r}", self, {"context_bytes": (0, self.memory_bytes - 1)})


DATA: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Fractions of a GPU's peak that large sizes reach (`products`, `attention`, `memory`), and costs of small sizes.

    A product of (m x k) by (k x n) takes as long as 2 (k + prologue) (mn + tail) FLOP at its fraction: filling a tile's
    pipeline costs `prologue` steps of the inner dimension, and the last wave of tiles leaves processors idle, as if
    there were `tail` more outputs. The forward of causal attention reaches half of its fraction at sequence length
    `ramp`, its backward `backward` times as many FLOP/s; head sizes up to 64 multiply both by `narrow`, those above 128
    by `wide`. `gap_s` is the idle time of the device between two kernels.
    """

    products: float
    attention: float
    memory: float
    prologue: float
    tail: float
    ramp: float
    narrow: float
    gap_s: float
    source: str
    backward: float = 1.0
    wide: float = 1.0


# Fraction of the memory bandwidth that codecs reach, for all GPUs. An H200 reaches 0.80 to 0.82 when it encodes or
# decodes, 0.62 (int4) and 0.77 (int8) when it sums the data of eight ranks (benchmarks/codecs.py).
CODING = 0.75


@dataclass(frozen=True, slots=True)
class Overheads:
    """Costs of a real machine beyond the figures of its links.

    `contention`: while a collective runs, computation loses this many times the share of multiprocessors and of memory
    bandwidth that the collective takes, which grows with its rate. `hop_us`: latency of a ring for every node after the
    first. The host needs `launch_s` to queue a kernel (torch and autograd included) and `event_s` to start a gather or
    a reduction. `coding`: fraction of the memory bandwidth at which data is encoded and decoded. `lost`: the share of
    the computation that is lost while a collective runs at any rate.
    """

    contention: float = 0.0
    hop_us: float = 0.0
    launch_s: float = 0.0
    event_s: float = 0.0
    coding: float = CODING
    lost: float = 0.0


# No overheads, except for codecs.
IDEAL = Overheads()
# `contention` and `hop_us` are fitted to llm-foundry's data. A ring at 190 GB/s takes 7 % of the multiprocessors of an
# A100 and 23 % of its memory bandwidth: computation next to it loses 57 %. At 10 GB/s it loses 3 %. Host times: a guess
# for a fast host.
REAL = Overheads(contention=1.87, hop_us=21.0, launch_s=15e-6, event_s=50e-6)


def _links(key: str, latency_us: float) -> dict[str, Link]:
    return {name: Link(float(rate), latency_us) for name, rate in DATA[key].items()}


WITHIN = _links("GB/s within a node", LATENCY_US)
SWITCHES = _links("GB/s of a switch that adds up", LATENCY_US)
TO_HOST = _links("GB/s to the host", HOST_LATENCY_US)


def _gpu(name: str, row: dict[str, Any]) -> Gpu:
    network = row["network"]
    return Gpu(
        name=name,
        device=row["device"],
        memory_bytes=round(row["memory GiB"] * GIB),
        flops=row["16-bit TFLOP/s"] * 1e12,
        fp32_flops=row["fp32 TFLOP/s"] * 1e12,
        hbm_bytes_per_s=row["memory GB/s"] * 1e9,
        intra=WITHIN[row["links within a node"]],
        pcie=TO_HOST[row["link to the host"]],
        switch=SWITCHES.get(row["links within a node"]),
        has_bf16=row["has bf16"],
        multiprocessors=row["multiprocessors"],
        network=network,
        host=Host(**DATA["hosts"]["server" if network.startswith(("ib", "roce")) else "small"]),
    )


def letters_of(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


# If a device name matches two rows, the first one counts.
_ROWS = {row[0]: dict(zip(DATA["columns"], row, strict=True)) for row in DATA["gpus"]}
GPUS = {name: _gpu(name, row) for name, row in _ROWS.items()}
# Aliases name the usual variant. A100 or V100 without a memory size is ambiguous, so it is no alias.
_BY_LETTERS = {letters_of(name): gpu for name, gpu in GPUS.items()}
_BY_LETTERS |= {alias: GPUS[name] for alias, name in DATA["aliases"].items()}


def gpu_named(name: str, flag: str = "GPUs") -> Gpu:
    """Look up a GPU: `H100-80GB`, `h100`, `RTX 4090`, `A100-SXM4-80GB`. Only letters and digits count."""
    letters = re.sub(r"^(nvidia|amd|tesla|geforce)+", "", letters_of(re.sub(r"sxm\d?", "", name.lower())))
    if letters in _BY_LETTERS:
        return _BY_LETTERS[letters]
    sizes = [known for known in GPUS if letters and re.fullmatch(rf"{letters}\d+gb", known.lower().replace("-", ""))]
    if len(sizes) > 1:
        raise ConfigurationError(f"{flag}: there are {' and '.join(sizes)}: say which {name!r} it is")
    raise ConfigurationError(
        f"{flag}: unknown GPU {name!r}; {nearest_names(name, [*GPUS, *DATA['instances']])} For another one take the "
        "nearest with --gpu-memory, or measure it (shardwise doctor --measure)"
    )


def gpu_of_device(device_name: str) -> Gpu | None:
    """Look up a GPU by the driver's name. None for the variants laptop, Ti, Super and D, which are different chips."""
    if re.search(r"laptop|\b(ti|super|d|dd)\b", device_name.lower()):
        return None
    found = (gpu for gpu in GPUS.values() if re.search(rf"\b{gpu.device}\b", device_name, re.IGNORECASE))
    return next(found, None)


def efficiency_of(gpu_name: str) -> Efficiency:
    if gpu_name not in _ROWS:
        raise ConfigurationError(f"GPU {gpu_name!r}: its efficiency is not known; see planner/hardware/gpus.json")
    name, is_own = (_ROWS[gpu_name][key] for key in ("efficiency", "is the efficiency this GPU's own"))
    values: dict[str, Any] = {"rest like": name}
    while (like := values.pop("rest like", None)) is not None:
        values = {**DATA["efficiency"][like], **values}
    source = values["source"] if is_own else f"not measured; as an {name}: {values['source']}"
    known = {entry.name: values[entry.name] for entry in fields(Efficiency) if entry.name in values}
    return Efficiency(**{**known, "source": source})


def peak_flops(device_name: str, dtype: DType) -> float | None:
    """Dense FLOP/s of a device. None for unknown devices, and for 32 bits, whose peak depends on tf32."""
    gpu = gpu_of_device(device_name)
    if gpu is None or dtype not in ((BF16, FP16) if gpu.has_bf16 else (FP16,)):
        return None
    return gpu.flops


def flops_per_token(num_multiplying_params: float, layers: int, hidden: int, seq: int) -> float:
    """FLOP of forward and backward per token, counted like torchtitan: 6 for each parameter in a matrix product, and
    attention without a causal mask. An embedding is a lookup and does not count; a tied one counts, as the head.
    `hidden` is the number of heads times their size. Recomputation by activation checkpointing does not count. A frozen
    parameter has no gradient of its own: the caller counts it as two thirds of one.
    """
    return 6 * num_multiplying_params + 12 * layers * hidden * seq
