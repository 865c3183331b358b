"""Seconds of a unit's work on a GPU by itself: a roofline model, without waits for transfers or for the host.

Matrix products and attention run at a share of the GPU's peak, everything else at a share of its memory bandwidth. The
three run one after the other on one stream, so their times add up. A backward has two products for each product of the
forward (one if the weight is frozen) and twice its memory traffic. Attention's backward takes 2.5 times its forward,
because it recomputes the scores. Recomputation (activation checkpointing) is added to the backward.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace

from ...base.dtypes import FP32
from ...core.schedule.step_schedule import Schedule, UnitPlan
from ..hardware.gpus import Efficiency, Gpu
from ..training import Training
from ..work.work import Work

ATTENTION_BACKWARD = 2.5  # time, relative to the forward
MOVED_BACKWARD = 2.0  # memory traffic, relative to the forward
# Memory traffic of a loss's backward, relative to its forward. A chunked loss does everything in its forward.
LOSS_MOVED_BACKWARD = {"plain": 1.0, "chunked": 0.0, "fused": 0.0}
# Host time to queue a kernel of a checkpointed block, relative to others: it has saved-tensor hooks and dispatch modes.
HOST_OF_CHECKPOINTING = {"none": 1.0, "full": 1.5, "selective": 2.6}
# Each chunk of a loss adds to the weight's gradient. Bytes read and written per element: in fp32, or in 16 bits.
LOSS_GRAD_BYTES = {"chunked": 8, "fused": 4, "plain": 0}
# Memory traffic of norm and clipping, relative to a gradient in fp32. The norm reads 4 bytes, writes 8 (a copy in fp64)
# and reads 8: 5 passes. Clipping reads and writes the gradient: 2 more. Offloaded gradients are clipped by the host.
NORM_PASSES = 7
NORM_PASSES_OF_OFFLOADED = 5


@dataclass(frozen=True, slots=True)
class UnitSeconds:
    """Seconds of a unit: forward and backward of one micro-batch, its part of the gradients' norm, its update, and the
    cast before its gather. `norm_of_offloaded`: the norm of gradients that go to the host, computed in the backward.
    `*_kernels`: numbers of kernels that the host queues, in units of an ordinary one's host time."""

    forward: float = 0.0
    backward: float = 0.0
    norm: float = 0.0
    norm_of_offloaded: float = 0.0
    update: float = 0.0
    cast: float = 0.0
    forward_kernels: float = 0.0
    backward_kernels: float = 0.0


@dataclass(frozen=True, slots=True)
class Speed:
    """Rates that a GPU reaches: FLOP/s of products and attention, bytes per second of memory."""

    products: float
    attention: float
    memory: float
    efficiency: Efficiency


def speed_of(gpu: Gpu, efficiency: Efficiency, training: Training, head_dim: int = 128) -> Speed:
    """Compute the rates of a GPU. Attention is never faster than products: in fp32 it has no fast kernel."""
    products = (gpu.fp32_flops if training.formats.products == FP32 else gpu.flops) * efficiency.products
    share = efficiency.attention * training.seq / (training.seq + efficiency.ramp)
    attention = gpu.flops * share * (1.0 if head_dim > 64 else efficiency.narrow)
    return Speed(products, min(products, attention), gpu.hbm_bytes_per_s * efficiency.memory, efficiency)


def seconds_of(
    schedule: Schedule, works: Mapping[str, Work], speed: Speed, training: Training
) -> dict[str, UnitSeconds]:
    """Seconds by unit name. Work outside of units (a loss after a tied head) is added to the last unit."""
    different = {id(work): work for work in works.values()}
    known = {key: work_seconds(work, speed, training) for key, work in different.items()}
    found = {
        unit.name: _with_update(known[id(works[unit.name])], unit, speed, training.num_moments)
        for unit in schedule.units
    }
    last = schedule.units[schedule.order[-1]].name
    for name in [name for name in works if name not in found]:
        pairs = zip(astuple(found[last]), astuple(known[id(works[name])]), strict=True)
        found[last] = UnitSeconds(*(one + other for one, other in pairs))
    return found


def _with_update(each: UnitSeconds, unit: UnitPlan, speed: Speed, num_moments: float) -> UnitSeconds:
    """Add a unit's norm and update, and the cast before its gather."""
    trained = [flat for flat in unit.flats if flat.trainable]
    here = [flat for flat in trained if not flat.host_updates]
    offloaded = [flat for flat in trained if flat.host_updates]
    grad_bytes, offloaded_bytes = (
        sum(flat.num_master * flat.reduce.itemsize for flat in flats) for flats in (here, offloaded)
    )
    # Gradients are read, masters and moments are read and written.
    update_bytes = sum(
        flat.num_master * (flat.reduce.itemsize + 2 * flat.master.itemsize * (1 + num_moments)) for flat in here
    )
    cast = [flat for flat in unit.flats if flat.master_on == "device" and not flat.master_is_whole]
    cast_bytes = sum(flat.num_master * (flat.master.itemsize + flat.compute.itemsize) for flat in cast)
    return replace(
        each,
        norm=NORM_PASSES * grad_bytes / speed.memory,
        norm_of_offloaded=NORM_PASSES_OF_OFFLOADED * offloaded_bytes / speed.memory,
        update=update_bytes / speed.memory,
        cast=cast_bytes / speed.memory,
    )


def work_seconds(work: Work, speed: Speed, training: Training) -> UnitSeconds:
    forward, num_kernels = forward_s(work, speed), float(work.num_kernels)
    if work.kind == "loss":
        grad_bytes = sum(p.count * p.n * p.k for p in work.products if p.trainable) * LOSS_GRAD_BYTES[training.loss]
        forward += grad_bytes / speed.memory
        times = LOSS_MOVED_BACKWARD[training.loss]
        return UnitSeconds(
            forward, backward_s(work, speed, times), forward_kernels=num_kernels, backward_kernels=times * num_kernels
        )
    num_kernels *= 1.0 if training.compile else HOST_OF_CHECKPOINTING[training.checkpointing]
    # All elementwise operations are recomputed, even if the results of products are saved.
    moved = (work.moved_bytes / speed.memory + work.num_kernels * speed.efficiency.gap_s) if work.recomputed else 0.0
    return UnitSeconds(
        forward,
        backward_s(work, speed) + work.recomputed * (forward - moved) + moved,
        forward_kernels=num_kernels,
        backward_kernels=(2 + work.recomputed) * num_kernels,
    )


def forward_s(work: Work, speed: Speed) -> float:
    flop = sum(product.count * _cost(product.m, product.n, product.k, speed.efficiency) for product in work.products)
    return (
        flop / speed.products
        + work.attention_flops / speed.attention
        + work.moved_bytes / speed.memory
        + work.num_kernels * speed.efficiency.gap_s
    )


def backward_s(work: Work, speed: Speed, moved: float = MOVED_BACKWARD) -> float:
    """Seconds of a backward without recomputation. `moved`: its reads and writes, as a multiple of the forward's."""
    flop = 0.0
    for product in work.products:
        by_input = _cost(product.m, product.k, product.n, speed.efficiency)
        by_weight = _cost(product.n, product.k, product.m, speed.efficiency) if product.trainable else 0.0
        flop += product.count * (by_input + by_weight)
    return (
        flop / speed.products
        + ATTENTION_BACKWARD * work.attention_flops / speed.attention
        + moved * (work.moved_bytes / speed.memory + work.num_kernels * speed.efficiency.gap_s)
    )


def _cost(m: int, n: int, k: int, efficiency: Efficiency) -> float:
    """FLOP of a product, and the time that its pipelines and its last wave waste, as FLOP (see `Efficiency`)."""
    return 2.0 * (k + efficiency.prologue) * (m * n + efficiency.tail)
