"""What units take by themselves: the arithmetic, and figures that were measured."""

from dataclasses import replace

import pytest

from benchmarks.planner_seen import EMULATED
from shardwise.base.errors import ConfigurationError
from shardwise.core.layout import layouts_for
from shardwise.core.schedule.flat import flats_of
from shardwise.core.schedule.step_schedule import Schedule, UnitPlan, make_schedule
from shardwise.planner.cost.compute import (
    Speed,
    backward_s,
    forward_s,
    seconds_of,
    speed_of,
    work_seconds,
)
from shardwise.planner.cost.step_time import step_time
from shardwise.planner.events import step_events
from shardwise.planner.hardware.cluster import Cluster, make_cluster
from shardwise.planner.hardware.gpus import GPUS, REAL, Efficiency, Overheads, efficiency_of, gpu_named
from shardwise.planner.hardware.links import Link
from shardwise.planner.shapes.names import shape_named
from shardwise.planner.shapes.shape import ModelShape, units_of
from shardwise.planner.training import Training
from shardwise.planner.work.activations import works_of
from shardwise.planner.work.work import Product, Work

PLAIN = Efficiency(1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, "none")
UNIT = Speed(products=1.0, attention=1.0, memory=1.0, efficiency=PLAIN)


def work(**parts: object) -> Work:
    return Work(0, 0, 0, 0, **parts)  # type: ignore[arg-type]


def test_a_trained_product_costs_three_times_its_forward_and_a_frozen_one_twice() -> None:
    trained, frozen = (work(products=(Product(8, 4, 2, trainable=trains),)) for trains in (True, False))
    assert forward_s(trained, UNIT) == 2 * 8 * 4 * 2
    assert backward_s(trained, UNIT) == 2 * forward_s(trained, UNIT)
    assert backward_s(frozen, UNIT) == forward_s(frozen, UNIT)


def test_a_narrow_product_takes_as_long_as_its_memory() -> None:
    narrow = work(products=(Product(100, 1, 100),))
    assert forward_s(narrow, replace(UNIT, products=1000.0, memory=10.0)) == 2 * (100 * 100 + 100 + 100) / 10


def test_attention_and_traffic_have_their_own_rates() -> None:
    asked = work(attention_flops=100.0, moved_bytes=10.0, backward_moved_bytes=30.0)
    assert forward_s(asked, replace(UNIT, attention=2.0, memory=5.0)) == 52.0
    assert backward_s(asked, UNIT) == 250.0 + 30.0


def test_a_backward_of_attention_has_a_rate_of_its_own_and_so_do_small_and_large_heads() -> None:
    asked, gpu = work(attention_flops=100.0), gpu_named("h200")
    shares = replace(PLAIN, attention=0.5, backward=0.5, narrow=0.8, wide=0.6)
    assert backward_s(asked, replace(UNIT, efficiency=shares)) == 2 * 250.0
    speeds = [speed_of(gpu, shares, Training(), head_dim).attention / gpu.flops for head_dim in (64, 128, 256)]
    assert speeds == pytest.approx([0.4, 0.5, 0.3])


def test_attention_and_products_are_computed_again_at_their_own_rates() -> None:
    asked = work(products=(Product(8, 4, 2),), attention_flops=128.0, recomputed=0.75, recomputed_attention=1.0)
    slow = replace(UNIT, attention=0.5)
    plain = work_seconds(replace(asked, recomputed=0.0, recomputed_attention=0.0), slow, Training())
    # All of attention, and half of the products.
    assert work_seconds(asked, slow, Training()).backward == plain.backward + 128 / 0.5 + 0.5 * 128


def test_what_is_computed_again_is_added_to_the_backward() -> None:
    asked = work(products=(Product(8, 4, 2),), moved_bytes=10.0, recomputed=0.5)
    plain = work_seconds(replace(asked, recomputed=0.0), UNIT, Training())
    # Half of the products. What moves again is in the backward's traffic already.
    assert work_seconds(asked, UNIT, Training()).backward == plain.backward + 0.5 * 128


def test_a_loss_in_chunks_adds_to_the_gradient_of_the_weight_in_its_forward() -> None:
    loss = work(products=(Product(8, 4, 2),), moved_bytes=10.0, backward_moved_bytes=10.0, kind="loss")
    chunked, plain = (work_seconds(loss, UNIT, Training(loss=kind)) for kind in ("chunked", "plain"))  # type: ignore[arg-type]
    assert chunked.backward == plain.backward == 2 * 128 + 10.0
    assert chunked.forward == 128 + 10.0 + 8 * 4 * 2


def test_small_products_reach_less_of_the_peak() -> None:
    gpu = gpu_named("h200")
    speed = speed_of(gpu, efficiency_of(gpu.name), Training())

    def share(size: int) -> float:
        product = Product(size, size, size)
        return product.flops / forward_s(work(products=(product,)), speed) / gpu.flops

    shares = [share(size) for size in (256, 1024, 4096, 16384)]
    assert shares == sorted(shares)
    assert shares[0] < 0.5 < shares[-1] < efficiency_of(gpu.name).products


def test_every_gpu_of_the_table_has_an_efficiency_with_a_source() -> None:
    for name in GPUS:
        found = efficiency_of(name)
        assert all(0 < share < 1 for share in (found.products, found.attention, found.memory))
        assert found.source


@pytest.mark.parametrize(
    ("gpu", "multiprocessors", "is_measured"),
    [
        ("RTX-5080", 84, False),
        ("RTX-5090", 170, True),
        ("H100-PCIe", 114, False),
        ("H100-80GB", 132, True),
        ("H20-96GB", 78, True),
        ("A10", 72, False),
        ("A100-80GB", 108, True),
        ("L4", 58, False),
        ("B300", 148, False),
        ("MI355X", 256, False),
    ],
)
def test_a_gpu_has_its_own_row(gpu: str, multiprocessors: int, is_measured: bool) -> None:
    assert GPUS[gpu].multiprocessors == multiprocessors
    assert efficiency_of(gpu).source.startswith("not measured") != is_measured


def test_a_name_without_a_row_has_no_efficiency() -> None:
    with pytest.raises(ConfigurationError):
        efficiency_of("GB10")


@pytest.mark.parametrize(
    ("gpu", "seq", "head_dim", "teraflops"),
    [  # forward and backward of causal attention together, from the sources in the table
        ("A100-80GB", 512, 128, 99),
        ("A100-80GB", 2048, 128, 155),
        ("A100-80GB", 16384, 128, 189),
        ("A100-80GB", 16384, 64, 171),
        ("H100-80GB", 16384, 128, 302),
        ("RTX-4090", 2048, 128, 110),
        ("B200", 8192, 128, 1080),
    ],
)
def test_attention_is_as_fast_as_published(gpu: str, seq: int, head_dim: int, teraflops: float) -> None:
    found = gpu_named(gpu)
    speed = speed_of(found, efficiency_of(gpu), Training(seq=seq), head_dim)
    asked = work(attention_flops=1e12)
    assert 3.5 / (forward_s(asked, speed) + backward_s(asked, speed)) == pytest.approx(teraflops, rel=0.04)


def test_in_32_bits_the_other_peak_counts() -> None:
    gpu = gpu_named("h200")
    narrow, wide = (speed_of(gpu, efficiency_of(gpu.name), Training(precision=name)) for name in ("bf16", "fp32"))
    assert narrow.products / wide.products == pytest.approx(gpu.flops / gpu.fp32_flops)
    assert wide.attention == wide.products


def test_an_update_reads_and_writes_masters_and_moments_and_reads_gradients() -> None:
    shape, training = shape_named("llama-3.2-1b"), Training()
    plan = schedule_of(shape, training, make_cluster("8xH200"), "ddp")
    found = seconds_of(plan, works_of(shape, training), UNIT, training)
    assert sum(unit.update for unit in found.values()) == pytest.approx(28 * 1_235_814_400, rel=1e-3)


def schedule_of(shape: ModelShape, training: Training, on: Cluster, strategy: str) -> Schedule:
    found = units_of(shape, training.lora)
    layouts = layouts_for(strategy, [unit.name for unit in found])
    axes = {"world": (on.world_size, 0), "node": (on.node_size, 0), "replicate": (on.num_nodes, 0)}
    units = [
        UnitPlan(unit.name, layout, flats_of(unit, layout, training.formats, axes, ()), unit.holds_units, True)
        for unit, layout in zip(found, layouts, strict=True)
    ]
    return make_schedule(units, range(len(units)), None)


def predicted_s(
    name: str, training: Training, on: Cluster, strategy: str, wear: Overheads, clips: bool = False
) -> float:
    shape = shape_named(name)
    plan = schedule_of(shape, training, on, strategy)
    speed = speed_of(on.gpu, efficiency_of(on.gpu.name), training, shape.head_dim)
    seconds = seconds_of(plan, works_of(shape, training), speed, training)
    return step_time(plan, step_events(plan, training.num_micro_batches, clips=clips), seconds, on, wear).step_s


@pytest.mark.parametrize(
    ("tokens", "checkpointing", "compiled", "strategy", "seen_s"),
    [
        (4096, "none", False, "zero3", 0.4064),
        (4096, "full", False, "zero3", 0.4867),
        (4096, "full", False, "zero2", 0.4814),
        (4096, "none", True, "zero3", 0.3781),
        (16384, "full", False, "zero3", 2.3496),
    ],
)
def test_steps_of_an_8b_model_take_what_our_h200_took(
    tokens: int, checkpointing: str, compiled: bool, strategy: str, seen_s: float
) -> None:
    """One rank of an emulated node of 8 at 400 GB/s, in-tree code, clipped."""
    training = Training(seq=tokens, checkpointing=checkpointing, compile=compiled)  # type: ignore[arg-type]
    on = replace(make_cluster("8xH200"), intra=Link(400.0, 20.0), switch=None)
    planned_s = predicted_s("llama-3-8b", training, on, strategy, EMULATED, clips=True)
    assert planned_s == pytest.approx(seen_s, rel=0.06)


@pytest.mark.parametrize(
    ("model", "gpus", "micro_batch", "seq", "checkpointing", "tokens_per_s"),
    [
        ("mpt-7b", "8xA100-80GB", 6, 2048, "none", 4641),
        ("mpt-13b", "8xA100-80GB", 10, 4096, "full", 2060),
        ("mpt-7b", "8xH100-80GB", 6, 2048, "none", 10643),
    ],
)
def test_published_steps_take_what_was_published(
    model: str, gpus: str, micro_batch: int, seq: int, checkpointing: str, tokens_per_s: float
) -> None:
    """llm-foundry's; the constants were fitted on them among others."""
    training = Training(
        seq=seq, micro_batch=micro_batch, checkpointing=checkpointing, loss="plain", engine="fsdp2",  # type: ignore[arg-type]
    )  # fmt: skip
    planned_s = predicted_s(model, training, make_cluster(gpus), "zero3", REAL)
    assert micro_batch * seq / planned_s == pytest.approx(tokens_per_s, rel=0.1)
