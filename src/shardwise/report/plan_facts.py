"""A plan as readers see it: numbers and words from JSON that may be old, incomplete, or written by another program.

`CLASSES` is the order in which memory is stacked: state at the bottom, then communication buffers, then activations.
Strategies with equal numbers are shown as one: on a single node, for example, `hsdp` equals `zero3`.
"""

import json
import math
import re
from functools import cached_property
from typing import Any

from ..base.text import count, plural, seconds, size

Json = dict[str, Any]

CONTEXT = "context"  # memory of CUDA and NCCL, outside of torch's allocator
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
RESERVE = "reserve"  # memory that the allocator holds beyond the memory in use
SEGMENTS = {**CLASSES, RESERVE: "held by the allocator"}
LARGEST = 1e24  # larger values are not valid amounts
PLACES = {"host": "on the host", "disk": "on disk"}  # their sizes are per node
WIRES = {"intra_node": "inside a node", "inter_node": "between nodes", "pcie": "over PCIe", "disk": "to and from disk"}
OF_STRATEGIES = ("micro_batch", "num_micro_batches", "checkpointing")  # may differ between strategies
# Why a strategy does not fit: "needs 98.1 GB on each H100-80GB, which has 84.9 GB". The second group is the number.
_NEEDS = re.compile(r"(needs )([\d,.]+)( GB .*)")


def number(value: object) -> float | None:
    """Return the value if it is a number that can be drawn (not NaN, not too large), else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        return None
    return value


def amount(values: object, *names: str) -> float:
    """Return a number from nested mappings; 0 if it is missing, negative or no number."""
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


def gigabytes(num_bytes: float) -> str:
    value = num_bytes / 1e9
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 0.05 else f"{value:.2g}"


def whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def decimal(value: float | None, unknown: str = "-") -> str:
    if value is None:
        return unknown
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.095 else f"{value:.1g}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def stacked(num_bytes: Json) -> dict[str, float]:
    """Return bytes by class in the order of `CLASSES`, without empty classes."""
    found = {name: amount(num_bytes, name) for name in CLASSES}
    return {name: value for name, value in found.items() if value > 0}


def listed(held: dict[str, float]) -> str:
    return ", ".join(f"{CLASSES[name]} {size(value)}" for name, value in held.items())


def _joined(*words: str) -> str:
    return ", ".join(word for word in words if word)


class Strategy:
    """A strategy of a plan. `title` also names the strategies with the same numbers, which are not shown again."""

    def __init__(self, row: Json, plan: "Plan") -> None:
        self.row = row
        self.name = self.title = text_of(row.get("name"))
        self.label = text_of(row.get("label")) or self.name  # in words
        self.fits = bool(row.get("fits"))
        self.is_exact = row.get("exact") is not False  # no collective is quantised
        self.step_s, self.speed = number(row.get("step_seconds")), number(row.get("tokens_per_second_per_gpu"))
        self.unclipped_s = number(row.get("unclipped_step_seconds"))
        # A CPU has no MFU: its peak is unknown.
        self.mfu = None if plan.device == "rank" else number(row.get("mfu"))
        self.peak = text_of(mapping(row.get("peak")).get("text"))
        self.held = mapping(row.get("per_gpu_bytes"))
        # Bytes by class at the instant of the peak, and the context. If they are unknown: the maximum of each class.
        at_once = mapping(mapping(row.get("peak")).get("bytes")) or self.held
        self.at_peak = stacked({**at_once, CONTEXT: self.held.get(CONTEXT)})
        in_use = sum(value for name, value in self.at_peak.items() if name != CONTEXT)
        self.segments = {**self.at_peak, RESERVE: max(0.0, amount(self.held, "peak_reserved") - in_use)}
        # Memory that a GPU must have, and its lower and upper estimate, which differ by the allocator's reserve.
        self.needed = sum(self.segments.values())
        low, high = (number(self.held.get(f"peak_reserved_{end}")) for end in ("low", "high"))
        self.interval: tuple[float, float] | None = None
        if low is not None and high is not None and high > low:
            self.interval = (low + amount(self.held, CONTEXT), high + amount(self.held, CONTEXT))
        # Tight: the expected memory fits, the upper estimate does not.
        self.room = number(row.get("room_bytes"))
        is_over = plan.limit is not None and self.interval is not None and self.interval[1] > plan.limit
        self.is_tight = bool(row["tight"]) if isinstance(row.get("tight"), bool) else self.fits and is_over
        self._read_batch()

    def _read_batch(self) -> None:
        """Describe the batch in words, and in short ("mb 4 x 2"). Each strategy may have its own batch."""
        micro, num = int(self.amount("micro_batch")), int(self.amount("num_micro_batches"))
        checkpointing = text_of(self.row.get("checkpointing"))
        self.checkpointing = "" if checkpointing == "none" else checkpointing
        self.micro = (f"mb {micro}" + (f" x {num}" if num > 1 else "")) if micro else ""
        self.batch = _joined(
            f"micro-batch {micro}" if micro else "",
            f"{num} of them a step" if num > 1 else "",
            f"{self.checkpointing} checkpointing" if self.checkpointing else "",
        )

    def amount(self, *names: str) -> float:
        return amount(self.row, *names)

    @property
    def offloaded(self) -> str:
        """The memory that the strategy needs on host and disk, in words."""
        found = {words: self.amount(f"{place}_bytes") for place, words in PLACES.items()}
        return _joined(*(f"{size(num_bytes)} {words}" for words, num_bytes in found.items() if num_bytes))

    @property
    def spare(self) -> str:
        """The time of a step that is not clipped, and the spare memory for updates before the norm."""
        if self.unclipped_s is None:
            return ""
        spare, step = size(self.amount("spare_bytes")), seconds(self.unclipped_s)
        return f"{step} a step if nothing is clipped, with {spare} of spare memory for updates"

    @property
    def layout(self) -> str:
        """The strategy as text: a name, or units and their layouts ("blocks.2-4, head: zero2; *: zero3")."""
        layout = self.row.get("strategy", self.row.get("layout"))
        if not isinstance(layout, dict):
            return text_of(layout)
        patterns: dict[str, list[str]] = {}
        for pattern, value in layout.items():
            patterns.setdefault(text_of(value), []).append(text_of(pattern))
        return "; ".join(f"{', '.join(_ranges(names))}: {value}" for value, names in patterns.items())

    @property
    def option(self) -> str:
        """The strategy as an option of the command line."""
        layout = self.row.get("strategy", self.name)
        is_plain = isinstance(layout, str)
        return f"--strategy {text_of(layout) if is_plain else repr(text_of(json.dumps(layout)))}"

    @property
    def days(self) -> str:
        return decimal(number(self.row.get("days")), "")

    @property
    def costs(self) -> str:
        """Days, GPU-hours and dollars of the whole training, in words."""
        words = {"days": "{} days", "gpu_hours": "{} GPU-hours", "dollars": "${}"}
        given = {name: number(self.row.get(name)) for name in words}
        return _joined(*(words[name].format(decimal(value)) for name, value in given.items() if value is not None))

    @property
    def numbers(self) -> object:
        """Everything that is shown of the strategy except its name."""
        figures = [
            *(self.at_peak.get(name, 0.0) for name in CLASSES),
            *(self.interval or (0, 0)),
            *(self.amount("traffic_bytes", name) for name in WIRES),
            *map(self.amount, ("host_bytes", "spare_bytes", "disk_bytes", "step_seconds", "tokens_per_second_per_gpu")),
            self.needed,
        ]
        words = [text_of(self.row.get(name)) for name in ("fits", "exact", "why_not", "nearest")]
        return (*(f"{figure:.4g}" for figure in figures), *words, self.is_tight, self.batch)


class Plan:
    """A plan. `strategies`: the recommended one, others that fit (fastest first), the rest (least memory first)."""

    def __init__(self, plan: Json) -> None:
        self.json, self.cluster = plan, mapping(plan.get("cluster"))
        gpu, name = mapping(self.cluster.get("gpu")), plan.get("recommended")
        self.limit = number(gpu.get("memory_bytes")) or number(self.cluster.get("gpu_memory_bytes"))
        # The device of a rank is a GPU, or a share of the host.
        self.device = "rank" if text_of(gpu.get("name")).lower().startswith("cpu") else "GPU"
        self.num_nodes, self.node_size = (int(amount(self.cluster, key)) for key in ("num_nodes", "node_size"))
        self.world_size = int(amount(self.cluster, "num_nodes") * amount(self.cluster, "node_size"))
        found = [Strategy(row, self) for row in rows(plan.get("strategies"))]
        self.best = next((strategy for strategy in found if name and strategy.row.get("name") == name), None)
        self.strategies = sorted(found, key=self._rank)
        # The recommended strategy, or the only one.
        self.chosen = self.best or (found[0] if len(found) == 1 else None)

    def _rank(self, strategy: Strategy) -> tuple[bool, bool, float]:
        cost = strategy.step_s if strategy.fits else strategy.needed
        return strategy is not self.best, not strategy.fits, math.inf if cost is None else cost

    def uses(self, *names: str) -> bool:
        """True if any strategy has a value above 0 under these nested keys."""
        return any(strategy.amount(*names) > 0 for strategy in self.strategies)

    @cached_property
    def shown(self) -> list[Strategy]:
        """One strategy of each group with equal numbers; its title names the others."""
        found: dict[object, list[Strategy]] = {}
        for strategy in self.strategies:
            found.setdefault(strategy.numbers, []).append(strategy)
        for first, *others in found.values():
            first.title = first.name + (f" ({', '.join(other.name for other in others)})" if others else "")
        return [group[0] for group in found.values()]

    @property
    def terms(self) -> list[dict[str, str]]:
        """The terms of the recommended strategy's memory as texts: name, size, formula and source of each."""
        found = []
        for row in rows(self.json.get("explain")):
            term, num_bytes = {name: text_of(row.get(name)) for name in ("term", "formula", "source")}, row.get("bytes")
            found.append({**term, "size": "-" if number(num_bytes) is None else size(amount(num_bytes))})
        return found

    @property
    def reason(self) -> str:
        """Why the strategy is recommended. Its name is left out, because the caller prints it before this text."""
        why, name = text_of(self.json.get("why")), text_of(self.json.get("recommended"))
        return f"it {why.removeprefix(name).lstrip()}" if name and why.startswith(f"{name} ") else why

    @property
    def verdict(self) -> str:
        """The recommended strategy and the reason, in a sentence."""
        engine = text_of(self.json.get("engine"))
        if engine and self.reason and self.best is None:
            return f"{engine}: {self.reason}"
        if self.best is not None:
            more = f"; {self.best.costs} in all" if self.best.costs else ""
            if engine:
                memory = f"{size(self.best.needed)} a {self.device}"
                return f"{engine} would need {memory} with {self.best.name}: {self.reason}{more}"
            much = [tried for tried in self.alternatives if tried.get("much_faster")]
            for tried in much:
                more += (
                    f"; or {number(tried.get('times_as_fast')) or 0:.1f}x as fast with {text_of(tried.get('flags'))}"
                )
            return f"Take {self.best.label}" + (f": {self.reason}{more}" if self.reason else f"{more}.")
        if not self.strategies:
            return "Nothing was planned."
        nearest, *others = self.strategies
        # A plan of a single strategy may recommend nothing, although this strategy fits.
        says = "fits" if nearest.fits else "does not fit"
        return self.reason or ("Nothing fits." if others else f"{nearest.name} {says}.")

    @property
    def alternatives(self) -> list[Json]:
        return rows(self.json.get("alternatives"))

    @property
    def alternative_words(self) -> list[tuple[str, str]]:
        """Flags of each alternative; its speed, memory and strategy, and how the training differs."""
        found = []
        for tried in self.alternatives:
            speed, times = whole(number(tried.get("tokens_per_second_per_gpu"))), number(tried.get("times_as_fast"))
            mode = text_of(tried.get("checkpointing"))
            words = _joined(
                f"{speed} tok/s/{self.device}" + (f" ({times:.1f}x)" if times else ""),
                f"{gigabytes(amount(tried, 'needed_bytes'))} GB",
                text_of(tried.get("label")),
                f"{mode} checkpointing" if mode not in ("", "none") else "",
            )
            found.append((text_of(tried.get("flags")), f"{words}: {text_of(tried.get('cost'))}"))
        return found

    @property
    def model_words(self) -> str:
        model = mapping(self.json.get("model"))
        num_params = number(model.get("num_params"))
        return _joined(text_of(model.get("name")), f"{count(num_params)} parameters" if num_params else "")

    @property
    def cluster_words(self) -> str:
        gpu = text_of(mapping(self.cluster.get("gpu")).get("name") or self.cluster.get("gpu_name")) or "GPU"
        if not self.num_nodes or not self.node_size:
            return ""
        nodes = f" ({plural(self.num_nodes, 'node')} x {self.node_size})" if self.num_nodes > 1 else ""
        return f"{self.num_nodes * self.node_size:,} x {gpu}{nodes}"

    @property
    def machine_words(self) -> str:
        """The GPU's memory, the bandwidths of the links, and the memory of host and disk."""
        inside, between = (amount(self.cluster, name, "gigabytes_per_s") for name in ("intra", "inter"))
        network = text_of(self.cluster.get("network"))
        has_inside, has_between = (amount(self.cluster, name) > 1 for name in ("node_size", "num_nodes"))
        places = {place: amount(self.cluster, f"{place}_bytes") for place in PLACES if self.uses(f"{place}_bytes")}
        return _joined(
            f"{size(self.limit)} ({self.limit / 2**30:,.1f} GiB) a {self.device}" if self.limit else "",
            f"{inside:.3g} GB/s in a node" if inside and has_inside else "",
            f"{between:.3g} GB/s between nodes{f' ({network})' if network else ''}" if between and has_between else "",
            *(f"{size(num_bytes)} {PLACES[place]}" for place, num_bytes in places.items() if num_bytes),
        )

    @property
    def training_words(self) -> str:
        training = mapping(self.json.get("training"))
        lora = mapping(training.get("lora"))
        return _joined(
            f"{int(amount(training, 'seq')):,} tokens a sample" if amount(training, "seq") else "",
            text_of(training.get("precision")),
            text_of(training.get("optimizer")),
            f"LoRA of rank {int(amount(lora, 'r'))}" if lora else "",
            "compiled" if training.get("compile") else "",
            f"{text_of(training.get('loss'))} loss" if training.get("loss") else "",
        )

    @property
    def conditions(self) -> dict[str, list[tuple[str, str]]]:
        """Names and values of the model, the training and the machine, by topic."""
        training = mapping(self.json.get("training"))
        topics = {
            "model": self.json.get("model"),
            "training": {name: value for name, value in training.items() if name not in OF_STRATEGIES},
            "cluster": {name: value for name, value in self.cluster.items() if name != "gpu"},
            "GPU": self.cluster.get("gpu"),
        }
        found = {
            topic: [
                (name.replace("_", " "), _worded(name, value))
                for name, value in mapping(values).items()
                if value not in (None, "")
            ]
            for topic, values in topics.items()
        }
        return {topic: pairs for topic, pairs in found.items() if pairs}

    @property
    def refusals(self) -> list[tuple[str, str, str]]:
        """Names, reason, and a change that helps. Strategies whose reasons differ only in the number share a row."""
        found: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
        for strategy in self.strategies:
            if not strategy.fits:
                why = text_of(strategy.row.get("why_not"))
                begin, amount_of, end = parts.groups() if (parts := _NEEDS.fullmatch(why)) else (why, "", "")
                key = begin, end, text_of(strategy.row.get("nearest"))
                found.setdefault(key, []).append((strategy.name, amount_of))
        refused = []
        for (begin, end, nearest), each in found.items():
            first, last = each[0][1], each[-1][1]  # strategies are sorted by needed memory
            span = first if first == last else f"{first} to {last}"
            refused.append((", ".join(name for name, _ in each), f"{begin}{span}{end}", nearest))
        return refused


def _ranges(names: list[str]) -> list[str]:
    """Shorten blocks.2, blocks.3, blocks.4, head to blocks.2-4, head."""
    found: list[tuple[str, int, int]] = []
    for name in names:
        stem, _, last = name.rpartition(".")
        place = int(last) if stem and last.isdecimal() and len(last) < 9 else -1
        if place > 0 and found and found[-1][0] == stem and found[-1][2] == place - 1:
            found[-1] = (stem, found[-1][1], place)
        else:
            found.append((stem, place, place) if place >= 0 else (name, -1, -1))
    return [
        stem if first < 0 else f"{stem}.{first}" + (f"-{last}" if last > first else "") for stem, first, last in found
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
    if (known := number(value)) is None:
        return text_of(value)
    if name.endswith("flops"):
        return f"{known / 1e12:,.4g} TFLOP/s"
    if name.endswith(("bytes", "bytes_per_s")):
        return size(known) + ("/s" if name.endswith("_per_s") else "")
    return f"{known:,}" if isinstance(value, int) else f"{known:,.4g}"
