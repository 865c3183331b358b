"""Published training runs as steps that the planner can play: what each code base computes, on which machine.

The work of a row is counted here and not by `plan.works`, because these are other people's models: MPT of llm-foundry,
torchtitan's Llama, transformers under Answer.AI's script. What their eager code reads and writes is counted from their
sources, kernel by kernel, and is not fitted.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from shardwise.dtypes import BF16, FP32
from shardwise.layout import layout_of
from shardwise.plan.cluster import make_cluster
from shardwise.plan.compute import UnitSeconds, forward_s, seconds_of, speed_of
from shardwise.plan.efficiency import Efficiency, Wear
from shardwise.plan.events import Event, step_events
from shardwise.plan.flat import flats_of
from shardwise.plan.hardware import Cluster
from shardwise.plan.model import FoundUnit, Param, Site
from shardwise.plan.schedule import Schedule, UnitPlan, make_schedule
from shardwise.plan.time import step_time
from shardwise.plan.training import Training
from shardwise.plan.work import Product, Work
from shardwise.precision import precision_of

ROWS = Path(__file__).with_name("planner_published_rows.json")


@dataclass(frozen=True, slots=True)
class Row:
    id: str
    cluster: str
    gpu: str
    num_nodes: int
    node_size: int
    model: str
    seq: int
    micro_batch: int
    num_micro_batches: int
    strategy: str
    checkpointing: str
    reduce: str
    compile: bool
    stack: str
    adapters: int
    tokens_per_s_per_gpu: float

    @property
    def num_tokens(self) -> int:
        return self.seq * self.micro_batch

    @property
    def seen_s(self) -> float:
        return self.num_micro_batches * self.num_tokens / self.tokens_per_s_per_gpu


# What a published row says of its hardware, in the planner's words. Networks that are not stated are the usual ones.
CLUSTERS = {
    "A100-40GB": ("A100-40GB", "roce-200"),
    "A100-80GB": ("A100-80GB", "roce-200"),
    "H100-80GB": ("H100-80GB", "ib-ndr"),
    "H100-96GB-HBM2e": ("H100-96GB", "ib-ndr"),
    "GB200": ("GB200", "ib-ndr"),
    "RTX3090": ("RTX-3090", "ethernet-10"),
    "RTX4090": ("RTX-4090", "ethernet-10"),
}


@dataclass(frozen=True, slots=True)
class Habits:
    """What a code base reads and writes for a token in a block's forward, beside products and attention: 16-bit numbers
    for each of the hidden and of the feed-forward's; and kernels."""

    per_hidden: float
    per_ffn: float
    num_kernels: int
    loss_bytes: float  # for a token and a word of the vocabulary, forward


HABITS = {
    ("mpt", False): Habits(10, 2, 25, 11),
    ("torchtitan", False): Habits(50, 5, 50, 11),
    ("torchtitan", True): Habits(14, 3, 20, 11),
    ("hf", False): Habits(50, 5, 60, 11),
}


def read_rows() -> tuple[list[Row], list[tuple[str, str]]]:
    """The rows, and the ids of those that were left out with the reason."""
    table = json.loads(ROWS.read_text())
    return [Row(**dict(zip(table["columns"], row, strict=True))) for row in table["rows"]], table["left_out"]


@cache
def _shapes() -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = json.loads(ROWS.read_text())["shapes"]
    return found


@dataclass(frozen=True, slots=True)
class Step:
    """A row, ready to be played: works by unit, and what the backward of each computes again."""

    row: Row
    cluster: Cluster
    works: dict[str, Work]
    again: dict[str, Work]
    # For one micro-batch and for two: those after the second take as long as it.
    plans: tuple[tuple[Schedule, list[Event]], ...]


def step_of(row: Row) -> Step:
    shape = _shapes()[row.model]
    name, network = CLUSTERS[row.gpu]
    cluster = make_cluster(f"{row.node_size}x{name}", row.num_nodes, network=network)
    works, again = _works(row, shape)
    schedule = _schedule(row, shape)
    plans = tuple((schedule, step_events(schedule, num)) for num in range(1, min(row.num_micro_batches, 2) + 1))
    return Step(row, cluster, works, again, plans)


def _works(row: Row, shape: dict[str, int]) -> tuple[dict[str, Work], dict[str, Work]]:
    tokens, hidden, ffn, vocab = row.num_tokens, shape["hidden"], shape["ffn"], shape["vocab"]
    kv = hidden * shape["kv_heads"] // shape["heads"]
    habits = HABITS[str(shape["code"]), row.compile]
    trains = not row.adapters
    products = [
        Product(tokens, hidden + 2 * kv, hidden, 1, trains),
        Product(tokens, hidden, hidden, 1, trains),
        Product(tokens, ffn, hidden, 2 if shape["gated"] else 1, trains),
        Product(tokens, hidden, ffn, 1, trains),
    ]
    attention = 2.0 * row.seq * tokens * hidden  # the causal half
    moved = 2.0 * tokens * (habits.per_hidden * hidden + habits.per_ffn * ffn)
    block = _work(products, attention, moved, habits.num_kernels)
    # A recompute ends with the last tensor that the backward needs, the input of the last product (since torch 2.1).
    needed = products if row.stack == "torch 1.13" else products[:-1]
    if row.checkpointing == "full":
        again = _work(needed, attention, moved, habits.num_kernels)
    elif row.checkpointing == "layer":
        again = _halved(_work(needed, attention, moved, habits.num_kernels))
    elif row.checkpointing == "selective":
        again = _work(_halved(_work(products)).products, 0.0, moved, habits.num_kernels)
    else:
        again = _work([])
    head = _work([Product(tokens, vocab, hidden, 1, trains)], 0.0, habits.loss_bytes * tokens * vocab, 12)
    names = [f"blocks.{index}" for index in range(shape["layers"])]
    works = {"embed": _work([]), **dict.fromkeys(names, block), "head": head}
    return works, {"embed": _work([]), **dict.fromkeys(names, again), "head": _work([])}


def _work(
    products: list[Product] | tuple[Product, ...], attention: float = 0.0, moved: float = 0.0, kernels: int = 0
) -> Work:
    return Work(0, 0, 0, 0, products=tuple(products), attention_flops=attention, moved_bytes=moved, num_kernels=kernels)


def _halved(work: Work) -> Work:
    products = [Product(p.m, p.n, p.k // 2, p.count, p.trainable) for p in work.products]
    return _work(products, work.attention_flops / 2, work.moved_bytes / 2, work.num_kernels // 2)


def _schedule(row: Row, shape: dict[str, int]) -> Schedule:
    hidden, ffn, vocab = shape["hidden"], shape["ffn"], shape["vocab"]
    kv = hidden * shape["kv_heads"] // shape["heads"]
    sizes = {"embed": 2 * hidden if shape["tied"] else vocab * hidden}
    block = 2 * hidden * (hidden + kv) + (3 if shape["gated"] else 2) * hidden * ffn
    sizes |= {f"blocks.{index}": block for index in range(shape["layers"])}
    sizes["head"] = vocab * hidden
    layout = layout_of(row.strategy.split()[0])
    precision = precision_of("bf16", row.reduce)
    axes = {"world": (row.num_nodes * row.node_size, 0), "node": (row.node_size, 0), "replicate": (row.num_nodes, 0)}
    units = []
    for name, num_elems in sizes.items():
        params = [_param(f"{name}.base", num_elems, trainable=not row.adapters)]
        if row.adapters:
            params.append(_param(f"{name}.adapter", row.adapters * (6 * hidden + 2 * kv + 3 * ffn)))
        found = FoundUnit(name, name, tuple(params), False, name != "embed")
        units.append(UnitPlan(name, layout, flats_of(found, layout, precision, axes, ()), False, found.backward_reads))
    return make_schedule(units, range(len(units)), None)


def _param(name: str, num_elems: int, trainable: bool = True) -> Param:
    return Param(name, (num_elems,), FP32 if trainable else BF16, trainable, (Site(name, "weight"),))


def unit_seconds(step: Step, efficiency: Efficiency) -> dict[str, UnitSeconds]:
    speed = speed_of(step.cluster.gpu, efficiency, BF16)
    found = seconds_of(step.plans[0][0], step.works, speed, Training(loss="plain"))
    again_s = {id(work): forward_s(work, speed) for work in step.again.values()}
    return {name: replace(unit, backward=unit.backward + again_s[id(step.again[name])]) for name, unit in found.items()}


def predicted_s(step: Step, efficiency: Efficiency, wear: Wear) -> float:
    """Seconds of a step."""
    seconds = unit_seconds(step, efficiency)
    played = [step_time(*plan, seconds, step.cluster, wear).step_s for plan in step.plans]
    more = step.row.num_micro_batches - len(played)
    return played[-1] + (more * (played[-1] - played[-2]) if more else 0.0)
