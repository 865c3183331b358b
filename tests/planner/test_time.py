"""The step's time: waits, overlap, wires that are shared, all against sums done by hand."""

from dataclasses import replace
from itertools import pairwise

import pytest

from shardwise.base.dtypes import FP32
from shardwise.bench.measure import count_calls
from shardwise.core.layout import Layout, layout_of, layouts_for
from shardwise.core.precision import precision_of
from shardwise.core.schedule.flat import flats_of
from shardwise.core.schedule.model import Param, Site, UnitSpec
from shardwise.core.schedule.step_schedule import Schedule, UnitPlan, make_schedule
from shardwise.core.wire.codec import encoded_bytes
from shardwise.planner.cost.compute import UnitSeconds
from shardwise.planner.cost.peak import with_activation_copies
from shardwise.planner.cost.step_time import BOTH_WAYS, COLLECTIVES, Lanes, Timing, step_time
from shardwise.planner.events import step_events
from shardwise.planner.hardware.cluster import Cluster, make_cluster
from shardwise.planner.hardware.gpus import CODING, IDEAL, Overheads
from shardwise.planner.hardware.links import Link

ELEMS = 1 << 20


def cluster(gigabytes_per_s: float = 100.0, nodes: int = 1, latency_us: float = 0.0) -> Cluster:
    found = make_cluster("8xH200", nodes)
    return replace(found, intra=Link(gigabytes_per_s, latency_us), inter=Link(10.0, latency_us), switch=None)


def schedule(num_units: int, strategy: str | Layout = "zero3", nodes: int = 1, reduce: str = "bf16") -> Schedule:
    names = [f"blocks.{index}" for index in range(num_units)]
    axes = {"world": (8 * nodes, 0), "node": (8, 0), "replicate": (nodes, 0)}
    units = []
    for name, layout in zip(names, layouts_for(strategy, names), strict=True):
        param = Param(f"{name}.weight", (1024, ELEMS // 1024), FP32, True, (Site(name, "weight"),))
        flats = flats_of(UnitSpec(name, name, (param,), False, True), layout, precision_of("bf16", reduce), axes, ())
        units.append(UnitPlan(name, layout, flats, False, True))
    return make_schedule(units, range(num_units), None)


def play(
    plan: Schedule, each: UnitSeconds, on: Cluster, wear: Overheads = IDEAL, clips: bool = False, num: int = 1
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
    assert timing.step_s - timing.compute_s - timing.update_s == pytest.approx(2 * gather_s, rel=0.2)


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
    beside = play(plan, each, cluster(), Overheads(lost=0.5))
    busy_s = beside.busy_s["intra"]
    assert alone < beside.step_s <= alone + busy_s / 2 + 1e-6


def test_a_slow_collective_takes_little_from_the_computation() -> None:
    plan, each, wear = schedule(4), UnitSeconds(forward=1e-3, backward=2e-3), Overheads(contention=2.0)
    slower = {}
    for rate in (20.0, 200.0):
        alone, beside = (play(plan, each, cluster(rate), overheads) for overheads in (IDEAL, wear))
        slower[rate] = (beside.step_s - alone.step_s) / beside.busy_s["intra"]
    # Blocks of 25 GB/s on 132 multiprocessors; gathers pass memory twice, reductions three times.
    assert 0 < slower[20.0] < 2 * (20 / 25 / 132 + 3 * 20 / 4800)
    assert slower[200.0] > 5 * slower[20.0]


def test_the_computation_cannot_overtake_the_host() -> None:
    plan = schedule(4, "ddp")
    each = UnitSeconds(forward=1e-4, backward=2e-4, forward_kernels=10, backward_kernels=20)
    assert play(plan, each, cluster(1e9), Overheads(launch_s=1e-4)).step_s == pytest.approx(12e-3, rel=0.01)


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


OFFLOADED = layout_of("zero2_offload")


def spans_of(timing: Timing, lane: str) -> list[str]:
    return [span.name for span in timing.spans if span.lane == lane]


def test_clipping_lets_the_host_wait_for_all_gradients() -> None:
    each = UnitSeconds(forward=1e-3, backward=2e-3)
    plan, on = schedule(8, OFFLOADED), slow_host(5e-3)
    assert play(plan, each, on, clips=True).step_s > play(plan, each, on).step_s + 1e-2


def test_the_host_updates_in_the_order_of_the_next_forward() -> None:
    """With clipping, all gradients are there. The forward runs behind the updates, one unit late."""
    plan, on = schedule(8, OFFLOADED), slow_host(1e-3)
    each = UnitSeconds(forward=1e-4, backward=1e-4)
    timing = play(plan, each, on, clips=True)
    assert spans_of(timing, "host") == [f"update blocks.{index}" for index in range(8)]
    backward_s = 8 * 1e-4
    assert timing.step_s == pytest.approx(backward_s + 8e-3 + 1e-4, rel=0.05)


def test_without_clipping_the_host_updates_inside_the_backward() -> None:
    plan, on = schedule(8, OFFLOADED), slow_host(1e-3)
    timing = play(plan, UnitSeconds(forward=1e-3, backward=2e-3), on)
    backward = next(span for span in timing.spans if span.name == "backward blocks.0")
    early = [span for span in timing.spans if span.lane == "host" and span.end_s < backward.begin_s]
    # The first unit's is left from the step before. In a backward the last units are through first.
    assert [span.name for span in early] == ["update blocks.0", *(f"update blocks.{at}" for at in (7, 6, 5, 4, 3, 2))]
    assert timing.step_s == pytest.approx(8 * 3e-3 + 1e-3, rel=0.01)


def test_of_what_has_arrived_the_host_takes_what_is_needed_first() -> None:
    """Gradients come faster than the host updates: it begins with the first to come, then the last is needed first."""
    plan, on = schedule(4, OFFLOADED), slow_host(1e-2)
    timing = play(plan, UnitSeconds(forward=1e-3, backward=1e-3), on)
    assert spans_of(timing, "host") == [f"update blocks.{index}" for index in (0, 1, 2, 3)]
    # Between the last of its updates and the next gradient lie two forwards and a backward.
    assert timing.step_s == pytest.approx(4e-2 + 3e-3, rel=0.01)


def slow_host(unit_s: float) -> Cluster:
    """A unit's update takes so long."""
    return replace(cluster(gigabytes_per_s=1e6), host_adam_elems_per_s=ELEMS / unit_s, pcie=Link(1e3, 0.0))


def slow_bus(gigabytes_per_s: float) -> Cluster:
    return replace(cluster(1e6), pcie=Link(gigabytes_per_s, 0.0), host_adam_elems_per_s=1e15)


def test_a_slot_is_free_when_its_gradients_have_left() -> None:
    plan = schedule(6, OFFLOADED, reduce="fp32")
    copy_s = 4 * ELEMS / 8 / 1e9
    timing = play(plan, UnitSeconds(backward=copy_s / 10), slow_bus(1.0))
    first, second, third = [span for span in timing.spans if span.name.startswith("backward")][:3]
    assert second.begin_s == pytest.approx(first.end_s)
    assert third.begin_s == pytest.approx(first.end_s + copy_s, rel=0.01)


def test_gradients_that_rest_on_the_device_have_three_places_to_leave_from() -> None:
    plan = schedule(6, "ddp+optimizer=host", reduce="fp32")
    copy_s = 4 * ELEMS / 1e9
    timing = play(plan, UnitSeconds(backward=copy_s / 10), slow_bus(1.0))
    backwards = [span for span in timing.spans if span.name.startswith("backward")]
    assert backwards[2].begin_s == pytest.approx(backwards[1].end_s)
    assert backwards[3].begin_s == pytest.approx(backwards[0].end_s + copy_s, rel=0.01)


def test_both_ways_at_once_are_slower_than_each_alone() -> None:
    """Parameters come while gradients leave."""
    plan = schedule(32, "zero3_offload", reduce="bf16")
    timing = play(plan, UnitSeconds(), slow_bus(1.0))
    both = timing.busy_s["to_host"] + timing.busy_s["to_device"]
    assert timing.busy_s["bus"] == pytest.approx(both / BOTH_WAYS)
    assert timing.step_s >= timing.busy_s["bus"]


def test_sums_on_the_host_come_back_to_be_added_to() -> None:
    plan = schedule(4, OFFLOADED)
    one, three = (play(plan, UnitSeconds(), slow_bus(1.0), num=num).busy_s for num in (1, 3))
    assert three["to_host"] == pytest.approx(3 * one["to_host"])
    assert three["to_device"] - one["to_device"] == pytest.approx(2 * one["to_host"])


def test_the_norm_of_what_leaves_is_taken_from_the_backward() -> None:
    each = UnitSeconds(forward=1e-3, backward=2e-3)
    alone, beside = (
        play(schedule(8, OFFLOADED), seconds, slow_bus(1e3), clips=True).step_s
        for seconds in (each, replace(each, norm_of_offloaded=1e-3))
    )
    assert beside == pytest.approx(alone + 7e-3, rel=0.1)


def stowing(num_units: int, each: UnitSeconds, copy_s: float) -> Timing:
    """Every unit leaves as much as takes so long to copy."""
    plan = schedule(num_units, "ddp+activations=host")
    stowed = {unit.name: round(copy_s * 1e9) for unit in plan.units}
    events = list(with_activation_copies(step_events(plan), stowed))
    return step_time(plan, events, {unit.name: each for unit in plan.units}, slow_bus(1.0))


def test_activations_come_and_go_behind_the_computation() -> None:
    timing = stowing(8, UnitSeconds(forward=2e-3, backward=4e-3), copy_s=1e-3)
    assert timing.step_s == pytest.approx(8 * 6e-3, rel=0.01)
    assert timing.busy_s["to_host"] == pytest.approx(7e-3)  # the last one's stay
    assert timing.busy_s["to_device"] == pytest.approx(6e-3)


def test_a_forward_waits_for_activations_of_the_unit_before_the_last() -> None:
    timing = stowing(8, UnitSeconds(forward=1e-3, backward=1e-3), copy_s=5e-3)
    forwards = [span for span in timing.spans if span.name.startswith("forward")]
    assert forwards[1].begin_s == pytest.approx(1e-3, rel=0.01)
    assert forwards[2].begin_s == pytest.approx(6e-3, rel=0.01)
    assert forwards[3].begin_s == pytest.approx(11e-3, rel=0.01)


def test_a_backward_waits_for_its_activations() -> None:
    timing = stowing(8, UnitSeconds(forward=1e-3, backward=1e-3), copy_s=5e-3)
    backwards = [span for span in timing.spans if span.name.startswith("backward")]
    # The last two are there; each of the others is fetched when the backward behind it begins.
    assert backwards[1].begin_s == pytest.approx(backwards[0].end_s)
    for one, other in pairwise(backwards[1:]):
        assert other.begin_s >= one.begin_s + 5e-3 - 1e-9


def test_a_disk_is_read_and_written_beside_everything_else() -> None:
    layout = Layout("whole", "world", "world", "always", optimizer_on="disk")
    timing = play(schedule(4, layout), UnitSeconds(forward=1e-3, backward=1e-3), cluster())
    assert timing.busy_s["read"] > 0
    assert timing.busy_s["write"] > timing.busy_s["read"]
    # In turns.
    assert timing.busy_s["disk"] == pytest.approx(timing.busy_s["write"] + timing.busy_s["read"])
    assert timing.step_s >= timing.busy_s["disk"]
    assert {"host", "disk"} <= {span.lane for span in timing.spans}


def test_parameters_on_disk_are_read_for_every_gather() -> None:
    """A unit more is read ahead than is computed, so the disk is never idle."""
    plan = schedule(8, "zero3_nvme")
    timing = play(plan, UnitSeconds(forward=1e-6, backward=1e-6), cluster())
    num_bytes = sum(move.num_bytes for event in step_events(plan) for move in event.moves if move.way == "read")
    assert timing.busy_s["read"] == pytest.approx(8 * num_bytes / cluster().disk_read_bytes_per_s)
    assert timing.step_s == pytest.approx(timing.busy_s["disk"], rel=0.05)


def test_spans_lie_in_the_step_and_lanes_run_in_order() -> None:
    timing = play(schedule(6), UnitSeconds(forward=1e-4, backward=2e-4, update=1e-5), cluster())
    assert {span.lane for span in timing.spans} == {"compute", "gather", "reduce"}
    assert all(span.begin_s >= -1e-9 for span in timing.spans)
    computed = [span for span in timing.spans if span.lane == "compute"]
    assert all(one.end_s <= other.begin_s + 1e-12 for one, other in pairwise(computed))


def test_a_step_of_82_units_is_played_in_few_calls() -> None:
    plan = schedule(82, nodes=128)
    events = step_events(plan)
    seconds = {unit.name: UnitSeconds(1e-3, 2e-3) for unit in plan.units}
    on = cluster(nodes=128)
    step_time(plan, events, seconds, on)
    assert sum(count_calls(lambda: step_time(plan, events, seconds, on)).values()) < 20_000


# ---------------------------------------------------------------------------------------------------------
# what travels encoded


def coded(strategy: str, verb: str, nodes: int = 1) -> list[tuple[int, int]]:
    """Bytes of the device's memory that a step's events of one kind read and write, before and after they travel."""
    events = step_events(schedule(2, strategy, nodes))
    return [(event.encode_bytes, event.decode_bytes) for event in events if event.verb == verb]


def rows_of(codec: str, num_elems: int, num_rows: int) -> int:
    return num_rows * encoded_bytes(codec, num_elems // num_rows)


def test_what_travels_as_it_is_is_not_encoded() -> None:
    for verb in ("gather", "reduce", "update"):
        assert set(coded("hpz", verb, nodes=2)) == {(0, 0)}


def test_a_gather_encodes_a_part_and_decodes_all_of_it() -> None:
    rows = rows_of("int8", ELEMS, 8)
    assert set(coded("zero3+params_as=int8", "gather")) == {(2 * ELEMS // 8 + rows // 8, rows + 2 * ELEMS)}
    assert set(coded("zero3+params_as=int8", "reduce")) == {(0, 0)}


def test_a_copy_at_rest_is_encoded_once_a_step() -> None:
    rows, all_of_it = rows_of("int8", ELEMS, 16), rows_of("int8", ELEMS, 16) + 2 * ELEMS
    encoded, copied = 2 * ELEMS // 16 + rows // 16, 2 * rows // 8
    schedule_of_four = schedule(4, "zeropp", nodes=2)
    gathers = [event for event in step_events(schedule_of_four) if event.verb == "gather"]
    assert [event.encode_bytes for event in gathers] == [encoded + copied] * 4 + [copied] * 2
    assert {event.decode_bytes for event in gathers} == {all_of_it}


def test_a_reduction_encodes_before_every_hop_and_sums_after_it() -> None:
    """Inside the node first, then an eighth of it across; bf16 gradients."""
    inside, across = rows_of("int4", ELEMS, 8), rows_of("int4", ELEMS // 8, 2)
    part = 2 * ELEMS // 8
    after = (inside + part) + (part + across) + (across + part // 2)
    assert set(coded("zero3+grads_as=int4", "reduce", nodes=2)) == {(2 * ELEMS + inside, after)}


def test_a_sum_that_all_ranks_want_is_encoded_once_more() -> None:
    rows, part = rows_of("int8", ELEMS, 8), 2 * ELEMS // 8
    after = (rows + part) + (part + rows // 8) + (rows + 2 * ELEMS)
    assert set(coded("ddp+grads_as=int8", "reduce")) == {(2 * ELEMS + rows, after)}


def test_feedback_reads_and_writes_more() -> None:
    (plain, after), *_ = coded("zero3+grads_as=int4", "reduce")
    (fed_back, as_before), *_ = coded("zero3+grads_as=int4:feedback", "reduce")
    assert fed_back - plain == (3 * 2 + 6 * 2) * ELEMS + rows_of("int4", ELEMS, 8)
    assert as_before == after


@pytest.mark.parametrize("strategy", ["zero3+params_as=int8+grads_as=int4", "ddp+grads_as=int8", "zeropp"])
def test_encoding_takes_the_device_from_the_computation(strategy: str) -> None:
    """Where no wire is waited for, a step is the longer by what is encoded and decoded in it; and by the first gather
    and the last reduction once more, which nothing is computed beside."""
    on, each = cluster(gigabytes_per_s=1e9), UnitSeconds(forward=1e-3, backward=2e-3)
    plan, exact = schedule(4, strategy), schedule(4, layout_of(strategy).exact)
    sizes = [event.encode_bytes + event.decode_bytes for event in step_events(plan) if event.verb in COLLECTIVES]
    num_bytes = sum(sizes) + sizes[0] + sizes[-1]
    coding_s = num_bytes / (CODING * on.gpu.hbm_bytes_per_s)
    assert Lanes(on, IDEAL).coding_s(num_bytes) == pytest.approx(coding_s)
    assert play(plan, each, on).step_s - play(exact, each, on).step_s == pytest.approx(coding_s, rel=0.01)


def test_a_unit_waits_until_its_weights_are_decoded() -> None:
    """Nothing else to do, and wires that take no time: gathers follow each other on their lane."""
    on, plan = cluster(gigabytes_per_s=1e9), schedule(4, "zero3+params_as=int8")
    gathers = [event for event in step_events(plan) if event.verb == "gather"]
    coding_s = Lanes(on, IDEAL).coding_s(sum(event.encode_bytes + event.decode_bytes for event in gathers))
    assert play(plan, UnitSeconds(), on).step_s >= coding_s
    slower = replace(IDEAL, coding=CODING / 10)
    assert play(plan, UnitSeconds(), on, slower).step_s >= 10 * coding_s


def test_fewer_bits_are_faster_on_slow_wires() -> None:
    on, each = cluster(gigabytes_per_s=1.0), UnitSeconds(forward=1e-5, backward=2e-5)
    exact, encoded = (play(schedule(8, name), each, on).step_s for name in ("zero3", "zero3+params_as=int8"))
    assert encoded < 0.75 * exact
