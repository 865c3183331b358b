"""Values of a plan, read with care: plans come from files, which may be old, partial or written by other programs.

`CLASSES` is the order in which memory is stacked: state at the bottom, then communication buffers, then activations.
"""

import math
from typing import Any

Json = dict[str, Any]

CONTEXT = "context"  # of CUDA and NCCL: outside of the allocator
CLASSES = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer",
    "gathered": "gathered units",
    "reduce": "reduction",
    "activations": "activations",
    "loss": "loss",
    CONTEXT: "CUDA and NCCL",
}
LARGEST = 1e24  # larger values are not valid amounts
RESERVE = "reserve"  # memory that the allocator holds beyond the memory in use
LANES = {
    "compute": "compute",
    "gather": "gather",
    "reduce": "reduce",
    "copy": "copy to and from the host",
    "host": "host",
    "disk": "disk",
}
PLACES = {"host": "on the host", "disk": "on disk"}  # per node
WIRES = {"intra_node": "inside a node", "inter_node": "between nodes", "pcie": "over PCIe", "disk": "to and from disk"}


def number(value: object) -> float | None:
    """Return a number that can be drawn, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        return None
    return value


def amount(values: object, *names: str) -> float:
    """Return a number from nested mappings; 0 if it is missing or no valid amount."""
    for name in names:
        values = values.get(name) if isinstance(values, dict) else None
    return max(number(values) or 0, 0)


def mapping(values: object) -> Json:
    return values if isinstance(values, dict) else {}


def rows(values: object) -> list[Json]:
    return [row for row in values if isinstance(row, dict)] if isinstance(values, list) else []


def text_of(value: object) -> str:
    """Return text that is safe to print: without control characters."""
    return "".join(char if char.isprintable() else "?" for char in str("" if value is None else value).strip())


def strategies(plan: Json) -> list[Json]:
    """Return strategies: the recommended one, then those that fit (fastest first), then those that nearly fit."""

    def rank(strategy: Json) -> tuple[bool, bool, float]:
        fits = bool(strategy.get("fits"))
        cost = number(strategy.get("step_seconds")) if fits else needed(strategy)
        return strategy is not best, not fits, math.inf if cost is None else cost

    best = recommended(plan)
    return sorted(rows(plan.get("strategies")), key=rank)


def recommended(plan: Json) -> Json | None:
    name = plan.get("recommended")
    return next((row for row in rows(plan.get("strategies")) if name and row.get("name") == name), None)


def gpu_bytes(plan: Json) -> float | None:
    cluster = mapping(plan.get("cluster"))
    return number(mapping(cluster.get("gpu")).get("memory_bytes")) or number(cluster.get("gpu_memory_bytes"))


def device_word(plan: Json) -> str:
    """Return the word for the device of a rank: a GPU, or a share of the host."""
    name = text_of(mapping(mapping(plan.get("cluster")).get("gpu")).get("name"))
    return "rank" if name.lower().startswith("cpu") else "GPU"


def stacked(num_bytes: Json) -> dict[str, float]:
    """Bytes by class, from the bottom to the top; classes that hold nothing are left out."""
    found = {name: amount(num_bytes, name) for name in CLASSES}
    return {name: value for name, value in found.items() if value > 0}


def at_peak(strategy: Json) -> dict[str, float]:
    """Bytes by class at the peak, and the context. If the instant of the peak is unknown, the maximum of each class."""
    held = mapping(strategy.get("per_gpu_bytes"))
    return stacked({**(mapping(mapping(strategy.get("peak")).get("bytes")) or held), CONTEXT: held.get(CONTEXT)})


def reserve(strategy: Json) -> float:
    """Memory that the allocator holds beyond the peak in use, without the context."""
    in_use = sum(value for name, value in at_peak(strategy).items() if name != CONTEXT)
    return max(0.0, amount(strategy, "per_gpu_bytes", "peak_reserved") - in_use)


def needed(strategy: Json) -> float:
    """Memory that a GPU must have: all classes at the peak, the context and the allocator's reserve."""
    return sum(at_peak(strategy).values()) + reserve(strategy)


def interval(strategy: Json) -> tuple[float, float] | None:
    """Lower and upper estimate of `needed`; they differ by the allocator's reserve."""
    held = mapping(strategy.get("per_gpu_bytes"))
    low, high = number(held.get("peak_reserved_low")), number(held.get("peak_reserved_high"))
    if low is None or high is None or high <= low:
        return None
    return low + amount(held, CONTEXT), high + amount(held, CONTEXT)


def is_tight(plan: Json, strategy: Json) -> bool:
    """Return True if the strategy fits as expected, but not with the upper estimate of the reserve."""
    if isinstance(strategy.get("tight"), bool):
        return bool(strategy["tight"])
    limit, between = gpu_bytes(plan), interval(strategy)
    return bool(strategy.get("fits")) and limit is not None and between is not None and between[1] > limit


def is_exact(strategy: Json) -> bool:
    """Return True if no collective is quantised."""
    return strategy.get("exact") is not False


def mfu(plan: Json, strategy: Json) -> float | None:
    """Model FLOP utilisation; None for a CPU, whose peak is unknown."""
    return None if device_word(plan) == "rank" else number(strategy.get("mfu"))


def uses(plan: Json, *names: str) -> bool:
    """Return True if any strategy has a value above 0 there."""
    return any(amount(strategy, *names) > 0 for strategy in rows(plan.get("strategies")))


def world_size(plan: Json) -> int:
    cluster = mapping(plan.get("cluster"))
    return int(amount(cluster, "num_nodes") * amount(cluster, "node_size"))


def gigabytes(num_bytes: float) -> str:
    value = num_bytes / 1e9
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 0.05 else f"{value:.2g}"


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.3g} ms" if value < 0.9995 else f"{value:.2f} s" if value < 99.95 else f"{value:,.0f} s"


def whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
