"""A plan in words: model, machine, training, conditions, and each strategy.

Strategies with equal numbers are shown together: on one node, those that differ between nodes alone are equal.
"""

import re

from ..base.text import count, plural, size
from ..planner.plan_json import at
from .plan_facts import (
    CLASSES,
    PLACES,
    WIRES,
    Json,
    amount,
    at_peak,
    device_word,
    gpu_bytes,
    interval,
    is_tight,
    mapping,
    needed,
    number,
    stacked,
    text_of,
    uses,
)


def reason(plan: Json) -> str:
    """Return why the strategy is recommended; the text before it gives its name."""
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


def machine_words(plan: Json) -> str:
    """Describe the GPU's memory and the links."""
    cluster, limit = mapping(plan.get("cluster")), gpu_bytes(plan)
    inside, between = (amount(cluster, name, "gigabytes_per_s") for name in ("intra", "inter"))
    network = text_of(cluster.get("network"))
    words = [
        f"{size(limit)} ({limit / 2**30:,.1f} GiB) a {device_word(plan)}" if limit else "",
        f"{inside:.3g} GB/s in a node" if inside and amount(cluster, "node_size") > 1 else "",
        f"{between:.3g} GB/s between nodes" + (f" ({network})" if network else "")
        if between and amount(cluster, "num_nodes") > 1
        else "",
        *(
            f"{size(amount(cluster, f'{place}_bytes'))} {words}"
            for place, words in PLACES.items()
            if uses(plan, f"{place}_bytes") and amount(cluster, f"{place}_bytes")
        ),
    ]
    return ", ".join(word for word in words if word)


def away_words(strategy: Json) -> str:
    """Describe the memory that a strategy needs on host and disk."""
    found = {place: amount(strategy, f"{place}_bytes") for place in PLACES}
    return ", ".join(f"{size(num_bytes)} {PLACES[place]}" for place, num_bytes in found.items() if num_bytes)


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
    """Describe the batch of one strategy: each may have its own micro-batch and checkpointing."""
    words = []
    if amount(strategy, "micro_batch"):
        words.append(f"micro-batch {int(amount(strategy, 'micro_batch'))}")
    if amount(strategy, "num_micro_batches") > 1:
        words.append(f"{int(amount(strategy, 'num_micro_batches'))} of them a step")
    if strategy.get("checkpointing") not in (None, "", "none"):
        words.append(f"{text_of(strategy.get('checkpointing'))} checkpointing")
    return ", ".join(words)


def differences(shown: list[Json]) -> list[str]:
    """Return the settings in which strategies differ, in short: mb 4 x 2, full. Empty if all have the same."""
    batches = [_micro(strategy) for strategy in shown]
    kept = [text_of(strategy.get("checkpointing")).replace("none", "") for strategy in shown]
    parts = [column for column in (batches, kept) if len({*column}) > 1]
    return [", ".join(word for word in words if word) or "-" for words in zip(*parts, strict=True)]


def _micro(strategy: Json) -> str:
    size_of, num = int(amount(strategy, "micro_batch")), int(amount(strategy, "num_micro_batches"))
    return (f"mb {size_of}" + (f" x {num}" if num > 1 else "")) if size_of else ""


def layout_words(strategy: Json) -> str:
    """Return the value for `--strategy`: a name, or a mapping from patterns to layouts with ranges of numbers."""
    layout = strategy.get("strategy", strategy.get("layout"))
    if not isinstance(layout, dict):
        return text_of(layout)
    patterns: dict[str, list[str]] = {}
    for pattern, value in layout.items():
        patterns.setdefault(text_of(value), []).append(text_of(pattern))
    return "; ".join(f"{', '.join(_ranges(names))}: {value}" for value, names in patterns.items())


def _ranges(names: list[str]) -> list[str]:
    """Shorten blocks.2, blocks.3, blocks.4, head to blocks.2-4, head."""
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


def days_words(strategy: Json) -> str:
    days = number(strategy.get("days"))
    return "" if days is None else f"{days:,.0f}" if days >= 9.95 else f"{days:.1f}" if days >= 0.095 else f"{days:.1g}"


def peak_words(strategy: Json) -> str:
    """Describe the peak: its instant and the memory classes there, the largest first, without small ones."""
    peak = mapping(strategy.get("peak"))
    held = stacked(mapping(peak.get("bytes")))
    total = sum(held.values())
    parts = sorted((pair for pair in held.items() if pair[1] >= total / 200), key=lambda pair: -pair[1])
    named = ", ".join(f"{CLASSES[name]} {size(value)}" for name, value in parts)
    return f"peak {size(total)} at {at(text_of(peak.get('instant')))}: {named}" if held else text_of(peak.get("text"))


OF_STRATEGIES = ("micro_batch", "num_micro_batches", "checkpointing")  # may differ between strategies


def conditions(plan: Json) -> dict[str, list[tuple[str, str]]]:
    cluster = mapping(plan.get("cluster"))
    topics = {
        "model": plan.get("model"),
        "training": {name: value for name, value in mapping(plan.get("training")).items() if name not in OF_STRATEGIES},
        "cluster": {name: value for name, value in cluster.items() if name != "gpu"},
        "GPU": cluster.get("gpu"),
    }
    return {topic: pairs for topic, values in topics.items() if (pairs := _pairs(values))}


def _pairs(values: object) -> list[tuple[str, str]]:
    """Return names and values of a flat or a nested mapping as text."""
    return [
        (name.replace("_", " "), _worded(name, value))
        for name, value in mapping(values).items()
        if value not in (None, "")
    ]


def _worded(name: str, value: object) -> str:
    if isinstance(value, dict) and "gigabytes_per_s" in value:
        return f"{amount(value, 'gigabytes_per_s'):g} GB/s, {amount(value, 'latency_us'):g} us"
    if isinstance(value, dict):
        return ", ".join(
            f"{key.replace('_', ' ')} {_worded(key, inner)}" for key, inner in value.items() if inner is not None
        )
    if isinstance(value, list | tuple):
        return ", ".join(text_of(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if (known := number(value)) is not None:
        if name.endswith("flops"):
            return f"{known / 1e12:,.4g} TFLOP/s"
        if name.endswith(("bytes", "bytes_per_s")):
            return size(known) + ("/s" if name.endswith("_per_s") else "")
        return f"{known:,}" if isinstance(value, int) else f"{known:,.4g}"
    return text_of(value)


def grouped(plan: Json, shown: list[Json]) -> list[tuple[Json, str]]:
    """Pair strategies with titles: a strategy with the numbers of an earlier one is listed after its name."""
    found: dict[object, list[Json]] = {}
    for row in shown:
        found.setdefault(_numbers(plan, row), []).append(row)
    return [(first, _called(first, others)) for first, *others in found.values()]


def _called(first: Json, others: list[Json]) -> str:
    names = ", ".join(text_of(row.get("name")) for row in others)
    return text_of(first.get("name")) + (f" ({names})" if names else "")


def _numbers(plan: Json, row: Json) -> object:
    """Return everything that is shown of a strategy except its name."""
    figures = [
        *(at_peak(row).get(name, 0.0) for name in CLASSES),
        *(interval(row) or (0, 0)),
        *(amount(row, "traffic_bytes", name) for name in WIRES),
        *(amount(row, name) for name in ("host_bytes", "disk_bytes", "step_seconds", "tokens_per_second_per_gpu")),
    ]
    words = [text_of(row.get(name)) for name in ("fits", "exact", "why_not", "nearest")]
    return (*(f"{figure:.4g}" for figure in [*figures, needed(row)]), *words, is_tight(plan, row), batch_words(row))


# "needs 98.1 GB on each H100-80GB, which has 84.9 GB"; the number is a group of its own.
_NEEDS = re.compile(r"(needs )([\d,.]+)( GB .*)")


def refusals(shown: list[Json]) -> list[tuple[str, str, str]]:
    """Return names, reason and nearest change; strategies whose reasons differ only in the number share a row."""
    found: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for row in shown:
        if not row.get("fits"):
            why = text_of(row.get("why_not"))
            begin, amount_of, end = parts.groups() if (parts := _NEEDS.fullmatch(why)) else (why, "", "")
            key = begin, end, text_of(row.get("nearest"))
            found.setdefault(key, []).append((text_of(row.get("name")), amount_of))
    return [
        (", ".join(name for name, _ in each), f"{begin}{_span(each)}{end}", nearest)
        for (begin, end, nearest), each in found.items()
    ]


def _span(each: list[tuple[str, str]]) -> str:
    """Return the range of the numbers; `each` is sorted by need."""
    first, last = each[0][1], each[-1][1]
    return first if first == last else f"{first} to {last}"
