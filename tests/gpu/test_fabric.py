"""The emulated fabric on a device: its delays against the device's own clock, alone, together and beside other work."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.base.errors import ConfigurationError
from shardwise.bench import fabric
from shardwise.planner.hardware.links import Fabric, Link, plan_transfer
from tests.support.links import alone_s

pytestmark = pytest.mark.gpu

# torch 2.13 renamed the flat collectives; 2.11 has only the older names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

WORLD = list(range(8))
NODE = [0, 1, 2, 3]
REPLICATE = [0, 4]
NUM_BYTES = 512 << 20
FABRIC = Fabric(2, 4, Link(50.0, 20.0), Link(25.0, 30.0))
TOLERANCE = 0.02
# While products fill the device, the thread blocks of a transfer wait until some of its SMs are free.
BUSY_TOLERANCE = 0.15


@pytest.fixture
def start() -> Iterator[Callable[..., None]]:
    torch.cuda.set_device(0)
    yield fabric.start
    torch.cuda.synchronize()
    if dist.is_initialized():
        dist.destroy_process_group()


class Gather:
    """An all-gather over some ranks, in place."""

    def __init__(self, ranks: list[int], num_bytes: int = NUM_BYTES) -> None:
        self.ranks = ranks
        self.group = dist.new_group(ranks)
        self.whole = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
        self.shard = self.whole.view(len(ranks), -1)[ranks.index(0)]
        all_gather(self.whole, self.shard, group=self.group)

    def start(self) -> dist.Work:
        return all_gather(self.whole, self.shard, group=self.group, async_op=True)

    def alone_s(self, of: Fabric = FABRIC) -> float:
        return alone_s(plan_transfer(of, "all_gather", self.whole.nbytes, self.ranks, 0))


def start_and_wait(*gathers: Gather) -> None:
    for work in [gather.start() for gather in gathers]:
        work.wait()


def seen_s(queue: Callable[[], object], tries: int = 5) -> float:
    """The median time of what is queued on the current stream, by the device's events."""
    found = []
    for _ in range(tries):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)  # about 2 ms, in which the host queues everything
        begin.record()
        queue()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(found)


@pytest.mark.parametrize("ranks", [NODE, REPLICATE, WORLD])
def test_a_transfer_takes_as_long_as_planned(start: Callable[..., None], ranks: list[int]) -> None:
    start(FABRIC)
    gather = Gather(ranks)
    assert seen_s(lambda: start_and_wait(gather)) == pytest.approx(gather.alone_s(), rel=TOLERANCE)
    before = fabric.busy_s()
    start_and_wait(gather)
    planned = plan_transfer(FABRIC, "all_gather", NUM_BYTES, ranks, 0).occupied_s
    assert {wire: seconds - before[wire] for wire, seconds in fabric.busy_s().items()} == pytest.approx(
        planned, rel=1e-6, abs=1e-9
    )


@pytest.mark.parametrize("rate", [100.0, 400.0, 1000.0])
def test_data_comes_at_the_pace_of_the_wire(start: Callable[..., None], rate: float) -> None:
    fast = Fabric(1, 4, Link(rate, 20.0))
    start(fast)
    gather = Gather(NODE, 1 << 30)
    assert seen_s(lambda: start_and_wait(gather)) == pytest.approx(gather.alone_s(fast), rel=0.05)


def test_a_link_that_is_too_fast_to_write_is_refused(start: Callable[..., None]) -> None:
    with pytest.raises(ConfigurationError, match="intra=5000GB/s cannot be emulated"):
        start(Fabric(1, 4, Link(5000.0, 20.0)))
    with pytest.raises(ConfigurationError, match="cannot be emulated"):  # by measurement
        start(Fabric(1, 4, Link(4000.0, 20.0)))
    assert not dist.is_initialized()
    start(Fabric(1, 4, Link(400.0, 20.0), Link(5000.0, 20.0)))  # no rank is behind the second link


@pytest.mark.parametrize("num_elems", [1 << 20, 1000, 3])
@pytest.mark.parametrize("in_place", [True, False])
def test_every_gather_writes_all_of_its_output(start: Callable[..., None], num_elems: int, in_place: bool) -> None:
    """Each time: a contender that multiplies what an allocator left there would be faster than the computation."""
    start(FABRIC, rank=2)
    group = dist.new_group(NODE)
    whole = torch.empty(4 * num_elems, device="cuda", dtype=torch.bfloat16)
    slots = whole.view(4, num_elems)
    for _ in range(2):
        values = torch.randn(num_elems, device="cuda").bfloat16()
        whole.fill_(torch.nan)
        shard = slots[2].copy_(values) if in_place else values
        all_gather(whole, shard, group=group)
        torch.cuda.synchronize()
        assert torch.equal(slots, values.expand(4, -1))


@pytest.mark.parametrize("num_elems", [1 << 20, 1000, 3])
def test_reductions_return_this_ranks_numbers(start: Callable[..., None], num_elems: int) -> None:
    start(FABRIC, rank=2)
    group = dist.new_group(NODE)
    whole, shard = torch.randn(4 * num_elems, device="cuda"), torch.empty(num_elems, device="cuda")
    before = whole.clone()
    reduce_scatter(shard, whole, group=group)
    dist.all_reduce(whole, group=group)
    reduce_scatter(whole.view(4, -1)[2], whole, group=group)
    torch.cuda.synchronize()
    assert torch.equal(whole, before)
    assert torch.equal(shard, before.view(4, -1)[2])


def test_other_operations_take_as_long_as_planned(start: Callable[..., None]) -> None:
    start(FABRIC)
    group = dist.new_group(NODE)
    whole = torch.ones(NUM_BYTES // 4, device="cuda")
    shard = torch.empty(NUM_BYTES // 16, device="cuda")
    operations = {
        "reduce_scatter": lambda: reduce_scatter(shard, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, src=0, group=group),
    }
    for kind, operation in operations.items():
        operation()
        planned_s = alone_s(plan_transfer(FABRIC, kind, NUM_BYTES, NODE, 0))
        assert seen_s(operation) == pytest.approx(planned_s, rel=TOLERANCE), kind


def test_operations_of_a_group_queue(start: Callable[..., None]) -> None:
    start(FABRIC)
    gather = Gather(NODE)
    assert seen_s(lambda: start_and_wait(gather, gather, gather)) == pytest.approx(3 * gather.alone_s(), rel=TOLERANCE)


def test_a_synchronous_operation_comes_after_an_asynchronous_one(start: Callable[..., None]) -> None:
    start(FABRIC)
    gather = Gather(NODE)

    def both() -> None:
        work = gather.start()
        all_gather(gather.whole, gather.shard, group=gather.group)
        work.wait()

    assert seen_s(both) == pytest.approx(2 * gather.alone_s(), rel=TOLERANCE)


def products() -> Callable[[], Tensor]:
    """A few milliseconds of matrix products that fill the device."""
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def multiply() -> Tensor:
        for _ in range(4):
            product = matrix @ matrix
        return product

    multiply()
    return multiply


@pytest.mark.parametrize("busy", [False, True])
def test_groups_that_share_a_wire_add_up(start: Callable[..., None], busy: bool) -> None:
    start(FABRIC)
    one, other = Gather(NODE), Gather(NODE)
    multiply = products()

    def queue() -> None:
        works = [one.start(), other.start()]
        if busy:
            multiply()
        for work in works:
            work.wait()

    planned_s = one.alone_s() + other.alone_s() - FABRIC.intra.latency_us * 1e-6
    assert seen_s(multiply) < planned_s  # the products end before the transfers do
    assert seen_s(queue) == pytest.approx(planned_s, rel=BUSY_TOLERANCE if busy else TOLERANCE)


@pytest.mark.parametrize("busy", [False, True])
def test_groups_on_different_wires_overlap(start: Callable[..., None], busy: bool) -> None:
    start(FABRIC)
    in_node, between = Gather(NODE, 2 * NUM_BYTES), Gather(REPLICATE, 2 * NUM_BYTES)
    multiply = products()

    def queue() -> None:
        works = [in_node.start(), between.start()]
        if busy:
            multiply()
        for work in works:
            work.wait()

    planned_s = max(in_node.alone_s(), between.alone_s())
    assert seen_s(queue) == pytest.approx(planned_s, rel=BUSY_TOLERANCE if busy else TOLERANCE)


def test_the_world_shares_both_wires(start: Callable[..., None]) -> None:
    start(FABRIC)
    everywhere, in_node, between = Gather(WORLD), Gather(NODE), Gather(REPLICATE)
    transfers = [plan_transfer(FABRIC, "all_gather", NUM_BYTES, ranks, 0) for ranks in (WORLD, NODE, REPLICATE)]
    wire_s = {wire: sum(transfer.occupied_s[wire] for transfer in transfers) for wire in ("intra", "inter")}
    assert seen_s(lambda: start_and_wait(everywhere, in_node, between)) == pytest.approx(
        max(wire_s.values()), rel=TOLERANCE
    )


def captured(gathers: list[Gather]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        start_and_wait(*gathers)
        for gather in gathers:
            all_gather(gather.whole, gather.shard, group=gather.group)  # and on the capture's own stream
    return graph


def test_in_a_cuda_graph(start: Callable[..., None]) -> None:
    """Two graphs, replays in turn with transfers outside of them; every replay is counted."""
    start(FABRIC)
    gather = Gather(NODE)
    start_and_wait(gather)
    graphs = [captured([gather]) for _ in range(2)]
    start_and_wait(gather)
    for graph in graphs:
        assert seen_s(graph.replay) == pytest.approx(2 * gather.alone_s(), rel=TOLERANCE)
        start_and_wait(gather)
    before = fabric.busy_s()["intra"]
    for _ in range(3):
        graphs[0].replay()
    occupied_s = plan_transfer(FABRIC, "all_gather", NUM_BYTES, NODE, 0).occupied_s["intra"]
    assert fabric.busy_s()["intra"] - before == pytest.approx(6 * occupied_s, rel=1e-6)


def test_transfers_are_felt_by_memory(start: Callable[..., None]) -> None:
    """A long copy of device memory is slower next to a fast transfer."""
    start(Fabric(1, 4, Link(800.0, 20.0)))
    source = torch.ones(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    gather = Gather(NODE, 8 << 30)
    assert gather.alone_s(Fabric(1, 4, Link(800.0, 20.0))) > 5e-3  # the copies below take about 3 ms

    def queue() -> None:
        for _ in range(3):
            target.copy_(source)

    alone_s = seen_s(queue)

    def beside() -> None:
        gather.start()
        queue()

    assert seen_s(beside) > 1.05 * alone_s


@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_no_contender_is_faster_than_the_computation(reduce: str) -> None:
    """Whatever a contender leaves out, it multiplies the same matrices of random numbers."""
    words = "--shape blocks-202m-8 --fabric 8 --links 1000 --strategies zero3,ddp --peers fsdp2 --warmup 4 --steps 8"
    command = [sys.executable, "-m", "shardwise", "bench", *words.split(), "--reduce-dtype", reduce, "--json"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds = {row["contender"]: row["seconds"]["median"] for row in json.loads(printed)["rows"]}
    print(seconds)
    floor_s = seconds.pop("compute")
    assert {"fsdp2", "shardwise:zero3", "shardwise:ddp", "compute+update"} == set(seconds)
    assert min(seconds.values()) > 0.99 * floor_s


def test_the_host_is_not_kept(start: Callable[..., None]) -> None:
    """To queue an operation takes microseconds and does not wait for the device."""
    start(Fabric(1, 4, Link(1000.0, 0.0)))
    gather = Gather(NODE, 1 << 10)
    begin_s = time.perf_counter()
    for _ in range(500):
        gather.start().wait()
    each_us = (time.perf_counter() - begin_s) / 500 * 1e6
    torch.cuda.synchronize()
    print(f"{each_us:.1f} us of host time for an asynchronous gather and its wait")
    assert each_us < 100
