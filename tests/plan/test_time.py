"""The step's time: waits, overlap, wires that are shared, all against sums done by hand."""

import time
from dataclasses import replace
from itertools import pairwise

import pytest

from shardwise.dtypes import FP32
from shardwise.layout import Layout, layouts_for
from shardwise.plan.cost.compute import UnitSeconds
from shardwise.plan.cost.time import Timing, days_for, mfu, step_time
from shardwise.plan.events import step_events
from shardwise.plan.flat import flats_of
from shardwise.plan.hardware.cluster import make_cluster
from shardwise.plan.hardware.efficiency import IDEAL, Wear
from shardwise.plan.hardware.links import Link
from shardwise.plan.hardware.values import Cluster
from shardwise.plan.model import FoundUnit, Param, Site
from shardwise.plan.schedule import Schedule, UnitPlan, make_schedule
from shardwise.precision import precision_of

ELEMS = 1 << 20


def cluster(gigabytes_per_s: float = 100.0, nodes: int = 1, latency_us: float = 0.0) -> Cluster:
    found = make_cluster("8xH200", nodes)
    return replace(found, intra=Link(gigabytes_per_s, latency_us), inter=Link(10.0, latency_us), switch=None)


def schedule(num_units: int, strategy: str | Layout = "zero3", nodes: int = 1, reduce: str = "bf16") -> Schedule:
    names = [f"blocks.{index}" for index in range(num_units)]
    axes = {"world": (8 * nodes, 0), "node": (8, 0), "replicate": (nodes, 0)}
    units = []
    for name, layout in zip(names, layouts_for(strategy, names), strict=True):
        param = Param(f"{name}.weight", (ELEMS,), FP32, True, (Site(name, "weight"),))
        flats = flats_of(FoundUnit(name, name, (param,), False, True), layout, precision_of("bf16", reduce), axes, ())
        units.append(UnitPlan(name, layout, flats, False, True))
    return make_schedule(units, range(num_units), None)


def play(
    plan: Schedule, each: UnitSeconds, on: Cluster, wear: Wear = IDEAL, clips: bool = False, num: int = 1
) -> Timing:
    events = step_events(plan, num, clips=clips)
    return step_time(plan, events, {unit.name: each for unit in plan.units}, on, wear)


def test_a_rank_alone_takes_what_it_computes() -> None:
    plan = schedule(4, "ddp")
    seconds = UnitSeconds(forward=1e-3, backward=2e-3, update=1e-4)
    timing = play(plan, seconds, cluster(gigabytes_per_s=1e9))
    assert timing.step_s == pytest.approx(4 * 3.1e-3, rel=1e-3)
    assert timing.compute_s == pytest.approx(12e-3)
    assert timing.update_s == pytest.approx(4e-4)


def test_on_slow_wires_a_step_takes_what_its_bytes_take() -> None:
    """Nothing to compute: the wire is never idle, and all gathers and reductions follow each other."""
    plan = schedule(8)
    timing = play(plan, UnitSeconds(), cluster(gigabytes_per_s=1.0))
    moved = sum(call.wire_bytes for event in step_events(plan) for call in event.calls)
    assert timing.busy_s["intra"] == pytest.approx(moved / 1e9)
    assert timing.step_s == pytest.approx(moved / 1e9, rel=0.01)


def test_gathers_and_reductions_hide_behind_computing() -> None:
    plan = schedule(8)
    on = cluster(gigabytes_per_s=100.0)
    gather_s = 2 * ELEMS * 7 / 8 / 100e9
    each = UnitSeconds(forward=10 * gather_s, backward=20 * gather_s)
    timing = play(plan, each, on)
    # The first gather and the last reduction have nothing to hide behind.
    assert timing.exposed_s == pytest.approx(2 * gather_s, rel=0.2)


def test_without_prefetch_being_possible_a_gather_is_waited_for() -> None:
    """Gathers begin after what was computed before: with one unit nothing overlaps."""
    plan = schedule(1)
    gather_s = 2 * ELEMS * 7 / 8 / 1e9
    timing = play(plan, UnitSeconds(forward=1e-3, backward=1e-3), cluster(gigabytes_per_s=1.0))
    assert timing.step_s == pytest.approx(2e-3 + 2 * gather_s, rel=0.01)


def test_two_reductions_travel_and_the_backward_after_them_waits() -> None:
    plan = schedule(6, "zero2", reduce="fp32")
    reduce_s = 4 * ELEMS * 7 / 8 / 1e9
    timing = play(plan, UnitSeconds(backward=reduce_s / 10), cluster(gigabytes_per_s=1.0))
    backwards = [span for span in timing.spans if span.name.startswith("backward")]
    first, second, third = backwards[:3]
    assert second.begin_s == pytest.approx(first.end_s)
    assert third.begin_s == pytest.approx(first.end_s + reduce_s, rel=0.01)


def test_latency_comes_with_every_operation_of_a_communicator() -> None:
    plan = schedule(8)
    slow = play(plan, UnitSeconds(), cluster(1e6, latency_us=100.0)).step_s
    num_gathers = sum(event.verb == "gather" for event in step_events(plan))
    assert slow >= num_gathers * 100e-6


def test_collectives_slow_down_what_runs_beside_them() -> None:
    plan = schedule(4)
    each = UnitSeconds(forward=1e-3, backward=2e-3)
    alone = play(plan, each, cluster()).step_s
    beside = play(plan, each, cluster(), Wear(contention=2.0))
    busy_s = beside.busy_s["intra"]
    assert alone < beside.step_s <= alone + busy_s / 2 + 1e-6


def test_the_computation_cannot_overtake_the_host() -> None:
    plan = schedule(4, "ddp")
    each = UnitSeconds(forward=1e-4, backward=2e-4, forward_kernels=10, backward_kernels=20)
    assert play(plan, each, cluster(1e9), Wear(launch_s=1e-4)).step_s == pytest.approx(12e-3, rel=0.01)


def test_updates_hide_behind_the_last_reductions_unless_gradients_are_clipped() -> None:
    plan = schedule(8, "zero2", reduce="fp32")
    each = UnitSeconds(forward=1e-3, backward=2e-3, update=1e-3)
    on = cluster(gigabytes_per_s=1.0)
    assert play(plan, each, on, clips=True).step_s > play(plan, each, on).step_s + 1e-3


def test_hybrid_layouts_use_both_wires_at_once() -> None:
    timing = play(schedule(8, "hsdp", nodes=2), UnitSeconds(), cluster(1.0, nodes=2))
    assert timing.busy_s["inter"] > 0
    assert timing.step_s < sum(timing.busy_s.values())


def test_what_the_host_updates_comes_back_before_the_next_forward() -> None:
    layout = Layout("whole", "world", "world", "always", optimizer_on="host")
    plan = schedule(8, layout)
    on = cluster(gigabytes_per_s=1e6)
    timing = play(plan, UnitSeconds(forward=1e-6, backward=1e-6), on)
    # A node's cores update the parts of its 8 ranks; gradients of 2 bytes go out, weights of 2 come back.
    host_s = 8 * ELEMS / on.host_adam_elems_per_s
    assert timing.busy_s["host"] == pytest.approx(host_s)
    assert timing.busy_s["to_host"] == pytest.approx(on.pcie.seconds(8 * ELEMS // 8 * 2))
    assert timing.step_s > host_s
    assert {"copy", "host"} <= {span.lane for span in timing.spans}


def test_clipping_lets_the_host_wait_for_all_gradients() -> None:
    layout = Layout("whole", "world", "world", "always", optimizer_on="host")
    each = UnitSeconds(forward=1e-3, backward=2e-3)
    plan, on = schedule(8, layout), cluster()
    assert play(plan, each, on, clips=True).step_s > play(plan, each, on).step_s


def test_a_disk_is_read_and_written_beside_everything_else() -> None:
    layout = Layout("whole", "world", "world", "always", optimizer_on="disk")
    timing = play(schedule(4, layout), UnitSeconds(forward=1e-3, backward=1e-3), cluster())
    assert timing.busy_s["read"] > 0
    assert timing.busy_s["write"] > timing.busy_s["read"]


def test_spans_lie_in_the_step_and_lanes_run_in_order() -> None:
    timing = play(schedule(6), UnitSeconds(forward=1e-4, backward=2e-4, update=1e-5), cluster())
    assert {span.lane for span in timing.spans} == {"compute", "gather", "reduce"}
    assert all(span.begin_s >= -1e-9 for span in timing.spans)
    computed = [span for span in timing.spans if span.lane == "compute"]
    assert all(one.end_s <= other.begin_s + 1e-12 for one, other in pairwise(computed))


def test_a_step_of_82_units_is_played_in_milliseconds() -> None:
    plan = schedule(82, nodes=128)
    events = step_events(plan)
    seconds = {unit.name: UnitSeconds(1e-3, 2e-3) for unit in plan.units}
    on = cluster(nodes=128)
    step_time(plan, events, seconds, on)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        step_time(plan, events, seconds, on)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.02


def test_shares_of_the_peak_and_days() -> None:
    assert mfu(6e9, 10_000, 1e14) == pytest.approx(0.6)
    assert days_for(86_400e6, 1e6) == pytest.approx(1.0)
