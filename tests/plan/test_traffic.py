"""Bytes inside and between nodes: they add up to the ledger's, and a ring's shares are right."""

import pytest

from shardwise.dtypes import BF16
from shardwise.plan.traffic import crossing_bytes
from shardwise.wire.ledger import describe_call
from tests.plan.planning import EVERY, WIRES, assessed, machine


@pytest.mark.parametrize("strategy", [*EVERY, *WIRES])
@pytest.mark.parametrize("nodes", [1, 4])
def test_inside_and_between_are_all(strategy: str, nodes: int) -> None:
    moved = assessed(strategy, machine(nodes=nodes)).moved
    assert moved.intra_node + moved.inter_node == pytest.approx(moved.by_call.wire_bytes)
    assert moved.intra_node >= 0
    assert (moved.inter_node > 0) == (nodes > 1)


def test_one_gpu_sends_nothing() -> None:
    moved = assessed("zero3", machine(gpus=1)).moved
    assert (moved.by_call.rows, moved.inter_node, moved.pcie, moved.disk) == ((), 0, 0, 0)


@pytest.mark.parametrize(
    ("kind", "axis", "num_ranks", "crossing"),
    [
        ("all_gather", "node", 8, 0),
        ("all_gather", "replicate", 4, 3 / 4),
        ("all_gather", "world", 32, 3 / 4 / 8),
        ("reduce_scatter", "world", 32, 3 / 4 / 8),
        ("all_reduce", "world", 32, 2 * 3 / 4 / 8),
        ("all_reduce", "replicate", 4, 2 * 3 / 4),
    ],
)
def test_what_crosses_the_border_of_a_node(kind: str, axis: str, num_ranks: int, crossing: float) -> None:
    """Four nodes of eight: what the node lacks comes in once, and its ranks share the work."""
    call = describe_call(kind, axis, num_ranks, 1024, BF16)
    assert crossing_bytes(call, 4, 8) == crossing * 2048


def test_parameters_on_the_host_come_for_both_passes() -> None:
    found = assessed("zero3_offload")
    num_elems = sum(flat.spans[flat.depth_of_params].num_elems for flat in found.schedule.trainable_flats)
    gathers = [event for event in found.events if event.verb == "gather"]
    assert found.moved.to_device == sum(move.num_bytes for event in gathers for move in event.moves)
    assert 2 * num_elems < found.moved.to_device <= 4 * num_elems
    assert found.moved.to_host == 4 * num_elems


def test_an_optimizer_on_disk_is_read_and_written() -> None:
    found = assessed("zero3_nvme")
    num_elems = sum(flat.spans[flat.depth_of_master].num_elems for flat in found.schedule.trainable_flats)
    assert found.moved.write == 12 * num_elems + 2 * num_elems
    assert found.moved.read == 12 * num_elems + found.moved.to_device
