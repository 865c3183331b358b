"""Memory of a rank: ours, compared with that of the library for which the file was written.

DeepSpeed's figures are its own: `estimate_zero2_model_states_mem_needs` counts 2 bytes of a 16-bit parameter, 2 of its
gradient, and 16 of the optimizer (an fp32 gradient, the master, two moments). Its function for stage 3 counts only one
of the two gradients. It has none for stages 0 and 1, which are counted as stage 2 here. FSDP and DDP hold fp32
parameters and gradients in addition to the moments, and 16-bit copies while they compute; DDP holds its gradients a
second time, in buckets. Peaks come from the planner, which can plan for our engine and for torch's FSDP.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..base.dtypes import FP32
from ..base.errors import ConfigurationError
from ..core.layout import ENGINE_HAS, Split, layout_of
from ..core.schedule.flat import flats_of
from ..core.schedule.model import ROOT, Param, Site, UnitSpec
from ..core.schedule.state_bytes import off_device, state_bytes
from ..planner.hardware.cluster import Cluster, make_cluster
from ..planner.planning import Plan, plan
from ..planner.training import Lora, Training
from ..trainer.settings import num_nodes
from .migrated import TITLES, Migrated

# Without a model: a billion parameters in a hundred tensors.
NUM_PARAMS = 10**9
NUM_TENSORS = 100
DEFAULT_GPU = "H100-80GB"
NUM_RANKS = 8

# Bytes per parameter of a gathered layer, with its gradient.
GATHERED_BYTES = 4
SOURCES = {
    "deepspeed": "states as DeepSpeed estimates them for 16 bits in stages 2 and 3, and other stages alike; its "
    "buckets; host memory of the offloaded state alone, of which its estimate is 1.5 times or more",
    "fsdp": "shards in {master}, and gathered parameters",
    "ddp": "states in {master}, and gradients in buckets",
}


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes needed on a rank's device, and on the host and the disk of its node. `peak`: None if it is not planned."""

    who: str
    states: float
    extra: float  # buffers and gathered parameters, where they are known
    host: float
    disk: float
    peak: float | None
    source: str


@dataclass(frozen=True, slots=True)
class MemoryComparison:
    """Memory that a run needs: with our engine (the first of `needs`), and with the other library."""

    model: str
    cluster: str
    needs: tuple[Need, Need]


def compare_memory(migrated: Migrated, model: str | None, gpus: str | None, nodes: int | None) -> MemoryComparison:
    """Compute both needs, for a billion parameters if no model is named."""
    cluster = _cluster(migrated, gpus, nodes)
    settings = migrated.settings
    lora = settings.get("lora")
    training = Training(
        precision=migrated.precision,
        reduce=settings.get("reduce_dtype"),
        micro_batch=settings.get("per_device_train_batch_size") or 1,
        num_micro_batches=settings.get("gradient_accumulation_steps") or 1,
        checkpointing=settings.get("gradient_checkpointing", "none"),
        optimizer=settings.get("optimizer", "adamw"),
        moments=0.0 if settings.get("optimizer") == "sgd" and settings.get("momentum") == 0 else None,
        lora=None if lora is None else Lora(lora.get("r", 16), tuple(lora.get("targets", ()))),
        **({"seq": settings["seq_length"]} if settings.get("seq_length") else {}),
    )
    units, name, peaks = _units(model, training, cluster, migrated)
    layout = layout_of(migrated.strategy)
    flats = [flats_of(unit, layout, training.formats, cluster.axes, ()) for unit in units]
    offloaded = off_device(flats, training.num_moments)
    ours = Need(
        f"shardwise, {migrated.strategy}",
        state_bytes((flat for unit in flats for flat in unit), training.num_moments).total,
        0,
        offloaded.host * cluster.node_size,
        offloaded.disk * cluster.node_size,
        peaks[0],
        "states to the byte" if model else "states; --model M --gpus G plans the peak",
    )
    theirs = _original(migrated, cluster, training, units, peaks[1])
    return MemoryComparison(name, str(cluster), (ours, theirs))


def _original(
    migrated: Migrated, cluster: Cluster, training: Training, units: Sequence[UnitSpec], peak: float | None
) -> Need:
    """Compute the need of the other library. It holds frozen parameters in the compute dtype."""
    engine, layout, formats = migrated.original.engine, layout_of(migrated.strategy), training.formats
    params = [param for unit in units for param in unit.params]
    trained = sum(param.num_elems for param in params if param.trainable)
    frozen = sum(param.num_elems for param in params) - trained
    half, master = formats.compute.itemsize, formats.master.itemsize
    # Bytes of a trained parameter, of its gradient, and of the optimizer's state without moments.
    sizes = (master, master * (2 if engine == "ddp" else 1), 0)
    if engine == "deepspeed":
        sizes = (4, 4, 0) if formats.compute == FP32 else (2, 2, 8) if layout.params == "whole" else (2, 0, 8)
    moments = training.moment_bytes(FP32.itemsize if engine == "deepspeed" else master)
    share: dict[Split, int] = {"whole": 1, "node": cluster.node_size, "world": cluster.world_size}
    on = {"device": 0.0, "host": 0.0, "disk": 0.0}
    for num_bytes, split, place, kept in (
        (sizes[0] * trained + half * frozen, layout.params, layout.params_on, 0.0),
        (sizes[1] * trained, layout.grads, layout.grads_on, 0.0),
        ((sizes[2] + moments) * trained, layout.optimizer, layout.optimizer_on, layout.kept),
    ):
        kept = 1.0 if place == "device" else kept
        on["device"] += kept * (num_bytes / share[split])
        on[place] += (1 - kept) * (num_bytes / share[split]) * cluster.node_size
    extra = half * migrated.original.bucket_elems
    if layout.gathered_until == "forward" and len(units) > 1:
        extra += GATHERED_BYTES * max(sum(param.num_elems for param in unit.params) for unit in units)
    elif layout.gathered_until == "backward":
        extra += half * (trained + frozen)
    source = SOURCES[engine].format(master=formats.master.name)
    return Need(TITLES[migrated.kind], on["device"], extra, on["host"], on["disk"], peak, source)


def _cluster(migrated: Migrated, gpus: str | None, nodes: int | None) -> Cluster:
    """Return the given GPUs, else the file's, else 8, or two groups if 8 is no multiple of one. A group is a node."""
    settings = migrated.settings
    if gpus is None:
        group = settings.get("node_size") or 1
        per_node = settings.get("nproc_per_node") or (NUM_RANKS if NUM_RANKS % group == 0 else 2 * group)
        in_file = num_nodes(str(settings.get("nnodes", 1)))[1]
        gpus, nodes = f"{per_node}x{DEFAULT_GPU}", in_file if nodes is None else nodes
    cluster = make_cluster(gpus, nodes)
    group = settings.get("node_size")
    if group in (None, cluster.node_size):
        return cluster
    num_groups, rest = divmod(cluster.world_size, group)
    if rest:
        why = f"groups of {group} ranks do not divide {cluster.world_size} GPUs ({cluster})"
        raise ConfigurationError(f"{why}; give --gpus and --nodes")
    return make_cluster(f"{group}x{cluster.gpu.name}", num_groups)


def _units(
    model: str | None, training: Training, cluster: Cluster, migrated: Migrated
) -> tuple[Sequence[UnitSpec], str, tuple[float | None, float | None]]:
    """Return the units, the model's name, and both peaks; None for a peak that the planner does not know."""
    if model is None:
        # Many tensors, because a fraction of the optimizer is offloaded by choosing whole tensors.
        size, dtype = (1, NUM_PARAMS // NUM_TENSORS), training.formats.master
        names = map(str, range(NUM_TENSORS))
        params = tuple(Param(name, size, dtype, True, (Site("", name),)) for name in names)
        return [UnitSpec(ROOT, "", params, False, True)], "a billion parameters", (None, None)
    knows_theirs = migrated.original.engine == "fsdp" and migrated.strategy in ENGINE_HAS["fsdp2"]
    trainings = [training, replace(training, engine="fsdp2")] if knows_theirs else [training]
    made = [plan(model, cluster, asked, strategy=migrated.strategy) for asked in trainings]
    plans = [found for found in made if isinstance(found, Plan)]
    if not plans:
        raise ConfigurationError(f"--model: {model!r} has no shape to plan with")
    peaks = [float(found.found[0].needed_bytes) for found in plans]
    subject = plans[0].subject
    return subject.units, subject.name, (peaks[0], peaks[1] if knows_theirs else None)
