"""One strategy, costed: whether it fits is decided by the GPU, the node's host and its disk, in this order."""

from dataclasses import replace

import pytest

from shardwise.core.layout import PRESETS
from shardwise.core.schedule.state_bytes import HOST_SHARE
from shardwise.planner.assess import MAX_SIMULATED, NCCL_BYTES
from shardwise.planner.events import step_events, traffic_of
from tests.planner.planning import EVERY, GB, SHAPE, assessed, assessor, machine


def test_a_gpu_that_is_just_large_enough_is_large_enough() -> None:
    needed = assessed("zero3", machine(free_bytes=10**12)).needed_bytes
    assert assessed("zero3", machine(free_bytes=needed)).fits
    refused = assessed("zero3", machine(free_bytes=needed - 1))
    assert not refused.fits
    assert refused.why_not == f"needs {needed / GB:,.1f} GB on each A100-40GB, which has {(needed - 1) / GB:,.1f} GB"


def test_the_context_comes_on_top() -> None:
    found = assessed("zero3")
    gpu = found.machine.cluster.gpu
    assert found.needed_bytes == found.reserved.expected + gpu.context_bytes + NCCL_BYTES
    alone = assessed("zero3", machine(gpus=1))
    assert alone.needed_bytes == alone.reserved.expected + gpu.context_bytes


def test_free_memory_that_was_looked_at_has_the_context_in_it() -> None:
    found = assessed("zero3", machine(free_bytes=20 * GB))
    assert found.machine.memory_bytes == 20 * GB
    assert found.needed_bytes == found.reserved.expected + NCCL_BYTES


def test_what_fits_only_with_luck_is_tight() -> None:
    reserved = assessed("zero3", machine(free_bytes=10**12)).reserved
    found = assessed("zero3", machine(free_bytes=(reserved.expected + reserved.high) // 2 + NCCL_BYTES))
    assert found.fits
    assert found.is_tight
    assert not assessed("zero3", machine(free_bytes=reserved.high + NCCL_BYTES)).is_tight


def test_hosts_and_disks_are_a_nodes() -> None:
    offloaded = assessed("zero3_offload", speculation=0)
    assert offloaded.host_bytes == 8 * offloaded.memory.host_bytes > 0
    assert (
        "on the host of each node" in assessed("zero3_offload", machine(host_memory=offloaded.host_bytes - 1)).why_not
    )
    on_disk = assessed("zero3_nvme")
    assert "on the disk of each node" in assessed("zero3_nvme", machine(disk=on_disk.disk_bytes - 1)).why_not


def test_a_tenth_of_the_host_is_left_to_others() -> None:
    needed = assessed("zero3_offload", speculation=0).host_bytes
    assert assessed("zero3_offload", machine(host_memory=round(needed / HOST_SHARE) + 1)).fits
    refused = assessed("zero3_offload", machine(host_memory=round(needed / HOST_SHARE) - 10))
    assert refused.why_not.endswith(" GB to spare")


def test_where_the_device_is_the_host_nothing_is_won_there() -> None:
    processor = replace(machine(free_bytes=10**12), has_reserve=False)
    here, there = (assessed(name, processor) for name in ("zero3", "zero3_offload"))
    assert there.needed_bytes == there.memory.peak.total + there.memory.host_bytes > here.needed_bytes
    assert there.fits


def test_what_is_exact() -> None:
    assert [name for name in EVERY if not assessed(name).is_exact] == ["zeropp"]
    assert not assessed({"blocks.0": replace(PRESETS["zero3"], params_as="int8"), "*": "zero3"}).is_exact


def test_a_table_and_a_matrix_of_the_same_shape_travel_differently() -> None:
    found = assessed("zero3+params_as=int8")
    by_name = {unit.name: unit.flats for unit in found.schedule.units}
    assert [flat.params[0].shape for name in ("embed", "head") for flat in by_name[name]] == [(32000, 1024)] * 2
    assert [flat.params_codec is None for name in ("embed", "head") for flat in by_name[name]] == [True, False]


def test_blocks_that_are_alike_share_their_flats() -> None:
    found = assessed("zero3")
    blocks = [unit for unit in found.schedule.units if unit.name.startswith("blocks.")]
    assert len(blocks) == SHAPE.layers
    assert len({id(unit.flats) for unit in blocks}) == 1


def test_an_assessor_moves_to_another_machine() -> None:
    training = assessed("zero3").training
    here = assessor(machine())
    layouts = [PRESETS["zero3"]] * len(here.unit_names)
    there = here.on(machine(nodes=2))("zero3", layouts, training)
    assert there.memory.peak.total < here("zero3", layouts, training).memory.peak.total


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_tokens_are_those_of_all_micro_batches(num_micro_batches: int) -> None:
    found = assessed("zero3", num_micro_batches=num_micro_batches, micro_batch=2, seq=512)
    assert found.tokens_per_s * found.timing.step_s == pytest.approx(1024 * num_micro_batches)


@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3", "hpz", "zero3_offload"])
def test_many_micro_batches_are_not_played_one_by_one(name: str) -> None:
    """What is left out is exactly what the schedule would have: traffic to the byte."""
    few = assessed(name, num_micro_batches=MAX_SIMULATED)
    many = assessed(name, num_micro_batches=MAX_SIMULATED + 5)
    events = step_events(many.schedule, MAX_SIMULATED + 5, clips=True, num_moments=2)
    cluster = many.machine.cluster
    exact = traffic_of(events, cluster.num_nodes, cluster.node_size)
    assert many.moved.by_call == exact.by_call
    assert (many.moved.to_host, many.moved.to_device) == (exact.to_host, exact.to_device)
    assert many.memory.peak.total == few.memory.peak.total
    assert many.timing.step_s > few.timing.step_s
