"""Memory of a rank: what the plan says of us, beside what the library that the file was written for would need.

DeepSpeed's figures are its own: `estimate_zero2_model_states_mem_needs` counts 2 bytes of a 16-bit parameter, 2 of its
gradient, and 16 of the optimizer (an fp32 gradient, the master, two moments); its sister of stage 3 counts one of the
two gradients. It has none of stages 0 and 1, which are counted as stage 2. FSDP and DDP hold fp32 parameters and
gradients beside the moments, and 16-bit copies while they compute; DDP has its gradients a second time, in buckets.
Peaks are the planner's, which knows us and torch's FSDP.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..base.dtypes import FP32
from ..base.errors import ConfigurationError
from ..core.layout import FSDP2_HAS, Layout, Split, layout_of
from ..core.precision import Precision
from ..core.schedule.flat import flats_of
from ..core.schedule.model import ROOT, FoundUnit, Param, Site
from ..core.schedule.offload import off_device
from ..core.schedule.state_bytes import state_bytes
from ..planner.hardware.cluster import Cluster, make_cluster
from ..planner.planning import Plan, plan
from ..planner.training import Lora, Training
from ..trainer.settings import num_nodes
from .migrated import TITLES, Migrated

# What is counted where no model is named.
NUM_PARAMS = 10**9
NUM_PIECES = 100
A_GPU = "H100-80GB"
NUM_RANKS = 8

# Bytes of a parameter that is trained: itself, its gradient, and what the optimizer has beside its moments. Torch's
# count in the format that is trained in.
TORCH = {"fsdp": (1, 1, 0), "ddp": (1, 2, 0)}
DEEPSPEED, DEEPSPEED_3, DEEPSPEED_FP32 = (2, 2, 8), (2, 0, 8), (4, 4, 0)
# Of a layer's parameters while they are gathered, and their gradients.
GATHERED = 4
SOURCES = {
    "deepspeed": "states as DeepSpeed estimates them for 16 bits in stages 2 and 3, and others alike; its buckets; of "
    "the host what rests there, where its estimate takes 1.5 times that and more",
    "fsdp": "shards in {master}, and what is gathered",
    "ddp": "states in {master}, and gradients in buckets",
}


@dataclass(frozen=True, slots=True)
class Need:
    """Of a rank's device, and of the host and the disk of its node. No peak: nobody can say."""

    who: str
    states: float
    extra: float  # buffers and what is gathered, where it is known
    host: float
    disk: float
    peak: float | None
    source: str


@dataclass(frozen=True, slots=True)
class Beside:
    model: str
    cluster: str
    needs: tuple[Need, Need]


def beside(migrated: Migrated, model: str | None, gpus: str | None, nodes: int | None) -> Beside:
    """Both needs; of a billion parameters where no model is named."""
    cluster = _cluster(migrated, gpus, nodes)
    settings = migrated.settings
    training = Training(
        precision=migrated.precision,
        reduce=settings.get("reduce_dtype"),
        micro_batch=settings.get("per_device_train_batch_size") or 1,
        num_micro_batches=settings.get("gradient_accumulation_steps") or 1,
        checkpointing=settings.get("gradient_checkpointing", "none"),
        optimizer=settings.get("optimizer", "adamw"),
        moments=0.0 if settings.get("optimizer") == "sgd" and settings.get("momentum") == 0 else None,
        lora=_lora(settings.get("lora")),
        **({"seq": settings["seq_length"]} if settings.get("seq_length") else {}),
    )
    units, name, peaks = _units(model, training, cluster, migrated)
    layout = layout_of(migrated.strategy)
    flats = [flats_of(unit, layout, training.formats, cluster.axes, ()) for unit in units]
    away = off_device(flats, training.num_moments)
    ours = Need(
        f"shardwise, {migrated.strategy}",
        state_bytes((flat for unit in flats for flat in unit), training.num_moments).total,
        0,
        away.host * cluster.node_size,
        away.disk * cluster.node_size,
        peaks[0],
        "states to the byte" if model else "states; --model M --gpus G plans the peak",
    )
    params = [param for unit in units for param in unit.params]
    counts = {is_trained: sum(p.num_elems for p in params if p.trainable == is_trained) for is_trained in (True, False)}
    sizes = [sum(param.num_elems for param in unit.params) for unit in units]
    largest = max(sizes) if model else 0
    theirs = _original(migrated, layout, cluster, training, counts, largest)
    return Beside(name, str(cluster), (ours, replace(theirs, peak=peaks[1])))


def _original(
    migrated: Migrated, layout: Layout, cluster: Cluster, training: Training, counts: Mapping[bool, int], largest: int
) -> Need:
    """`counts`: of parameters that are trained, and of others, which are there in the format that is computed in."""
    engine = migrated.original.engine
    half = training.formats.compute.itemsize
    share: dict[Split, int] = {"whole": 1, "node": cluster.node_size, "world": cluster.world_size}
    params, grads, optimizer = _bytes(engine, training.formats, layout)
    moment = FP32.itemsize if engine == "deepspeed" else training.formats.master.itemsize
    device, away = 0.0, {"host": 0.0, "disk": 0.0}
    for num_bytes, place, kept in (
        ((params * counts[True] + half * counts[False]) / share[layout.params], layout.params_on, 0.0),
        (grads * counts[True] / share[layout.grads], layout.grads_on, 0.0),
        (
            (optimizer + moment * training.num_moments) * counts[True] / share[layout.optimizer],
            layout.optimizer_on,
            layout.kept,
        ),
    ):
        device += num_bytes if place == "device" else kept * num_bytes
        if place != "device":
            away[place] += (1 - kept) * num_bytes * cluster.node_size
    source = SOURCES[engine].format(master=training.formats.master.name)
    extra = half * migrated.original.bucket_elems
    if layout.gathered_until == "forward":
        extra += GATHERED * largest
    elif layout.gathered_until == "backward":
        extra += half * sum(counts.values())
    return Need(TITLES[migrated.kind], device, extra, away["host"], away["disk"], None, source)


def _lora(asked: Mapping[str, Any] | None) -> Lora | None:
    return None if asked is None else Lora(asked.get("r", 16), tuple(asked.get("targets", ())))


def _bytes(engine: str, formats: Precision, layout: Layout) -> tuple[int, int, int]:
    if engine != "deepspeed":
        params, grads, optimizer = TORCH[engine]
        size = formats.master.itemsize
        return params * size, grads * size, optimizer * size
    if formats.compute == FP32:
        return DEEPSPEED_FP32
    return DEEPSPEED if layout.params == "whole" else DEEPSPEED_3


def _cluster(migrated: Migrated, gpus: str | None, nodes: int | None) -> Cluster:
    """What was said here, else in the file, else eight ranks, or two groups. Such groups are nodes of the plan."""
    settings = migrated.settings
    if gpus is None:
        group = settings.get("node_size") or 1
        per_node = settings.get("nproc_per_node") or (NUM_RANKS if NUM_RANKS % group == 0 else 2 * group)
        said = num_nodes(str(settings.get("nnodes", 1)))[1]
        gpus, nodes = f"{per_node}x{A_GPU}", said if nodes is None else nodes
    cluster = make_cluster(gpus, 1 if nodes is None else nodes)
    group = settings.get("node_size")
    if group in (None, cluster.node_size):
        return cluster
    num_groups, rest = divmod(cluster.world_size, group)
    if rest:
        raise ConfigurationError(
            f"groups of {group} ranks do not divide {cluster.world_size} GPUs ({cluster}); give --gpus and --nodes"
        )
    return make_cluster(f"{group}x{cluster.gpu.name}", num_groups)


def _units(
    model: str | None, training: Training, cluster: Cluster, migrated: Migrated
) -> tuple[Sequence[FoundUnit], str, tuple[float | None, float | None]]:
    """What is to be held, its name, and the peaks of both where the planner knows them."""
    if model is None:
        # Many, so that a part of the optimizer can stay on the device, which is whole parameters.
        size, dtype = (1, NUM_PARAMS // NUM_PIECES), training.formats.master
        names = map(str, range(NUM_PIECES))
        params = tuple(Param(name, size, dtype, True, (Site("", name),)) for name in names)
        return [FoundUnit(ROOT, "", params, False, True)], "a billion parameters", (None, None)
    knows_theirs = migrated.original.engine == "fsdp" and migrated.strategy in FSDP2_HAS
    trainings = [training, replace(training, engine="fsdp2")] if knows_theirs else [training]
    made = [plan(model, cluster, asked, strategy=migrated.strategy) for asked in trainings]
    plans = [found for found in made if isinstance(found, Plan)]
    if not plans:
        raise ConfigurationError(f"--model: {model!r} has no shape to plan with")
    peaks = [float(found.found[0].needed_bytes) for found in plans]
    subject = plans[0].subject
    return subject.units, subject.name, (peaks[0], peaks[1] if knows_theirs else None)
