"""Seconds of a unit's work on a GPU by itself: a roofline model, without waits for transfers or for the host.

Matrix products and attention run at a share of the GPU's peak, everything else at a share of its memory bandwidth. The
three run one after the other on one stream, so their times add up. A backward has two products for each product of the
forward (one if the weight is frozen) and twice its kernels; its memory traffic is counted. Attention's backward has 2.5
times the FLOP of its forward, because it recomputes the scores. Recomputation (activation checkpointing) is added to
the backward. Gradients that autograd allocated are copied on another stream, next to the computation.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from ...base.dtypes import FP32
from ...core.schedule.step_schedule import Schedule, UnitPlan
from ..hardware.gpus import Efficiency, Gpu
from ..training import Training
from ..work.work import Work

ATTENTION_BACKWARD = 2.5  # FLOP, relative to the forward
KERNELS_BACKWARD = 2.0  # number of kernels, relative to the forward
# The same for a loss. A chunked loss does almost everything in its forward.
LOSS_KERNELS_BACKWARD = {"plain": 1.0, "compiled": 1.0, "chunked": 0.0, "fused": 0.0}
# Host time to queue a kernel of a checkpointed block, relative to others: it has saved-tensor hooks and dispatch modes.
HOST_OF_CHECKPOINTING = {"none": 1.0, "full": 1.5, "selective": 2.6}
# Each chunk of a loss adds to the weight's gradient. Bytes read and written per element: in fp32, or in 16 bits.
LOSS_GRAD_BYTES = {"chunked": 8, "fused": 4, "plain": 0, "compiled": 0}
# Memory traffic of norm and clipping, relative to a gradient: the norm reads it, and clipping reads and writes it.
# Offloaded gradients are clipped by the host.
NORM_PASSES = 3
NORM_PASSES_OF_OFFLOADED = 1


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
    """Rates that a GPU reaches: FLOP/s of products and attention, bytes/s of memory; and the itemsize of products."""

    products: float
    attention: float
    memory: float
    efficiency: Efficiency
    itemsize: int = 2


def speed_of(gpu: Gpu, efficiency: Efficiency, training: Training, head_dim: int = 128) -> Speed:
    """Compute the rates of a GPU. In fp32 attention has no fast kernel, so it is never faster than products."""
    is_fp32 = training.formats.products == FP32
    products = (gpu.fp32_flops if is_fp32 else gpu.flops) * efficiency.products
    share = efficiency.attention * training.seq / (training.seq + efficiency.ramp)
    size = efficiency.narrow if head_dim <= 64 else efficiency.wide if head_dim > 128 else 1.0
    attention = gpu.flops * share * size
    memory, itemsize = gpu.hbm_bytes_per_s * efficiency.memory, training.formats.compute.itemsize
    return Speed(products, min(products, attention) if is_fp32 else attention, memory, efficiency, itemsize)


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
    cast_bytes = sum(flat.num_master * (flat.master.itemsize + flat.moved.itemsize) for flat in cast)
    return replace(
        each,
        norm=NORM_PASSES * grad_bytes / speed.memory,
        norm_of_offloaded=NORM_PASSES_OF_OFFLOADED * offloaded_bytes / speed.memory,
        update=update_bytes / speed.memory,
        cast=cast_bytes / speed.memory,
    )


class Copies(NamedTuple):
    """Bytes per element that another engine reads and writes in copies and casts that ours does without: of a gathered
    parameter, of a gradient, and of what this rank updates."""

    gather: int
    grad: int
    update: int


def with_copies(
    seconds: Mapping[str, UnitSeconds], schedule: Schedule, speed: Speed, copies: Copies
) -> dict[str, UnitSeconds]:
    found = {}
    for unit in schedule.units:
        each, trained = seconds[unit.name], [flat for flat in unit.flats if flat.trainable]
        gather = copies.gather * sum(flat.num_elems for flat in unit.flats if flat.num_master < flat.num_elems)
        grad = copies.grad * sum(flat.num_elems for flat in trained)
        update = copies.update * sum(flat.num_master for flat in trained if not flat.host_updates)
        found[unit.name] = replace(
            each,
            forward=each.forward + gather / speed.memory,
            backward=each.backward + (gather + grad) / speed.memory,
            update=each.update + update / speed.memory,
        )
    return found


def work_seconds(work: Work, speed: Speed, training: Training) -> UnitSeconds:
    forward, num_kernels = forward_s(work, speed), float(work.num_kernels)
    if work.kind == "loss":
        grad_bytes = sum(p.count * p.n * p.k for p in work.products if p.trainable) * LOSS_GRAD_BYTES[training.loss]
        forward += grad_bytes / speed.memory
        times = LOSS_KERNELS_BACKWARD[training.loss]
        return UnitSeconds(
            forward, backward_s(work, speed, times), forward_kernels=num_kernels, backward_kernels=times * num_kernels
        )
    num_kernels *= 1.0 if training.compile else HOST_OF_CHECKPOINTING[training.checkpointing]
    # All elementwise operations are recomputed, even if the results of products are saved; their traffic is counted.
    gaps = work.num_kernels * speed.efficiency.gap_s
    attention_s = work.attention_flops / speed.attention
    products_s = forward - work.moved_bytes / speed.memory - gaps - attention_s
    again_flops = work.recomputed * work.flops - work.recomputed_attention * work.attention_flops
    product_flops = work.flops - work.attention_flops
    recomputed = work.recomputed_attention * attention_s + (gaps if work.recomputed else 0.0)
    recomputed += products_s * again_flops / product_flops if product_flops else 0.0
    return UnitSeconds(
        forward,
        backward_s(work, speed) + recomputed,
        forward_kernels=num_kernels,
        backward_kernels=(KERNELS_BACKWARD + work.recomputed) * num_kernels,
    )


def forward_s(work: Work, speed: Speed) -> float:
    return (
        sum(product.count * _product_s(product.m, product.n, product.k, speed) for product in work.products)
        + work.attention_flops / speed.attention
        + work.moved_bytes / speed.memory
        + work.num_kernels * speed.efficiency.gap_s
    )


def backward_s(work: Work, speed: Speed, kernels: float = KERNELS_BACKWARD) -> float:
    """Seconds of a backward without recomputed products. `kernels`: their number, as a multiple of the forward's."""
    products_s = 0.0
    for product in work.products:
        by_input = _product_s(product.m, product.k, product.n, speed)
        by_weight = _product_s(product.n, product.k, product.m, speed) if product.trainable else 0.0
        products_s += product.count * (by_input + by_weight)
    return (
        products_s
        + ATTENTION_BACKWARD * work.attention_flops / (speed.attention * speed.efficiency.backward)
        + work.backward_moved_bytes / speed.memory
        + kernels * work.num_kernels * speed.efficiency.gap_s
    )


def _product_s(m: int, n: int, k: int, speed: Speed) -> float:
    """Seconds of a product: its FLOP, with what its pipelines and its last wave waste (see `Efficiency`), or the memory
    traffic of a narrow one, such as an adapter's."""
    flop = 2.0 * (k + speed.efficiency.prologue) * (m * n + speed.efficiency.tail)
    return max(flop / speed.products, speed.itemsize * (m * k + k * n + m * n) / speed.memory)
