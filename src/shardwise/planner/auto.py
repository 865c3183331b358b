"""`strategy="auto"`: the planner's search, with the memory that is free and the links as they are.

The memory of activations is found by running the model on the meta device, with the micro-batch that the caller gives.
Without a micro-batch, or if the model fails there, a quarter of the memory is left to activations, and only traffic and
updates are compared. Quantised collectives are used only on request, and a disk only if a folder on it is given.
"""

import logging
import os
import time
import timeit
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from torch import nn

from ..base.errors import MemoryExceededError, PlaceError
from ..base.processes import memory_limit
from ..core.layout import AUTO
from ..core.mesh import Axes, device, num_local_ranks
from ..core.schedule.model import UnitSpec
from ..core.schedule.units import Units
from ..core.wire.collectives import Channel, all_gather, exchange
from .assess import Assessor, Machine, Subject
from .hardware.cluster import Cluster
from .hardware.gpus import IDEAL, Efficiency, Gpu, Overheads, efficiency_of, gpu_named, gpu_of_device
from .hardware.links import Link
from .planning import Plan, plan_for
from .search import TIE, changed_presets, choices
from .subject import subject_of_module
from .training import Training
from .work.work import Work

# Fraction of the memory that is left to activations if their size is unknown.
UNKNOWN_SHARE = 0.25
# Size of the all-gather that measures the links.
PROBE_BYTES = {"cuda": 64 << 20, "cpu": 8 << 20}
NUM_PROBES = 5
# Latency of a collective on a device, if the host has queued it early enough.
LATENCY_US = 20.0
# On CPU ranks the same cores compute and send, and each collective costs Python and gloo a part of a millisecond. One
# core encoded at 3 % and decoded at 5 to 8 % of the rate at which it copies.
PROCESSOR_OVERHEADS = Overheads(lost=0.5, event_s=5e-4, coding=0.05)
# On a CPU, plans this close to the fastest count as equally fast: measured rates differ this much between starts.
PROCESSOR_TIE = 0.1
# The rates of a CPU are measured, so they are reached in full.
PROCESSOR = Efficiency(1.0, 1.0, 1.0, prologue=0.0, tail=0.0, ramp=0.0, narrow=1.0, gap_s=5e-6, source="measured")

# Assumed free bytes if a file system does not report them.
UNKNOWN_FREE_BYTES = 1 << 50

logger = logging.getLogger("shardwise")


@dataclass(frozen=True, slots=True)
class Workload:
    """A model whose work the caller knows better than a trial of it, such as one with compiled blocks."""

    subject: Subject
    training: Training
    clips: bool = True
    batches: Sequence[tuple[int, int]] = ()  # to choose from: micro-batch size and number; (): those of `training`


# Sequences per micro-batch, tokens per sequence; optionally micro-batches per step. Or the work itself.
Batch = tuple[int, int] | tuple[int, int, int] | Workload


@dataclass(frozen=True, slots=True)
class AutoRequest:
    """The arguments of `sw.shard` that the choice of a strategy depends on."""

    training: Training
    batch: Batch | None
    units: Units
    memory_budget: int | None
    keep_fp32: Sequence[str]
    moves: Sequence[str] = ()
    disk_path: Path | None = None


def choose(model: nn.Module, found: list[UnitSpec], asked: AutoRequest, machine: Machine) -> Plan:
    """Return a plan whose `recommended` is the fastest strategy that fits. Without a requested codec it is exact."""
    if asked.disk_path is None and any(layout.uses_disk for layout in changed_presets(asked.moves)):
        raise PlaceError(
            f"strategy '{AUTO}' with {', '.join(asked.moves)}: state goes to disk, and no folder is named for it:"
            " give disk_path=, a folder on a local disk"
        )
    if asked.disk_path is not None and not asked.disk_path.is_dir():
        raise PlaceError(
            f"{asked.disk_path} is not a folder, and state might be offloaded there: make it, or name one that is there"
        )
    name, subject, training, clips = type(model).__name__, None, asked.training, True
    try:
        if isinstance(asked.batch, Workload):
            subject, training, clips = asked.batch.subject, asked.batch.training, asked.batch.clips
        elif asked.batch is not None:
            subject = subject_of_module(model, training, asked.units)
    except Exception as error:  # noqa: BLE001  any model's own code runs here
        logger.warning(
            "strategy 'auto': the memory of this %s's activations is unknown (%s: %s); a quarter of the memory is left "
            "to them", name, type(error).__name__, str(error).partition("\n")[0],
        )  # fmt: skip
    if subject is None:
        works = {unit.name: Work(0, 0, 0, 0) for unit in found}
        subject = Subject(name, tuple(found), lambda training: works, 0.0, {"name": name})
        assert machine.free_bytes is not None
        machine = replace(machine, free_bytes=round(machine.free_bytes * (1 - UNKNOWN_SHARE)))
    batches = asked.batch.batches if isinstance(asked.batch, Workload) else ()
    batches = batches or [(training.micro_batch, training.num_micro_batches)]
    choice = choices(training, (training.checkpointing,), batches)
    tie = TIE if machine.has_reserve else PROCESSOR_TIE
    assess = Assessor(subject, machine, clips=clips, budget_bytes=asked.memory_budget, keep_fp32=asked.keep_fp32)
    has_disk, strategy = asked.disk_path is not None, "+".join((AUTO, *asked.moves))
    plan = plan_for(assess, training, choice, strategy=strategy, only_exact=True, has_disk=has_disk, tie=tie)
    if plan.recommended is None:
        needs = ", ".join(f"{entry.name} {entry.needed_bytes / 1e9:.1f}" for entry in plan.found)
        raise MemoryExceededError(
            f"strategy 'auto': nothing fits. Free per rank: {machine.memory_bytes / 1e9:.1f} GB"
            f"{'' if asked.batch else ' after a quarter for activations'}; needed in GB: {needs}. Use more ranks, a "
            f"smaller micro-batch or activation checkpointing, or a smaller model"
            f"{'' if has_disk else '; or offload state to disk: name a folder with disk_path='}"
        )
    return plan


def machine_here(world: Channel, axes: Axes, free_bytes: int, disk_path: Path | None = None) -> Machine:
    """Describe the devices of all ranks, with `free_bytes` each, and the measured links. For host and disk, the machine
    with the least free bytes counts. All ranks must call this function, and all get the same value."""
    gpu, efficiency = _device_here(free_bytes, world)
    num_nodes = axes.world_size // axes.node_size
    shares = exchange(world, shares_here(num_local_ranks(), disk_path))
    host_bytes, disk_bytes = (min(sizes) for sizes in zip(*shares, strict=True))
    inter = gpu.intra if num_nodes == 1 else Link(50.0, 15.0)
    links = {"intra": gpu.intra, "inter": inter, **_measured_links(world, axes)}
    cluster = Cluster(
        gpu=gpu,
        node_size=axes.node_size,
        num_nodes=num_nodes,
        intra=links["intra"],
        inter=links["inter"],
        pcie=gpu.pcie,
        host_bytes=axes.node_size * host_bytes,
        disk_bytes=axes.node_size * disk_bytes,
        disk_read_bytes_per_s=axes.node_size * gpu.host.disk_read_bytes_per_s,
        disk_write_bytes_per_s=axes.node_size * gpu.host.disk_write_bytes_per_s,
        host_adam_elems_per_s=axes.node_size * gpu.host.host_adam_elems_per_s,
    )
    is_gpu = device().type == "cuda"
    return Machine(cluster, efficiency, IDEAL if is_gpu else PROCESSOR_OVERHEADS, free_bytes, has_reserve=is_gpu)


def host_bytes_here() -> int:
    """Free memory of this machine, at most the memory limit of the container."""
    memory = psutil.virtual_memory()
    limit = memory_limit(memory.total)
    return min(memory.available, memory.total if limit is None else limit)


def shares_here(num_ranks: int, disk_path: Path | None) -> tuple[int, int]:
    """Free bytes of host and disk for each of the ranks of this machine."""
    return host_bytes_here() // num_ranks, free_bytes_on(disk_path) // num_ranks


def free_bytes_on(folder: Path | None) -> int:
    """Free bytes of the disk that holds `folder`; 0 if there is no such folder."""
    if folder is None or not folder.is_dir():
        return 0
    seen = os.statvfs(folder)
    return seen.f_bavail * seen.f_frsize if seen.f_blocks else UNKNOWN_FREE_BYTES


def _measured_links(world: Channel, axes: Axes) -> dict[str, Link]:
    """Measure links with all-gathers over all ranks: those inside the node if there is one node, else those between
    nodes. The difference between two sizes is used: it does not contain the fixed cost of a collective."""
    if world.num_ranks == 1:
        return {}
    (less, less_s), (more, more_s) = (_gathered(world, PROBE_BYTES[device().type] // part) for part in (8, 1))
    passed_s = more_s - less_s
    rate = (more - less) / passed_s if passed_s > more_s / 4 else more / more_s
    if axes.world_size == axes.node_size:
        return {"intra": Link(rate / 1e9, LATENCY_US)}
    return {"inter": Link(rate / axes.node_size / 1e9, LATENCY_US)}


def _gathered(world: Channel, num_bytes: int) -> tuple[float, float]:
    """Time all-gathers. Return the bytes that each rank of the ring receives, and the seconds on the slowest rank."""
    num_bytes -= num_bytes % world.num_ranks
    buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device())
    times = []
    for _ in range(1 + NUM_PROBES):  # the first one warms up
        begin_s = time.perf_counter()
        all_gather(world, buffer, "a first measurement").run()
        buffer[-1].item()  # waits for the device
        times.append(time.perf_counter() - begin_s)
    return num_bytes * (world.num_ranks - 1) / world.num_ranks, max(exchange(world, min(times[1:])))


def _device_here(free_bytes: int, world: Channel) -> tuple[Gpu, Efficiency]:
    where = device()
    if where.type == "cuda":
        name = torch.cuda.get_device_name(where)
        known = gpu_of_device(name)
        # An unknown GPU counts as an A100, which is the same for all strategies that are compared.
        gpu = gpu_named("A100-80GB") if known is None else known
        return replace(gpu, name=name if known is None else gpu.name, memory_bytes=free_bytes), efficiency_of(gpu.name)
    # Measure the FLOP/s of a product and the bytes/s of a copy, at the same time as the other ranks of this machine.
    a, b = torch.ones(512, 512), torch.ones(512, 512)
    long, into = torch.ones(4 << 20), torch.ones(4 << 20)
    product_s = min(timeit.repeat(lambda: torch.mm(a, b), number=1, repeat=5))
    copy_s = min(timeit.repeat(lambda: into.copy_(long), number=1, repeat=5))
    own = 2 * 512**3 / product_s, 2 * long.nbytes / copy_s
    flops, bytes_per_s = (min(rates) for rates in zip(*exchange(world, own), strict=True))
    rates = {"flops": flops, "fp32_flops": flops, "hbm_bytes_per_s": bytes_per_s}
    like = gpu_named("A100-80GB")
    return replace(like, name="CPU", memory_bytes=free_bytes, switch=None, context_bytes=0, **rates), PROCESSOR
