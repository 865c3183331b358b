"""Parameters, gradients and optimizer alone, for a model of which only the size is known."""

from typing import Any

import pytest

from shardwise.core.layout import PRESETS
from shardwise.planner.hardware.cluster import make_cluster
from shardwise.planner.planning import plan
from shardwise.planner.shapes.shape import StatesOnly
from shardwise.planner.states import States

PSI = 2**30


def states(gpus: str = "8xA100-40GB", nodes: int = 1, num_params: int = PSI, **training: Any) -> States:
    found = plan(StatesOnly(num_params), make_cluster(gpus, nodes), **training)
    assert isinstance(found, States)
    return found


def bytes_each(found: States, name: str) -> tuple[float, float, float]:
    row = next(row for row in found.rows if row.name == name)
    params, grads, optimizer = (size / PSI for size in row.memory.peak.num_bytes[:3])
    return params, grads, optimizer


def test_every_strategy_has_a_row() -> None:
    assert [row.name for row in states().rows] == [*PRESETS]


@pytest.mark.parametrize(
    ("precision", "optimizer", "expected"),
    [
        ("bf16", "adamw", (2, 2, 12)),
        ("fp16", "adamw", (2, 2, 12)),
        ("pure-bf16", "adamw", (2, 2, 4)),
        ("fp32", "adamw", (4, 4, 8)),
        ("bf16", "sgd", (2, 2, 4 + 4)),
        ("bf16", "adamw8bit", (2, 2, 4 + 2 + 8 / 256)),
        ("pure-bf16", "adamw8bit", (2, 2, 2 + 8 / 256)),
        ("fp32", "adamw8bit", (4, 4, 2 + 8 / 256)),
        ("pure-bf16", "sgd", (2, 2, 2)),
    ],
)
def test_bytes_of_a_parameter(precision: str, optimizer: str, expected: tuple[float, float, float]) -> None:
    assert bytes_each(states(precision=precision, optimizer=optimizer), "ddp") == expected


def test_splits_are_over_the_node_or_all_ranks() -> None:
    found = states(nodes=4)
    assert bytes_each(found, "hsdp") == (2 / 8, 2 / 8, 12 / 8)
    assert bytes_each(found, "hfsdp") == (2 / 8, 2 / 8, 12 / 32)
    assert bytes_each(found, "hpz") == (2 / 8, 2 / 32, 12 / 32)
    assert bytes_each(found, "zero3") == (2 / 32, 2 / 32, 12 / 32)


def test_what_is_not_on_the_device_is_on_the_host_or_the_disk() -> None:
    rows = {row.name: row for row in states().rows}
    assert (rows["zero2_offload"].total, rows["zero2_offload"].host_bytes) == (2 * PSI, 14 * PSI)
    assert (rows["zero3_offload"].total, rows["zero3_offload"].host_bytes) == (0, 16 * PSI)
    assert (rows["zero3_nvme"].host_bytes, rows["zero3_nvme"].disk_bytes) == (2 * PSI, 14 * PSI)


def test_micro_batches_are_gathered_and_reduced_each() -> None:
    """As the tables have it: zero3 G (2 p + g), zero2 G g + p, zero1 and ddp once."""
    sent = {row.name: row.moved.by_call.wire_bytes / PSI / 2 * 8 / 7 for row in states(num_micro_batches=4).rows}
    assert sent["zero3"] == 4 * 3
    assert sent["shard_grad_op"] == 4 * 2
    assert sent["zero2"] == 4 + 1
    assert sent["zero1"] == sent["ddp"] == 2


def test_the_least_split_that_fits_is_recommended() -> None:
    assert states(num_params=10**9).recommended.name == "ddp"  # type: ignore[union-attr]
    assert states(num_params=5 * 10**9).recommended.name == "zero1"  # type: ignore[union-attr]
    assert states(num_params=6 * 10**9).recommended.name == "zero2"  # type: ignore[union-attr]
    assert states(num_params=18 * 10**9).recommended.name == "shard_grad_op"  # type: ignore[union-attr]
    assert states(num_params=60 * 10**9).recommended.name == "zero3_offload"  # type: ignore[union-attr]
    assert states(num_params=10**13).recommended is None
