"""The emulated fabric: operations take as long as planned, wait for each other where they meet, and all run on it.

Where transfers meet, the fabric's clock is stopped and the instants at which they end are compared exactly. Against
the running clock only lower bounds are exact, because other work on the machine may make anything late.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from shardwise.base.errors import ConfigurationError, StateError
from shardwise.bench import fabric
from shardwise.core.layout import PRESETS
from shardwise.planner.hardware.links import Fabric, Link, Transfer, plan_transfer
from tests.support.links import alone_s

# torch 2.13 renamed the flat collectives; 2.11 has only the older names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

WORLD = list(range(8))
NODE = [0, 1, 2, 3]
REPLICATE = [0, 4]
BUFFER = 1 << 10
# A buffer takes 1/32 s in the node and 1/8 s between nodes, before (N-1)/N; latency of 1 and 2 ms.
SLOW = Fabric(2, 4, Link(BUFFER * 32 / 1e9, 1000.0), Link(BUFFER * 8 / 1e9, 2000.0))


@pytest.fixture
def start() -> Iterator[Callable[..., None]]:
    """`fabric.start`, undone after the test."""
    yield fabric.start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The fabric's clock, stopped at `now_s`."""
    stopped = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr("shardwise.bench.fabric.time", SimpleNamespace(perf_counter=lambda: stopped.now_s))
    return stopped


# ---------------------------------------------------------------------------------------------------------
# groups and their queues


def gather(group: dist.ProcessGroup | None = None, num_bytes: int = BUFFER) -> dist.Work:
    """An asynchronous all-gather into a buffer of `num_bytes`."""
    num_ranks = dist.get_world_size(group)
    whole, shard = torch.zeros(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes // num_ranks, dtype=torch.uint8)
    return all_gather(whole, shard, group=group, async_op=True)


def planned(ranks: list[int], num_bytes: int = BUFFER) -> Transfer:
    return plan_transfer(SLOW, "all_gather", num_bytes, ranks, 0)


def test_ranks_of_groups_are_found(start: Callable[..., None]) -> None:
    start(SLOW, rank=5)
    assert (dist.get_rank(), dist.get_world_size()) == (5, 8)
    assert dist.get_backend() == "emulated"
    assert dist.group.WORLD._ranks == WORLD
    assert dist.new_group([4, 5, 6, 7])._ranks == [4, 5, 6, 7]
    assert dist.new_group([1, 5], use_local_synchronization=True)._ranks == [1, 5]
    assert dist.new_group([5, 1])._place == 1
    assert dist.new_group([0, 4]) == dist.GroupMember.NON_GROUP_MEMBER
    assert dist.new_group()._ranks == WORLD
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    assert mesh.get_group("replicate")._ranks == [1, 5]
    assert mesh.get_group("shard")._ranks == [4, 5, 6, 7]


@pytest.mark.parametrize(("ranks", "wires"), [(NODE, {"intra"}), (REPLICATE, {"inter"}), (WORLD, {"intra", "inter"})])
def test_groups_use_the_wires_of_their_path(start: Callable[..., None], ranks: list[int], wires: set[str]) -> None:
    start(SLOW)
    gather(dist.new_group(ranks))
    assert fabric.moved_bytes() == planned(ranks).moved_bytes
    assert fabric.busy_s() == planned(ranks).occupied_s
    assert {wire for wire, seconds in fabric.busy_s().items() if seconds} == wires


@pytest.mark.parametrize("ranks", [NODE, REPLICATE, WORLD])
def test_a_transfer_takes_as_long_as_planned(start: Callable[..., None], ranks: list[int]) -> None:
    start(SLOW)
    group = dist.new_group(ranks)

    def seen_s() -> float:
        begin_s = time.perf_counter()
        work = gather(group)
        assert not work.is_completed()
        work.wait()
        assert work.is_completed()
        return time.perf_counter() - begin_s

    times = [seen_s() for _ in range(5)]
    assert min(times) >= alone_s(planned(ranks))
    assert min(times) < 1.5 * alone_s(planned(ranks))


def test_operations_of_a_group_queue(start: Callable[..., None], clock: SimpleNamespace) -> None:
    """Each is over, latency included, before the next one begins."""
    start(SLOW)
    group = dist.new_group(NODE)
    for count in range(1, 5):
        assert gather(group).done_s == pytest.approx(clock.now_s + count * alone_s(planned(NODE)), abs=1e-9)


def test_groups_that_share_a_wire_add_up(start: Callable[..., None], clock: SimpleNamespace) -> None:
    """Bytes follow each other, latencies overlap; a small group waits for the wire as well."""
    start(SLOW)
    free_s = clock.now_s
    for ranks in (NODE, NODE, [0, 1]):
        free_s += planned(ranks).occupied_s["intra"]
        assert gather(dist.new_group(ranks)).done_s == pytest.approx(free_s + 1e-3, abs=1e-9)
    assert fabric.busy_s()["intra"] == pytest.approx(free_s - clock.now_s)


def test_groups_on_different_wires_do_not_meet(start: Callable[..., None], clock: SimpleNamespace) -> None:
    start(SLOW)
    for ranks in (NODE, REPLICATE):
        assert gather(dist.new_group(ranks)).done_s == pytest.approx(clock.now_s + alone_s(planned(ranks)), abs=1e-9)


def test_the_world_waits_for_either_wire(start: Callable[..., None], clock: SimpleNamespace) -> None:
    """Behind a transfer between nodes its NIC's part comes late, and so does its end; not so its part in the node."""
    start(SLOW)
    gather(dist.new_group(REPLICATE))
    everywhere = gather(dist.group.WORLD)
    in_node = gather(dist.new_group(NODE))
    inter_s = planned(REPLICATE).occupied_s["inter"] + planned(WORLD).occupied_s["inter"]
    intra_s = planned(WORLD).occupied_s["intra"] + planned(NODE).occupied_s["intra"]
    assert everywhere.done_s == pytest.approx(clock.now_s + inter_s + 3e-3, abs=1e-9)
    assert in_node.done_s == pytest.approx(clock.now_s + intra_s + 1e-3, abs=1e-9)


def test_idle_time_is_no_credit(start: Callable[..., None], clock: SimpleNamespace) -> None:
    start(SLOW)
    group = dist.new_group(NODE)
    gather(group)
    clock.now_s += 10.0
    assert gather(group).done_s == pytest.approx(clock.now_s + alone_s(planned(NODE)), abs=1e-9)


def test_one_after_the_other_and_side_by_side(start: Callable[..., None]) -> None:
    """The same with the clock running: a shared wire costs the sum, two wires the larger."""
    start(SLOW)
    one, other, between = dist.new_group(NODE), dist.new_group(NODE), dist.new_group(REPLICATE)

    def seen_s(*transfers: tuple[dist.ProcessGroup, int]) -> float:
        def once() -> float:
            begin_s = time.perf_counter()
            for work in [gather(*transfer) for transfer in transfers]:
                work.wait()
            return time.perf_counter() - begin_s

        return min(once() for _ in range(5))

    long_s, short_s = alone_s(planned(NODE, 4 * BUFFER)), alone_s(planned(REPLICATE))
    assert seen_s((one, 4 * BUFFER), (other, 4 * BUFFER)) >= 2 * long_s - 1e-3
    side_by_side_s = seen_s((one, 4 * BUFFER), (between, BUFFER))
    assert long_s <= side_by_side_s < long_s + short_s


def test_futures_come_when_the_transfer_is_over(start: Callable[..., None]) -> None:
    start(SLOW)
    begin_s = time.perf_counter()
    gather(dist.new_group(NODE)).get_future().wait()
    assert time.perf_counter() - begin_s >= alone_s(planned(NODE))


# ---------------------------------------------------------------------------------------------------------
# what is in the tensors

FAST = Fabric(2, 4, Link(500.0, 0.0), Link(500.0, 0.0))


@pytest.mark.parametrize("num_elems", [2, 1 << 17])
def test_every_gather_writes_all_of_its_output(start: Callable[..., None], num_elems: int) -> None:
    start(FAST, rank=2)
    group = dist.new_group(NODE)
    whole = torch.full((4 * num_elems,), torch.nan)
    slots = whole.view(4, num_elems)
    slots[2] = 1.0
    all_gather(whole, slots[2], group=group)  # in place
    assert (whole == 1.0).all()
    all_gather(whole, torch.full((num_elems,), 2.0), group=group)
    assert (whole == 2.0).all()


def test_coalesced_gathers_are_one_transfer(start: Callable[..., None], clock: SimpleNamespace) -> None:
    """One latency, and the bytes of both."""
    start(SLOW)
    group = dist.new_group(NODE)
    wholes, shards = [torch.zeros(BUFFER, dtype=torch.uint8) for _ in range(2)], [torch.ones(BUFFER // 4).byte()] * 2
    work = group.all_gather_single_coalesced(wholes, shards)
    assert all((whole == 1).all() for whole in wholes)
    assert work.done_s == pytest.approx(clock.now_s + alone_s(planned(NODE, 2 * BUFFER)), abs=1e-9)


def test_a_reduce_scatter_keeps_the_own_slice(start: Callable[..., None]) -> None:
    start(FAST, rank=2)
    shard, whole = torch.zeros(2), torch.arange(16.0)
    reduce_scatter(shard, whole)
    assert shard.tolist() == [4.0, 5.0]
    reduce_scatter(whole[4:6], whole)
    assert whole.tolist() == torch.arange(16.0).tolist()


def test_every_operation_runs(start: Callable[..., None]) -> None:
    start(FAST, rank=3)
    tensor = torch.arange(8.0)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, src=1)
    dist.reduce(tensor, dst=0)
    received = torch.zeros(8)
    dist.all_to_all_single(received, tensor)
    assert torch.equal(received, tensor)
    dist.barrier()
    found: list[object] = [None] * 8
    dist.all_gather_object(found, {"rank": 3})
    assert found == [{"rank": 3}] * 8
    slots = [torch.zeros(2) for _ in range(8)]
    dist.all_gather(slots, torch.ones(2))
    assert all((slot == 1).all() for slot in slots)


def test_refused_starts(start: Callable[..., None]) -> None:
    with pytest.raises(ConfigurationError, match="rank 8 of 8"):
        start(FAST, rank=8)
    start(FAST)
    with pytest.raises(StateError, match="'emulated' exists already"):
        start(FAST)


def test_a_start_counts_from_zero(start: Callable[..., None]) -> None:
    for _ in range(2):
        start(FAST)
        assert fabric.moved_bytes() == {"intra": 0.0, "inter": 0.0} == fabric.busy_s()
        dist.all_reduce(torch.ones(8))
        assert fabric.moved_bytes() == {"intra": 56.0, "inter": 14.0}
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------
# what runs on it

# Powers of two, so that every quotient is exact: 1 GB/s in the node, a quarter of it between nodes.
EXACT = Fabric(2, 4, Link(1.0, 8.0), Link(0.25, 16.0))
HIDDEN = 64


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(4)))


def train_step(module: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    loss = module(torch.ones(2, HIDDEN)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def moved_since(before: dict[str, float]) -> dict[str, float]:
    return {wire: moved - before[wire] for wire, moved in fabric.moved_bytes().items()}


@pytest.mark.quick("bf16-*")
@pytest.mark.parametrize("strategy", PRESETS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_moves_what_the_ledger_says(
    start: Callable[..., None], strategy: str, precision: str, tmp_path: Path
) -> None:
    start(EXACT)
    sw.init(device="cpu")
    module = model()
    module, optimizer = sw.shard(
        module,
        torch.optim.AdamW(module.parameters()),
        strategy,
        precision=precision,
        node_size=4,
        disk_path=tmp_path if PRESETS[strategy].uses_disk else None,
    )
    for _ in range(2):  # what is started early for the next step is then the same in each
        train_step(module, optimizer)
    before, busy_before = fabric.moved_bytes(), fabric.busy_s()
    train_step(module, optimizer)
    by_axis = dict.fromkeys(("world", "node", "replicate"), 0.0)
    for row in sw.traffic(module).rows:
        by_axis[row.axis] += row.wire_bytes
    expected = {
        "intra": by_axis["node"] + by_axis["world"],
        "inter": by_axis["replicate"] + by_axis["world"] / 4,
    }
    moved = moved_since(before)
    assert moved == expected
    busy = {wire: seconds - busy_before[wire] for wire, seconds in fabric.busy_s().items()}
    assert busy == pytest.approx({"intra": moved["intra"] / 1e9, "inter": moved["inter"] / 0.25e9})


def test_ddp_runs_unchanged(start: Callable[..., None]) -> None:
    start(EXACT)
    module = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        train_step(module, optimizer)
    before = fabric.moved_bytes()
    assert train_step(module, optimizer).isfinite()
    num_bytes = 4 * sum(param.numel() for param in module.parameters())
    assert moved_since(before) == plan_transfer(EXACT, "all_reduce", num_bytes, WORLD, 0).moved_bytes


def test_fsdp2_runs_unchanged(start: Callable[..., None]) -> None:
    start(EXACT)
    module = model()
    mesh = init_device_mesh("cpu", (8,))
    for layer in module:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    train_step(module, optimizer)
    before = fabric.moved_bytes()
    assert train_step(module, optimizer).isfinite()
    num_bytes = 4 * 4 * (HIDDEN * HIDDEN + HIDDEN)
    passes = 2 + 1  # gathered in forward and backward, reduced once
    assert moved_since(before)["intra"] == passes * num_bytes * 7 / 8
    assert moved_since(before)["inter"] == passes * num_bytes * 7 / 8 / 4


def test_fsdp2_over_two_axes(start: Callable[..., None]) -> None:
    start(EXACT)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    module = model()
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    train_step(module, optimizer)
    before = fabric.moved_bytes()
    train_step(module, optimizer)
    num_bytes = 4 * 4 * (HIDDEN * HIDDEN + HIDDEN)
    # The root is not gathered again for the backward. Its gradient is summed between nodes after the node's reduction.
    assert moved_since(before) == {"intra": 2 * num_bytes * 3 / 4, "inter": 2 * num_bytes / 4 * 1 / 2}
