"""Bytes inside and between nodes: they add up to the ledger's, and a ring's shares are right."""

import pytest

from shardwise.base.dtypes import BF16, FP32
from shardwise.core.layout import layout_of
from shardwise.core.precision import precision_of
from shardwise.core.schedule.flat import flats_of
from shardwise.core.schedule.model import Param, Site, UnitSpec
from shardwise.core.schedule.step_schedule import UnitPlan, make_schedule
from shardwise.core.wire.ledger import Call, describe_call
from shardwise.planner.events import crossing_bytes, step_events
from shardwise.planner.planning import plan
from shardwise.planner.shapes.shape import StatesOnly
from shardwise.planner.states import States
from tests.planner.planning import EVERY, WIRES, assessed, machine


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


# ---------------------------------------------------------------------------------------------------------
# what crosses the border in fewer bits: multiples of the parameters in 16 bits, gradients in 16 bits, too

NODES, NODE = 4, 8
# What a rank takes across, of what all nodes lack.
OF_A_RANK = (NODES - 1) / NODES / NODE
# Of the bytes, what is no scale: 256 elements share one of 4 bytes.
PAYLOAD = {"bfloat16": 1.0, "int8": 256 / 260, "int4": 128 / 132}
WITH_SCALES = 0.5 / PAYLOAD["int8"] + 0.25 / PAYLOAD["int4"]


def test_zeropp_crosses_a_quarter_of_what_zero3_does() -> None:
    """Parameters in both passes and gradients: 3. Parameters in 8 bits once, and gradients in 4: 0.75, with scales
    0.77."""
    num_params = 2**30
    found = plan(StatesOnly(num_params), machine(NODE, NODES))
    assert isinstance(found, States)
    crossing = {row.name: row.moved.inter_node / (2 * num_params * OF_A_RANK) for row in found.rows}
    assert crossing["zero3"] == 3
    assert crossing["zeropp"] == pytest.approx(WITH_SCALES)
    assert pytest.approx(0.766, abs=5e-4) == WITH_SCALES
    assert crossing["hpz"] == 2


def test_as_the_engine_has_it_two_units_stay_from_forward_to_backward() -> None:
    """Of 64 matrices; what crosses without scales, and with them."""
    exact, encoded = (crossing_of("zero3"), crossing_of("zeropp"))
    assert exact == (3 - 2 / 64, 3 - 2 / 64)
    assert encoded == pytest.approx((0.75, WITH_SCALES))


def crossing_of(strategy: str, num_units: int = 64) -> tuple[float, float]:
    layout = layout_of(strategy)
    axes = {"world": (NODES * NODE, 0), "node": (NODE, 0), "replicate": (NODES, 0)}
    units = []
    for name in map(str, range(num_units)):
        found = UnitSpec(name, name, (Param(name, (1024, 1024), FP32, True, (Site(name, "weight"),)),), False, True)
        flats = flats_of(found, layout, precision_of("bf16", "bf16"), axes, ())
        units.append(UnitPlan(name, layout, flats, False, True))
    events = step_events(make_schedule(units, range(num_units), None))
    calls = [call for event in events if event.verb in ("gather", "reduce") for call in event.calls]

    def crossing(call: Call) -> float:
        return crossing_bytes(call, NODES, NODE) / (2 * num_units * 1024**2 * OF_A_RANK)

    return sum(crossing(call) * PAYLOAD[call.dtype] for call in calls), sum(map(crossing, calls))
