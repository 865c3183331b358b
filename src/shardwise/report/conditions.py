"""What a plan was made for, in names and words: model, training, cluster, GPU."""

from ..base.text import size
from .plan_facts import Json, amount, mapping, number, text_of

OF_STRATEGIES = ("micro_batch", "num_micro_batches", "checkpointing")  # each has its own


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
    """Names and values of a flat or a nested mapping, as words."""
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
