"""Published training runs as steps that the planner can play: their models, their code, their machines, in its words.

The work of a row is what `plan.activations.works_of` counts for the code that it ran: llm-foundry's MPT, torchtitan's
Llama, transformers' under Answer.AI's script. The schedule is ours: FSDP of all three gathers and reduces in the same
order, one unit ahead.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from shardwise.core.layout import layout_of
from shardwise.core.schedule.flat import flats_of
from shardwise.core.schedule.step_schedule import Schedule, UnitPlan, make_schedule
from shardwise.planner.cost.compute import UnitSeconds, seconds_of, speed_of
from shardwise.planner.cost.step_time import step_time
from shardwise.planner.events import Event, step_events
from shardwise.planner.hardware.cluster import Cluster, make_cluster
from shardwise.planner.hardware.gpus import Efficiency, Overheads
from shardwise.planner.shapes.names import coded, shape_named
from shardwise.planner.shapes.shape import ModelShape, units_of
from shardwise.planner.training import Checkpointing, Lora, Training
from shardwise.planner.work.activations import works_of
from shardwise.planner.work.work import Work

ROWS = Path(__file__).with_name("planner_published_rows.json")

# GPU and network of a row. Networks that are not stated are the usual ones.
CLUSTERS: dict[str, tuple[str, str]] = {
    "A100-40GB": ("A100-40GB", "roce-200"),
    "A100-80GB": ("A100-80GB", "roce-200"),
    "A100-80GB-400G": ("A100-80GB", "5.6GB/s"),  # 400 Gbit/s a node, of which RoCE reaches 90 %
    "H100-80GB-800G": ("H100-80GB", "11.2GB/s"),
    "H100-80GB": ("H100-80GB", "ib-ndr"),
    "H100-96GB-HBM2e": ("H100-96GB", "ib-ndr"),
    "GB200": ("GB200", "ib-ndr"),
    "RTX3090": ("RTX-3090", "ethernet-10"),
    "RTX4090": ("RTX-4090", "ethernet-10"),
}
# The links within a node, where they are not those of the GPU's table. Answer.AI's 3090s have "an older motherboard and
# slow PCI lanes".
WITHIN = {"RTX3090": "pcie3"}
# What Answer.AI's script puts adapters on.
TARGETS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Row:
    """`checkpointing`: `layer` is every second block. `adapters`: their rank, 0 where all is trained."""

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


def read_rows() -> tuple[list[Row], list[list[str]]]:
    """The rows, and the ids of those that were left out with the reason."""
    table = json.loads(ROWS.read_text())
    return [Row(**dict(zip(table["columns"], row, strict=True))) for row in table["rows"]], table["left_out"]


@dataclass(frozen=True, slots=True)
class Step:
    """A row, ready to be played. Every second block may have other work; `plans` are for one micro-batch and for two:
    those after the second take as long as it."""

    row: Row
    shape: ModelShape
    cluster: Cluster
    works: tuple[tuple[Training, dict[str, Work]], ...]
    plans: tuple[tuple[Schedule, list[Event]], ...]


def step_of(row: Row) -> Step:
    if row.model == "Llama-2-34B":  # not in the planner's list; the sizes of Code Llama 34B
        shape = replace(shape_named("llama-2-70b"), name="llama-2-34b", layers=48, ffn=22016)
    else:
        shape = shape_named(row.model.lower().removesuffix("-hf"))
    if not row.model.endswith("-hf"):
        shape = coded(shape, Training(engine="fsdp2"))
    name, network = CLUSTERS[row.gpu]
    modes: dict[str, tuple[Checkpointing, ...]] = {
        "none": ("none",), "full": ("full",), "selective": ("selective",), "layer": ("none", "full"),
    }  # fmt: skip
    works = tuple(_works(row, shape, mode) for mode in modes[row.checkpointing])
    schedule = _schedule(row, shape, works[0][0])
    return Step(
        row,
        shape,
        make_cluster(f"{row.node_size}x{name}", row.num_nodes, network=network, intra=WITHIN.get(row.gpu)),
        works,
        tuple((schedule, step_events(schedule, num)) for num in range(1, min(row.num_micro_batches, 2) + 1)),
    )


def _works(row: Row, shape: ModelShape, checkpointing: Checkpointing) -> tuple[Training, dict[str, Work]]:
    training = Training(
        seq=row.seq,
        micro_batch=row.micro_batch,
        reduce=row.reduce,
        lora=Lora(row.adapters, TARGETS) if row.adapters else None,
        checkpointing=checkpointing,
        compile=row.compile,
        loss="plain",
        engine="shardwise" if row.model.endswith("-hf") else "fsdp2",
    )
    works = works_of(shape, training)
    if checkpointing == "full" and (row.stack == "torch 1.13" or row.model.endswith("-hf")):
        # A recompute did not yet end with the last tensor that the backward needs. A reentrant one never does.
        again = {"recomputed": 1.0, "recomputed_attention": 1.0}
        whole = {id(work): replace(work, **again) if work.recomputed else work for work in works.values()}
        works = {name: whole[id(work)] for name, work in works.items()}
    return training, works


def _schedule(row: Row, shape: ModelShape, training: Training) -> Schedule:
    layout = layout_of(row.strategy.split()[0])
    axes = {"world": (row.num_nodes * row.node_size, 0), "node": (row.node_size, 0), "replicate": (row.num_nodes, 0)}
    units = [
        UnitPlan(
            unit.name, layout, flats_of(unit, layout, training.formats, axes, ()), unit.holds_units, unit.backward_reads
        )
        for unit in units_of(shape, training.lora)
    ]
    return make_schedule(units, range(len(units)), None)


def unit_seconds(step: Step, efficiency: Efficiency) -> dict[str, UnitSeconds]:
    schedule = step.plans[0][0]
    found = [
        seconds_of(schedule, works, speed_of(step.cluster.gpu, efficiency, training, step.shape.head_dim), training)
        for training, works in step.works
    ]
    return {name: found[index % len(found)][name] for index, name in enumerate(found[0])}


def predicted_s(step: Step, efficiency: Efficiency, wear: Overheads) -> float:
    """Seconds of a step."""
    seconds = unit_seconds(step, efficiency)
    played = [step_time(*plan, seconds, step.cluster, wear).step_s for plan in step.plans]
    more = step.row.num_micro_batches - len(played)
    return played[-1] + (more * (played[-1] - played[-2]) if more else 0.0)


@cache
def steps_and_left_out() -> tuple[tuple[Step, ...], tuple[tuple[str, str], ...]]:
    rows, left_out = read_rows()
    steps = tuple(step_of(row) for row in rows if "offload" not in row.strategy)
    on_host = [(row.id, "parameters on the host") for row in rows if "offload" in row.strategy]
    return steps, (*((name, why) for name, why in left_out), *on_host)
