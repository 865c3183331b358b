"""How much of what data sheets promise is reached: a few constants for each generation of GPUs, and their sources.

`python -m benchmarks.planner_against_published` fits them and lists the error of every published row; nothing here is
set by hand where it says "fitted". A generation that nobody has measured for us takes the values of its nearest
relative, and says so.
"""

from dataclasses import dataclass, replace

from ..errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Efficiency:
    """`products`, `attention` and `memory` are shares of the peak that large sizes reach.

    A product of (m x k) by (k x n) takes as long as 2 (k + prologue) (mn + tail) FLOP at that share: filling a tile's
    pipeline costs `prologue` steps of the inner dimension, and the last wave of tiles leaves processors idle as if
    `tail` more outputs were made. `launch_s` is what the host needs to queue a kernel, `gap_s` what passes on the
    device between two of them.
    """

    products: float
    attention: float
    memory: float
    prologue: float
    tail: float
    launch_s: float
    gap_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Wear:
    """What a real machine adds to the links' own figures.

    `contention`: computation takes this many times as long while a collective runs, which takes processors, memory
    bandwidth and power from it. `hop_us`: latency of a ring for every node beyond the first. `event_host_s`: what
    the host needs to start a gather or a reduction.
    """

    contention: float = 1.0
    hop_us: float = 0.0
    event_host_s: float = 0.0


# The emulated fabric: links and nothing else.
IDEAL = Wear()
# Fitted on llm-foundry's rows: what a collective takes hides behind computation by a third only.
REAL = Wear(contention=3.1, hop_us=28.0)

_HOPPER = Efficiency(
    products=0.76, attention=0.48, memory=0.5, prologue=44.0, tail=0.2 * 132 * 32768, launch_s=6e-6, gap_s=1e-6,
    source="own runs on one H200, torch 2.11",
)  # fmt: skip
_AMPERE = Efficiency(
    products=0.756, attention=0.47, memory=0.57, prologue=42.0, tail=0.15 * 108 * 32768, launch_s=6e-6, gap_s=1e-6,
    source="fitted on llm-foundry's A100 rows (torch 1.13 and 2.1)",
)  # fmt: skip

# The first whose words begin a GPU's name.
_TABLE: dict[tuple[str, ...], tuple[str, Efficiency]] = {
    ("H100", "H200", "GH200", "H800", "H20"): ("hopper", _HOPPER),
    ("A100", "A800", "A40", "A30", "A10", "RTX-3090", "RTX-A"): ("ampere", _AMPERE),
    ("RTX-4090", "L4", "RTX-6000-Ada"): ("ada", replace(_AMPERE, source="as Ampere: no run of ours")),
    ("B", "GB", "RTX-5090"): ("blackwell", replace(_HOPPER, source="as Hopper: no run of ours")),
    ("MI",): ("cdna", replace(_HOPPER, source="as Hopper: no run of ours")),
    ("V100", "T4"): ("volta", replace(_AMPERE, source="as Ampere: no run of ours")),
}


def generation_of(gpu_name: str) -> str:
    return _entry(gpu_name)[0]


def efficiency_of(gpu_name: str) -> Efficiency:
    return _entry(gpu_name)[1]


def _entry(gpu_name: str) -> tuple[str, Efficiency]:
    for words, entry in _TABLE.items():
        if gpu_name.startswith(words):
            return entry
    raise ConfigurationError(f"no efficiency is known for GPU {gpu_name!r}; add it to plan/efficiency.py")
