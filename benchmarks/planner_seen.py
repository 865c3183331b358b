"""What was measured of a case, kept small, and the same case as the planner sees it.

Every case is planned as `shardwise plan --strategy` would plan it, on the links of the emulated fabric: no contention,
no memory of the collectives' own, and the host of the machine that measured (`EMULATED`). What a case trains
in part (`trained`) is planned from its module, whose blocks are probed on the meta device.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from benchmarks.planner_cases import Case, case_from
from shardwise.core.wire.ledger import Row as Calls
from shardwise.planner.assess import Assessment, Assessor, Machine, Subject
from shardwise.planner.hardware.cluster import make_cluster
from shardwise.planner.hardware.gpus import IDEAL, Overheads, efficiency_of
from shardwise.planner.hardware.links import parse
from shardwise.planner.search import assess_named, choices
from shardwise.planner.shapes.shape import ModelShape
from shardwise.planner.subject import subject_of
from shardwise.planner.training import Lora, Training

GPU = "H200-141GB"
NORM = "clip"
# Our H200 under the emulated fabric, which does not slow the computation. Its host is a virtual machine that queues
# work slowly. Medians over the steps that the host limits; these times differ by a quarter from run to run.
EMULATED = Overheads(launch_s=38e-6, event_s=180e-6)
# A step is bound by its host if queueing it took this part of it, or it is planned to take this much longer for that.
HOST_BOUND = 0.9
HOST_ADDS = 1.02

Document = dict[str, Any]


# ---------------------------------------------------------------------------------------------------------
# what was measured


@dataclass(frozen=True, slots=True)
class Seen:
    """`phases` are peaks of what was allocated within each phase; `host_s` is what queueing a step takes.

    A step that was measured before recomputes stopped at a block's last product is not compared (0 s).

    `modules` are a step's instants: a module, what it does there, what is allocated, and the peak since the last one.
    """

    status: str
    active: int = 0
    reserved: int = 0
    context: int = 0
    total: int = 0
    step_s: float = 0.0
    host_s: float = 0.0
    phases: dict[str, int] | None = None
    modules: tuple[tuple[str, str, int, int], ...] = ()
    traffic: tuple[Calls, ...] = ()


def seen_in(row: Document, with_modules: bool = False) -> Seen:
    """Of a row as `planner_measure` writes it.

    The norm of the gradients made a copy of the largest flat in fp64 when the first rows were measured, and has not
    since: where that was the peak, the peak of the other phases counts, and what was reserved is not compared (0).
    """
    if row["status"] != "ok":
        return Seen(row["status"])
    phases: dict[str, int] = {}
    for phase in row["phases"]:
        phases[phase["phase"]] = max(phases.get(phase["phase"], 0), phase["allocated_peak"])
    active = max(size for name, size in phases.items() if name != NORM)
    steps = (row["peak"], row["first_step"], row["second_step"])
    reserved = max(step["reserved_peak"] for step in steps) if phases[NORM] <= active else 0
    modules = row.get("modules", []) if with_modules else []
    return Seen(
        "ok", active, reserved, row["context"]["outside"], row["context"]["total"], row["step_s"], row["host_s"],
        phases,
        tuple((entry["module"], entry["when"], entry["allocated"], entry["allocated_peak"]) for entry in modules),
        tuple(Calls(**calls) for calls in row["traffic"]),
    )  # fmt: skip


# Of these the instants are kept: eager, checkpointed, another's code, kept gathered, whole gradients.
WITH_MODULES = {
    "1b/zero3/1x4096/1x8@400@50",
    "1b/zero3/1x4096/1x8@400@50/full",
    "1b/zero3/1x2048/1x8@400@50/plain/hf",
    "8b/shard_grad_op/1x4096/1x8@400@50/full",
    "125m/ddp/1x2048/1x8@400@50",
}


def compact(document: Document) -> Document:
    """What is compared, and nothing else."""
    cases = [(case_from(row), seen_in(row, row["name"] in WITH_MODULES)) for row in document["cases"]]
    return {
        "schema": 2,
        **{key: document[key] for key in ("command", "date", "machine")},
        "cases": [{"case": _differences(case), "seen": _as_json(seen)} for case, seen in cases],
    }


def _differences(case: Case) -> Document:
    usual = asdict(Case(model=case.model))
    return {"model": case.model, **{key: value for key, value in asdict(case).items() if value != usual[key]}}


def _as_json(seen: Seen) -> Document:
    values = {key: value for key, value in asdict(seen).items() if value}
    if seen.traffic:
        values["traffic"] = [[getattr(calls, field.name) for field in fields(Calls)] for calls in seen.traffic]
    return {key: round(value, 6) if isinstance(value, float) else value for key, value in values.items()}


def read(document: Document) -> Iterator[tuple[Case, Seen]]:
    for entry in document["cases"]:
        case = entry["case"] | {"lora_targets": tuple(entry["case"].get("lora_targets", ()))}
        traffic = tuple(Calls(*values) for values in entry["seen"].get("traffic", ()))
        modules = tuple((*values,) for values in entry["seen"].get("modules", ()))
        yield Case(**case), Seen(**{**entry["seen"], "traffic": traffic, "modules": modules})


# ---------------------------------------------------------------------------------------------------------
# what is planned


def training_of(case: Case) -> Training:
    return Training(
        seq=case.seq,
        micro_batch=case.micro_batch,
        num_micro_batches=case.num_micro_batches,
        precision=case.precision,
        reduce=case.reduce,
        checkpointing=case.checkpointing,  # type: ignore[arg-type]
        compile=case.compile,
        loss=case.loss,  # type: ignore[arg-type]
        lora=Lora(16, case.lora_targets) if case.lora_targets else None,
    )


def shape_of_case(case: Case) -> ModelShape:
    shape = case.shape
    return ModelShape(
        name=case.model, layers=shape.layers, hidden=shape.hidden, heads=shape.heads, kv_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads, ffn=shape.ffn, vocab=shape.vocab, tied=shape.tied,
        code="hf" if case.code == "hf" else "in-tree",
    )  # fmt: skip


def machine_for(case: Case, free_bytes: int | None = None) -> Machine:
    """Links as the fabric has them. One process plays all ranks: what collectives take for themselves is not there."""
    fabric = parse(case.fabric)
    cluster = replace(
        make_cluster(f"{fabric.node_size}x{GPU}", fabric.num_nodes),
        intra=fabric.intra,
        inter=fabric.inter,
        switch=None,
    )
    return Machine(cluster, efficiency_of(GPU), EMULATED, free_bytes)


def planned(case: Case, free_bytes: int | None = None) -> Assessment:
    subject, training = _subject(case)
    choice = choices(training, (training.checkpointing,), [(training.micro_batch, training.num_micro_batches)])
    return assess_named(Assessor(subject, machine_for(case, free_bytes)), case.strategy, choice)


def _subject(case: Case) -> tuple[Subject, Training]:
    training = training_of(case)
    if not case.trained:
        return subject_of(shape_of_case(case), training), training
    import torch

    from benchmarks.planner_measure import build
    from shardwise.planner.subject import subject_of_module

    # The module has its checkpointing itself.
    training = replace(training, checkpointing="none")
    return subject_of_module(build(case, torch.device("meta")), training), training


# ---------------------------------------------------------------------------------------------------------
# both


@dataclass(frozen=True, slots=True)
class Compared:
    case: Case
    seen: Seen
    found: Assessment

    @property
    def active_error(self) -> float:
        return self.found.memory.peak.total / self.seen.active - 1

    @property
    def forward_error(self) -> float:
        """Of the forward alone: since these runs a backward needs less memory."""
        planned = max(each.total for each in self.found.memory.instants if each.name.startswith("forward"))
        return planned / (self.seen.phases or {})["forward"] - 1

    @property
    def reserved_error(self) -> float:
        return self.found.reserved.expected / self.seen.reserved - 1

    @property
    def is_covered(self) -> bool:
        return self.found.reserved.low <= self.seen.reserved <= self.found.reserved.high

    @property
    def step_error(self) -> float:
        """With four more passes over the gradients: in these runs, their norm was computed from a copy in fp64."""
        gpu, flats = self.found.machine.cluster.gpu, self.found.schedule.trainable_flats
        num_bytes = sum(flat.num_master * flat.reduce.itemsize for flat in flats if not flat.host_updates)
        copy_s = 4 * num_bytes / (gpu.hbm_bytes_per_s * self.found.machine.efficiency.memory)
        return (self.found.timing.step_s + copy_s) / self.seen.step_s - 1 if self.has_step else 0.0

    @property
    def has_step(self) -> bool:
        return self.seen.step_s > 0

    @property
    def is_host_bound(self) -> bool:
        without = replace(self.found, machine=replace(self.found.machine, overheads=IDEAL)).timing.step_s
        is_seen = self.seen.host_s > HOST_BOUND * self.seen.step_s
        return is_seen or self.found.timing.step_s > HOST_ADDS * without

    @property
    def traffic_is_equal(self) -> bool:
        """But for the ranks' agreement (int32), which has one number more since these runs."""
        planned, seen = self.found.moved.by_call.rows, self.seen.traffic
        return [row for row in planned if row.dtype != "int32"] == [row for row in seen if row.dtype != "int32"]

    @property
    def verdict_is_right(self) -> bool:
        return self.found.fits == (self.seen.status == "ok")


def compare(document: Document) -> list[Compared]:
    rows = list(read(document))
    # What there was to be had is the same in every case: the device's memory less its context.
    free_bytes = min(seen.total - seen.context for _, seen in rows if seen.total)
    return [Compared(case, seen, planned(case, free_bytes)) for case, seen in rows]
