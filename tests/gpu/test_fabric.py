"""The emulated fabric on a device: its delays against the device's own clock, alone, together and beside other work."""

import statistics
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.bench import fabric
from shardwise.planner.hardware.links import Fabric, Link, plan_transfer

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


@pytest.fixture
def start() -> Iterator[Callable[..., None]]:
    torch.cuda.set_device(0)
    yield fabric.start
    torch.cuda.synchronize()
    if dist.is_initialized():
        dist.destroy_process_group()


class Gather:
    """An all-gather over some ranks, in place, in memory that has been seen."""

    def __init__(self, ranks: list[int], num_bytes: int = NUM_BYTES) -> None:
        self.ranks = ranks
        self.group = dist.new_group(ranks)
        self.whole = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
        self.shard = self.whole.view(len(ranks), -1)[ranks.index(0)]
        all_gather(self.whole, self.shard, group=self.group)

    def start(self) -> dist.Work:
        return all_gather(self.whole, self.shard, group=self.group, async_op=True)

    def alone_s(self, of: Fabric = FABRIC) -> float:
        return plan_transfer(of, "all_gather", self.whole.nbytes, self.ranks, 0).alone_s


def start_and_wait(*gathers: Gather) -> None:
    for work in [gather.start() for gather in gathers]:
        work.wait()


def seen_s(queue: Callable[[], object], tries: int = 5) -> float:
    """The median time of what is queued on the current stream, by the device's events."""
    found = []
    for _ in range(tries):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        queue()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(found)


@pytest.mark.parametrize("ranks", [NODE, REPLICATE, WORLD])
@pytest.mark.parametrize("copies", [False, True])
def test_a_transfer_takes_as_long_as_planned(start: Callable[..., None], ranks: list[int], copies: bool) -> None:
    start(Fabric(2, 4, FABRIC.intra, FABRIC.inter, copies))
    gather = Gather(ranks)
    assert seen_s(lambda: start_and_wait(gather)) == pytest.approx(gather.alone_s(), rel=TOLERANCE)
    before = fabric.busy_s()
    start_and_wait(gather)
    planned = plan_transfer(FABRIC, "all_gather", NUM_BYTES, ranks, 0).occupied_s
    assert {wire: seconds - before[wire] for wire, seconds in fabric.busy_s().items()} == pytest.approx(
        planned, rel=1e-6, abs=1e-9
    )


@pytest.mark.parametrize("rate", [100.0, 360.0, 900.0])
def test_copies_keep_the_pace_of_the_wire(start: Callable[..., None], rate: float) -> None:
    fast = Fabric(1, 4, Link(rate, 20.0), copies=True)
    start(fast)
    gather = Gather(NODE, 1 << 30)
    assert seen_s(lambda: start_and_wait(gather)) == pytest.approx(gather.alone_s(fast), rel=0.1)


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
        planned_s = plan_transfer(FABRIC, kind, NUM_BYTES, NODE, 0).alone_s
        # A reduce-scatter also copies this rank's part before it takes the wire.
        assert seen_s(operation) == pytest.approx(planned_s, rel=2 * TOLERANCE), kind


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
    assert seen_s(queue) == pytest.approx(planned_s, rel=TOLERANCE)


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

    assert seen_s(queue) == pytest.approx(max(in_node.alone_s(), between.alone_s()), rel=TOLERANCE)


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


@pytest.mark.parametrize("copies", [False, True])
def test_in_a_cuda_graph(start: Callable[..., None], copies: bool) -> None:
    """Two graphs, replays in turn with transfers outside of them; every replay is counted."""
    start(Fabric(2, 4, FABRIC.intra, FABRIC.inter, copies))
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


def test_copies_move_memory(start: Callable[..., None]) -> None:
    """What one half of the scratch buffer holds is in the other once that much was gathered."""
    start(Fabric(1, 4, Link(400.0, 20.0), copies=True))
    scratch = fabric._started().scratch
    source, target = scratch.view(2, -1)
    gather = Gather(NODE, 4 * source.numel() // 3 // 64 * 64)
    source.random_(1, 255)
    target.zero_()
    torch.cuda.synchronize()
    start_and_wait(gather)
    torch.cuda.synchronize()
    carried = (source == target).sum().item()
    assert carried == gather.whole.numel() * 3 // 4 // 16 * 16


def test_copies_are_felt_by_memory(start: Callable[..., None]) -> None:
    """A long copy of device memory beside a transfer is slower when the transfer has copies."""
    source = torch.ones(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def beside_s(copies: bool) -> float:
        fast = Fabric(1, 4, Link(800.0, 20.0), copies=copies)
        start(fast)
        gather = Gather(NODE, 8 << 30)
        assert gather.alone_s(fast) > 5e-3  # the copies below take about 3 ms

        def queue() -> None:
            gather.start()
            for _ in range(3):
                target.copy_(source)

        found_s = seen_s(queue)
        torch.cuda.synchronize()
        dist.destroy_process_group()
        return found_s

    assert beside_s(copies=True) > 1.05 * beside_s(copies=False)


def test_the_host_is_not_kept(start: Callable[..., None]) -> None:
    """To queue an operation takes microseconds and does not wait for the device."""
    start(Fabric(1, 4, Link(1e6, 0.0)))
    gather = Gather(NODE)
    begin_s = time.perf_counter()
    for _ in range(500):
        gather.start().wait()
    each_us = (time.perf_counter() - begin_s) / 500 * 1e6
    torch.cuda.synchronize()
    print(f"{each_us:.1f} us of host time for an asynchronous gather and its wait")
    assert each_us < 100
