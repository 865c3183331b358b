"""How much of what data sheets promise is reached: a few constants for each generation of GPUs, and their sources.

There are only three sources. H200: our own runs on one (torch 2.11, kernels alone and whole steps). A100 and H100:
fitted on llm-foundry's published rows (torch 1.13 to 2.1), with attention at the speed of flash-attention 2, 1.7 times
that of the first version. Unmeasured GPUs take the values of the most similar measured one, and `source` says so.
`python -m benchmarks.planner_against_published` makes the fit, and lists the error of every row.
"""

from dataclasses import dataclass, replace

from ...base.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Share of a GPU's peak that is reached: `products`, `attention` and `memory` for large sizes.

    A product of (m x k) by (k x n) takes as long as 2 (k + prologue) (mn + tail) FLOP at that share: filling a tile's
    pipeline costs `prologue` steps of the inner dimension, and the last wave of tiles leaves processors idle as if
    `tail` more outputs were made. Attention reaches half of its share at a sequence of `ramp`, and `narrow` of it with
    heads of 64. `gap_s` is the idle time of the device between two kernels.
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


# Measured on an H200, and used for all GPUs: codecs reach 0.80 to 0.82 of its bandwidth when they encode and decode,
# 0.62 (int4) and 0.77 (int8) when they sum the data of eight ranks (benchmarks/codecs.py).
CODING = 0.75


@dataclass(frozen=True, slots=True)
class Overheads:
    """Costs of a real machine beyond the figures of its links.

    `contention`: computation takes this many times as long while a collective runs, which takes processors, memory
    bandwidth and power from it. `hop_us`: latency of a ring for every node beyond the first. The host needs
    `launch_s` to queue a kernel (with torch and autograd around it) and `event_s` to start a gather or a reduction.
    `coding`: the share of the memory's bandwidth at which data is encoded and decoded.
    """

    contention: float = 1.0
    hop_us: float = 0.0
    launch_s: float = 0.0
    event_s: float = 0.0
    coding: float = CODING


# Nothing but the links costs time.
IDEAL = Overheads()
# Our H200's own host, a virtual machine that is slow at queueing, under the emulated fabric, which takes nothing from
# the computation. Median over the steps that it limits; they differ by a quarter from run to run.
EMULATED = Overheads(launch_s=38e-6, event_s=180e-6)
# Contention and hops: fitted on llm-foundry. Two thirds of a collective's time are not hidden by concurrent computation
# (torchtitan's data: keeping units gathered saves as much as their gathers take). The host: a guess for a fast one.
REAL = Overheads(contention=2.93, hop_us=30.0, launch_s=15e-6, event_s=50e-6)

_H200 = Efficiency(
    products=0.705, attention=0.62, memory=0.75, prologue=88.0, tail=60e3, ramp=1200.0, narrow=0.9, gap_s=3e-6,
    source="own runs on one H200, torch 2.11",
)  # fmt: skip
_H100 = Efficiency(
    products=0.614, attention=0.30, memory=0.62, prologue=66.0, tail=230e3, ramp=280.0, narrow=0.99, gap_s=3e-6,
    source="llm-foundry's H100 rows, torch 2.1, with flash-attention 2",
)  # fmt: skip
_A100 = Efficiency(
    products=0.764, attention=0.54, memory=0.62, prologue=66.0, tail=190e3, ramp=280.0, narrow=0.99, gap_s=3e-6,
    source="llm-foundry's A100 rows, torch 1.13 and 2.1, with flash-attention 2",
)  # fmt: skip
_LIKE_A100 = replace(_A100, source=f"not measured; as an A100: {_A100.source}")
_LIKE_H100 = replace(_H100, source=f"not measured; as an H100: {_H100.source}")

# The first row with a prefix of the GPU's name counts.
_TABLE: tuple[tuple[str, tuple[str, ...], Efficiency], ...] = (
    ("hopper", ("H200", "GH200", "H20"), _H200),
    ("hopper", ("H100", "H800"), _H100),
    ("ampere", ("A100", "A800"), _A100),
    ("ampere", ("A40", "A30", "A10", "RTX-3090", "RTX-A"), _LIKE_A100),
    ("ada", ("RTX-4090", "RTX-6000-Ada", "L4"), _LIKE_A100),
    ("volta", ("V100", "T4"), _LIKE_A100),
    ("blackwell", ("B", "GB", "RTX-5090"), _LIKE_H100),
    ("cdna", ("MI",), _LIKE_H100),
)


def generation_of(gpu_name: str) -> str:
    return _row(gpu_name)[0]


def efficiency_of(gpu_name: str) -> Efficiency:
    return _row(gpu_name)[2]


def _row(gpu_name: str) -> tuple[str, tuple[str, ...], Efficiency]:
    found = next((row for row in _TABLE if gpu_name.startswith(row[1])), None)
    if found is None:
        raise ConfigurationError(
            f"GPU {gpu_name!r}: what it reaches of its peak is not known; see planner/hardware/efficiency.py"
        )
    return found
