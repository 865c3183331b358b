"""What the work of a unit takes on a GPU by itself: a roofline.

Matrix products and attention run at a share of the GPU's peak, everything else at a share of its memory bandwidth, and
the three follow each other on one stream, so their times add up. A backward multiplies twice for every product of the
forward, once where the weight is frozen, and reads and writes twice as much; attention's backward takes 2.5 times its
forward, because it computes the scores again. What is computed again (activation checkpointing) is added to the
backward. The host queues kernels meanwhile; the computation cannot be faster than that.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from ..dtypes import FP32, DType
from .efficiency import Efficiency
from .hardware import Gpu
from .schedule import Schedule, UnitPlan
from .training import Training
from .work import Product, Work

ATTENTION_BACKWARD = 2.5
MOVED_BACKWARD = 2.0


@dataclass(frozen=True, slots=True)
class UnitSeconds:
    """What a unit takes: its forward and backward for one micro-batch, the host's time to queue them, its update, and
    the cast before its gather."""

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    cast: float = 0.0
    forward_host: float = 0.0
    backward_host: float = 0.0


@dataclass(frozen=True, slots=True)
class Speed:
    """What a GPU does in a second, as far as it is reached; the rest as in `Efficiency`."""

    products: float
    attention: float
    memory: float
    efficiency: Efficiency


def speed_of(gpu: Gpu, efficiency: Efficiency, compute: DType) -> Speed:
    """In 32 bits there is no attention kernel that is better than products."""
    if compute == FP32:
        products = gpu.fp32_flops * efficiency.products
        return Speed(products, products, gpu.hbm_bytes_per_s * efficiency.memory, efficiency)
    return Speed(
        gpu.flops * efficiency.products,
        gpu.flops * efficiency.attention,
        gpu.hbm_bytes_per_s * efficiency.memory,
        efficiency,
    )


def seconds_of(
    schedule: Schedule, works: Mapping[str, Work], speed: Speed, training: Training
) -> dict[str, UnitSeconds]:
    """By name of the unit. Work of no unit (a loss behind a tied head) is the last one's, which it follows."""
    known: dict[int, UnitSeconds] = {}
    for work in works.values():
        if id(work) not in known:
            known[id(work)] = _work_seconds(work, speed, training)
    found = {
        unit.name: replace(
            known[id(works[unit.name])],
            update=update_bytes(unit, training.num_moments) / speed.memory,
            cast=cast_bytes(unit) / speed.memory,
        )
        for unit in schedule.units
    }
    last = schedule.units[schedule.order[-1]].name
    for name, work in works.items():
        if name not in found:
            found[last] = _together(found[last], known[id(work)])
    return found


def _work_seconds(work: Work, speed: Speed, training: Training) -> UnitSeconds:
    forward, forward_host = forward_s(work, speed), work.num_kernels * speed.efficiency.launch_s
    # A loss in chunks has read and written everything in its forward.
    is_done = work.kind == "loss" and training.loss != "plain"
    return UnitSeconds(
        forward=forward,
        backward=backward_s(work, speed, 0.0 if is_done else MOVED_BACKWARD) + work.recomputed * forward,
        forward_host=forward_host,
        backward_host=(0 if is_done else 2 + work.recomputed) * forward_host,
    )


def _together(one: UnitSeconds, other: UnitSeconds) -> UnitSeconds:
    return UnitSeconds(*(getattr(one, field.name) + getattr(other, field.name) for field in fields(UnitSeconds)))


def forward_s(work: Work, speed: Speed) -> float:
    flop = sum(product.count * _cost(product.m, product.n, product.k, speed.efficiency) for product in work.products)
    return (
        flop / speed.products
        + work.attention_flops / speed.attention
        + work.moved_bytes / speed.memory
        + work.num_kernels * speed.efficiency.gap_s
    )


def backward_s(work: Work, speed: Speed, moved: float = MOVED_BACKWARD) -> float:
    """Without what is computed again. `moved`: reads and writes, as a multiple of the forward's."""
    flop = sum(product.count * _backward_cost(product, speed.efficiency) for product in work.products)
    return (
        flop / speed.products
        + ATTENTION_BACKWARD * work.attention_flops / speed.attention
        + moved * (work.moved_bytes / speed.memory + work.num_kernels * speed.efficiency.gap_s)
    )


def _cost(m: int, n: int, k: int, efficiency: Efficiency) -> float:
    """FLOP of a product, with what its pipelines and its last wave waste."""
    return 2.0 * (k + efficiency.prologue) * (m * n + efficiency.tail)


def _backward_cost(product: Product, efficiency: Efficiency) -> float:
    by_input = _cost(product.m, product.k, product.n, efficiency)
    return by_input + (_cost(product.n, product.k, product.m, efficiency) if product.trainable else 0.0)


def update_bytes(unit: UnitPlan, num_moments: float) -> int:
    """What an optimizer's step reads and writes of this rank's part: gradients once, masters and moments both ways."""
    return round(
        sum(
            flat.spans[flat.depth_of_master].num_elems
            * (flat.reduce.itemsize + 2 * flat.master.itemsize * (1 + num_moments))
            * (1.0 if flat.layout.optimizer_on == "device" else flat.layout.kept)
            for flat in unit.flats
            if flat.trainable
        )
    )


def cast_bytes(unit: UnitPlan) -> int:
    """What a gather reads and writes first: this rank's part of the masters, cast to the compute dtype."""
    return sum(
        flat.spans[flat.depth_of_master].num_elems * (flat.master.itemsize + flat.compute.itemsize)
        for flat in unit.flats
        if not flat.master_is_whole
    )
