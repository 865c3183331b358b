"""What a plan says, looked up with care: plans come from files, and files may be old, partial or somebody else's.

`CLASSES` is the order in which memory is stacked: state at the bottom, then what travels, then what is computed.
"""

import math
from typing import Any

from ..train.figures import count, plural

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
LARGEST = 1e24  # what is larger is no amount of anything
RESERVE = "reserve"  # what the allocator holds beyond what is in use
LANES = {
    "compute": "compute",
    "gather": "gather",
    "reduce": "reduce",
    "copy": "copy to and from the host",
    "host": "host",
    "disk": "disk",
}
WIRES = {"intra_node": "inside a node", "inter_node": "between nodes", "pcie": "over PCIe", "disk": "to and from disk"}


def number(value: object) -> float | None:
    """A number that can be drawn, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        return None
    return value


def amount(values: object, *names: str) -> float:
    """A number deep inside of mappings; 0 where there is none, or no amount of anything."""
    for name in names:
        values = values.get(name) if isinstance(values, dict) else None
    return max(number(values) or 0, 0)


def mapping(values: object) -> Json:
    return values if isinstance(values, dict) else {}


def rows(values: object) -> list[Json]:
    return [row for row in values if isinstance(row, dict)] if isinstance(values, list) else []


def text_of(value: object) -> str:
    """As it may be printed: without what would move a cursor."""
    return "".join(char if char.isprintable() else "?" for char in str("" if value is None else value).strip())


def strategies(plan: Json) -> list[Json]:
    """The recommended one first, then what fits, the fastest first, then what comes nearest to fitting."""

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
    """What a rank has: a GPU, or a share of the host."""
    name = text_of(mapping(mapping(plan.get("cluster")).get("gpu")).get("name"))
    return "rank" if name.lower().startswith("cpu") else "GPU"


def stacked(num_bytes: Json) -> dict[str, float]:
    """Bytes by class, from the bottom to the top; classes that hold nothing are left out."""
    found = {name: amount(num_bytes, name) for name in CLASSES}
    return {name: value for name, value in found.items() if value > 0}


def at_peak(strategy: Json) -> dict[str, float]:
    """By class, at the instant that holds the most; the context beside it. Without one, each class at its largest."""
    held = mapping(strategy.get("per_gpu_bytes"))
    return stacked({**(mapping(mapping(strategy.get("peak")).get("bytes")) or held), CONTEXT: held.get(CONTEXT)})


def reserve(strategy: Json) -> float:
    """What the allocator holds beyond what is in use at the peak. The context is none of its own."""
    in_use = sum(value for name, value in at_peak(strategy).items() if name != CONTEXT)
    return max(0.0, amount(strategy, "per_gpu_bytes", "peak_reserved") - in_use)


def needed(strategy: Json) -> float:
    """What a GPU must have: all classes at the peak, the context and the allocator's reserve."""
    return sum(at_peak(strategy).values()) + reserve(strategy)


def interval(strategy: Json) -> tuple[float, float] | None:
    """Between what and what `needed` is, because the allocator's reserve is."""
    held = mapping(strategy.get("per_gpu_bytes"))
    low, high = number(held.get("peak_reserved_low")), number(held.get("peak_reserved_high"))
    if low is None or high is None or high <= low:
        return None
    return low + amount(held, CONTEXT), high + amount(held, CONTEXT)


def is_tight(plan: Json, strategy: Json) -> bool:
    """It fits as expected, but not if the allocator's reserve comes out at the upper end."""
    limit, between = gpu_bytes(plan), interval(strategy)
    return bool(strategy.get("fits")) and limit is not None and between is not None and between[1] > limit


def uses(plan: Json, *names: str) -> bool:
    """Whether any strategy has something there."""
    return any(amount(strategy, *names) > 0 for strategy in rows(plan.get("strategies")))


def world_size(plan: Json) -> int:
    cluster = mapping(plan.get("cluster"))
    return int(amount(cluster, "num_nodes") * amount(cluster, "node_size"))


def reason(plan: Json) -> str:
    """Why the recommended one is; its name is said before."""
    why, name = text_of(plan.get("why")), text_of(plan.get("recommended"))
    return f"it {why.removeprefix(name).lstrip()}" if name and why.startswith(f"{name} ") else why


def cluster_words(plan: Json) -> str:
    cluster = mapping(plan.get("cluster"))
    gpu = text_of(mapping(cluster.get("gpu")).get("name") or cluster.get("gpu_name")) or "GPU"
    num_nodes, node_size = int(amount(cluster, "num_nodes")), int(amount(cluster, "node_size"))
    if not num_nodes or not node_size:
        return ""
    nodes = f" ({plural(num_nodes, 'node')} x {node_size})" if num_nodes > 1 else ""
    return f"{num_nodes * node_size:,} x {gpu}{nodes}"


def model_words(plan: Json) -> str:
    model = mapping(plan.get("model"))
    num_params = number(model.get("num_params"))
    words = [text_of(model.get("name")), f"{count(num_params)} parameters" if num_params else ""]
    return ", ".join(word for word in words if word)


def training_words(plan: Json) -> str:
    training = mapping(plan.get("training"))
    lora = mapping(training.get("lora"))
    words = [
        f"{int(amount(training, 'seq')):,} tokens a sample" if amount(training, "seq") else "",
        text_of(training.get("precision")),
        text_of(training.get("optimizer")),
        f"LoRA of rank {int(amount(lora, 'r'))}" if lora else "",
        "compiled" if training.get("compile") else "",
        f"{text_of(training.get('loss'))} loss" if training.get("loss") else "",
    ]
    return ", ".join(word for word in words if word)


def batch_words(strategy: Json) -> str:
    """Of one strategy: it may have a micro-batch and checkpointing of its own."""
    words = []
    if amount(strategy, "micro_batch"):
        words.append(f"micro-batch {int(amount(strategy, 'micro_batch'))}")
    if amount(strategy, "num_micro_batches") > 1:
        words.append(f"{int(amount(strategy, 'num_micro_batches'))} of them a step")
    if strategy.get("checkpointing") not in (None, "", "none"):
        words.append(f"{text_of(strategy.get('checkpointing'))} checkpointing")
    return ", ".join(words)


def layout_words(strategy: Json) -> str:
    """What `--strategy` takes: a name, or a mapping from patterns to layouts, numbers that follow each other as one."""
    layout = strategy.get("strategy", strategy.get("layout"))
    if not isinstance(layout, dict):
        return text_of(layout)
    patterns: dict[str, list[str]] = {}
    for pattern, value in layout.items():
        patterns.setdefault(text_of(value), []).append(text_of(pattern))
    return "; ".join(f"{', '.join(_ranges(names))}: {value}" for value, names in patterns.items())


def _ranges(names: list[str]) -> list[str]:
    """blocks.2, blocks.3, blocks.4, head: blocks.2-4, head."""
    found: list[tuple[str, int, int]] = []
    for name in names:
        stem, _, last = name.rpartition(".")
        at = int(last) if stem and last.isdecimal() and len(last) < 9 else -1
        if at > 0 and found and found[-1][0] == stem and found[-1][2] == at - 1:
            found[-1] = (stem, found[-1][1], at)
        else:
            found.append((stem, at, at) if at >= 0 else (name, -1, -1))
    return [
        stem if first < 0 else f"{stem}.{first}" + (f"-{last}" if last > first else "") for stem, first, last in found
    ]
