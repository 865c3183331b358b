"""The emulated fabric held against real ranks: what it plans beside what gloo took, collectives and whole steps.

    sudo python -m benchmarks.fabric_against_gloo
    python -m benchmarks.fabric_against_gloo --quick

Real: every node is a network namespace with a NIC of its own (a veth whose both ends are limited with `tc`), all on one
bridge; ranks of a node reach each other inside it. Without root, `ip` or `tc` there is one node, and its loopback.
Planned: the same functions in one process on the emulated fabric, which is told

- the bandwidth of each kind of wire, measured point to point in both directions at once, not by a collective;
- the latency of each kind of wire, which is what an all-gather of a few bytes over it took at best.

How many bytes gloo puts on a NIC is counted by the kernel and compared with what the model says. Gloo's
reduce-scatter is its all-reduce (twice the bytes of a ring: counted), so the emulated one is told to be that too.
What is compared then is time. Links should be slow enough for the wire to be what is waited for. Blocks of the training
steps sleep, and compute too where every rank has a core.

What the model does not know: between two ranks gloo's all-gather takes up to 1.5 times as long as its bytes take
point to point (with four ranks it does not); inside a node there is no wire, and gloo is as fast as the cores copy;
where blocks compute, ranks and gloo's threads compete for the cores, which is all that is seen of a fast link.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.bench import fabric
from shardwise.bench.pages import commit
from shardwise.core.mesh import make_axes
from shardwise.planner.hardware.links import INTER, INTRA, Fabric, Kind, Link, Transfer, parse, plan_transfer

from .namespaces import LOCAL, Node, Rank, can_make_namespaces, end_on_signals, namespaces, run_ranks, sent_bytes
from .pages import Page, benchmark_page, table, write

# torch 2.13 renamed the flat collectives; 2.11 has only the older names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

RESULTS = Path(__file__).parent / "results"
SMALL_BYTES = 64
PROBE_BYTES = (1 << 20, 1 << 22)  # the slope between them is the bandwidth
LARGE_BYTES = 1 << 20
SIZES = [1 << 18, 1 << 20, 1 << 22]
GLOO_DOES: dict[Kind, Kind] = {"reduce_scatter": "all_reduce"}
DEADLINE_S = 300


@dataclass(frozen=True)
class World:
    """Who takes part. `mbit_per_s`: of each node's NIC, 0 for a loopback without a limit."""

    num_nodes: int
    node_size: int
    mbit_per_s: int

    @property
    def size(self) -> int:
        return self.num_nodes * self.node_size

    def __str__(self) -> str:
        return f"{self.num_nodes}x{self.node_size} " + (f"{self.mbit_per_s} Mbit/s" if self.mbit_per_s else "loopback")


@dataclass(frozen=True)
class Steps:
    """A training step: a strategy, and whether its blocks sleep or compute."""

    strategy: str
    sleeps: bool

    def __str__(self) -> str:
        return f"{self.strategy} step, blocks {'sleep' if self.sleeps else 'compute'}"


@dataclass(frozen=True)
class Job:
    """What a worker is told. With a fabric it plays rank 0 alone."""

    world: World
    rank: int
    interface: str
    store: str
    answer: str
    fabric: str
    sizes: list[int]
    steps: list[Steps]
    repetitions: int


@dataclass(frozen=True)
class Seen:
    """One row of what a worker measured: seconds of each repetition, and bytes out of the NIC for each."""

    what: str
    axis: str
    num_bytes: int
    seconds: list[float]
    nic_bytes: float

    @property
    def key(self) -> tuple[str, str, int]:
        return self.what, self.axis, self.num_bytes

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


# ---------------------------------------------------------------------------------------------------------
# in a worker


class Pause(torch.autograd.Function):
    """Computing, as far as time goes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(0.005)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(0.01)
        return grad


class Block(nn.Module):
    def __init__(self, hidden: int, sleeps: bool) -> None:
        super().__init__()
        self.norm, self.sleeps = nn.LayerNorm(hidden), sleeps
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return Pause.apply(x) if self.sleeps else x


def work(job: Job) -> None:
    torch.set_num_threads(1)
    if os.geteuid() == 0:
        os.nice(-15)  # ranks that only wait for each other should not wait for other programs too
    if job.fabric:
        # Called for every operation, so this is how the emulated ranks come to use gloo's algorithms.
        fabric.plan_transfer = as_gloo
        fabric.start(parse(job.fabric))
    else:
        timeout = datetime.timedelta(seconds=DEADLINE_S)
        dist.init_process_group(
            "gloo", store=dist.FileStore(job.store, job.world.size), rank=job.rank, world_size=job.world.size,
            timeout=timeout,
        )  # fmt: skip
    sw.init(device="cpu")
    clock = Clock(job)
    members = make_axes(job.world.node_size).members
    axes = {
        axis: dist.new_group(ranks, use_local_synchronization=True)
        for axis, ranks in members.items()
        if len(ranks) > 1 and (axis == "world" or len(ranks) < job.world.size)
    }
    seen: list[Seen] = []
    if not job.fabric:
        seen += [
            row
            for axis, group in axes.items()
            if axis != "world" or len(axes) == 1
            for row in probe(clock, axis, group)
        ]
    for axis, group in axes.items():
        for num_bytes in [SMALL_BYTES, *job.sizes]:
            seen += collectives(clock, axis, group, num_bytes)
    seen += [train(clock, steps) for steps in job.steps]
    Path(job.answer).write_text(json.dumps([asdict(row) for row in seen]))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a normal exit would wait in destructors of groups for ranks that have gone


def as_gloo(of: Fabric, kind: Kind, num_bytes: int, ranks: list[int], rank: int) -> Transfer:
    return plan_transfer(of, GLOO_DOES.get(kind, kind), num_bytes, ranks, rank)


class Clock:
    """Times something repeatedly, the ranks beginning together, and counts what left the node for it."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def measure(self, what: str, axis: str, num_bytes: int, operation: Callable[[], object]) -> Seen:
        operation()
        seconds = []
        self.meet()
        bytes_before = self.nic_bytes()
        num_times = self.job.repetitions * (4 if num_bytes == SMALL_BYTES else 1)
        for _ in range(num_times):
            begin_s = time.perf_counter()
            operation()
            seconds.append(time.perf_counter() - begin_s)
            self.meet()
        moved = (self.nic_bytes() - bytes_before) / num_times
        return Seen(what, axis, num_bytes, seconds, moved)

    def meet(self) -> None:
        if self.job.fabric:
            return
        dist.barrier()
        time.sleep(0.002)  # what the barrier itself left in the queues is gone

    def nic_bytes(self) -> float:
        """Bytes out of this node so far: the kernel's count, or the model's for all ranks of the node."""
        if self.job.fabric:
            return fabric.moved_bytes()["inter"] * self.job.world.node_size
        return sent_bytes(self.job.interface)


def probe(clock: Clock, axis: str, group: dist.ProcessGroup) -> list[Seen]:
    """Neighbours of the axis in pairs, point to point, in both directions at once; the first pair alone."""
    ranks = dist.get_process_group_ranks(group)
    partner = {0: ranks[1], ranks[1]: 0}.get(dist.get_rank()) if 0 in ranks else None
    rows = []
    for num_bytes in PROBE_BYTES:
        sent, received = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))

        def exchange(sent: Tensor = sent, received: Tensor = received) -> None:
            if partner is not None:
                works = [dist.irecv(received, partner), dist.isend(sent, partner)]
                for work in works:
                    work.wait()

        rows.append(clock.measure("point to point", axis, num_bytes, exchange))
    return rows


def collectives(clock: Clock, axis: str, group: dist.ProcessGroup, num_bytes: int) -> list[Seen]:
    whole = torch.ones(num_bytes // 4)
    own = whole.view(dist.get_world_size(group), -1)[dist.get_rank(group)]
    operations: dict[Kind, Callable[[], object]] = {
        "all_gather": lambda: all_gather(whole, own, group=group),
        "reduce_scatter": lambda: reduce_scatter(own, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
    }
    return [clock.measure(kind, axis, num_bytes, operation) for kind, operation in operations.items()]


def train(clock: Clock, steps: Steps) -> Seen:
    hidden, num_tokens = 128, 8 if steps.sleeps else 1024
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Block(hidden, steps.sleeps) for _ in range(6)))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = sw.shard(
        model, optimizer, steps.strategy, precision="fp32", node_size=clock.job.world.node_size, units=["Block"]
    )
    batch = torch.ones(num_tokens, hidden)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    num_bytes = 4 * sum(param.numel() for param in model.parameters())
    step()
    return clock.measure(str(steps), "", num_bytes, step)


# ---------------------------------------------------------------------------------------------------------
# nodes


@contextmanager
def nodes_of(world: World) -> Iterator[list[Node]]:
    if not world.mbit_per_s:
        yield [LOCAL] * world.num_nodes
        return
    with namespaces(world.num_nodes, world.mbit_per_s) as nodes:
        yield nodes


def launch(jobs: list[Job], nodes: list[Node]) -> list[list[Seen]]:
    """What each job's worker measured. All of them are stopped when one fails or time is up."""
    module = [sys.executable, "-m", "benchmarks.fabric_against_gloo", "--worker"]
    ranks = [
        Rank(
            nodes[job.rank // job.world.node_size],
            [*module, json.dumps(asdict(job))],
            {"OMP_NUM_THREADS": "1"},
            Path(job.answer).with_suffix(".log"),
        )
        for job in jobs
    ]
    run_ranks(ranks, DEADLINE_S)
    return [[Seen(**row) for row in json.loads(Path(job.answer).read_text())] for job in jobs]


# ---------------------------------------------------------------------------------------------------------
# both sides of a world


def fabric_for(world: World, seen: dict[tuple[str, str, int], Seen]) -> Fabric:
    """The fabric that the calibration rows describe, by their quickest repetition.

    The ranks of a node share its NIC; to each belongs its part.
    """

    def link(axis: str, default: Link, share: int = 1) -> Link:
        if ("all_gather", axis, SMALL_BYTES) not in seen:
            return default
        small, large = PROBE_BYTES
        seconds = [min(seen["point to point", axis, size].seconds) for size in (small, large)]
        rate = (large - small) / (seconds[1] - seconds[0]) / share
        return Link(rate / 1e9, min(seen["all_gather", axis, SMALL_BYTES].seconds) * 1e6)

    if world.num_nodes == 1:
        return Fabric(1, world.node_size, link("world", INTRA), INTER)
    if world.node_size == 1:
        return Fabric(world.num_nodes, 1, INTRA, link("world", INTER))
    return Fabric(
        world.num_nodes, world.node_size, link("node", INTRA), link("replicate", INTER, share=world.node_size)
    )


def slowest(rows: Sequence[Seen]) -> Seen:
    """One row of all ranks: a repetition took as long as on the last one; bytes are those of rank 0's node."""
    return replace(rows[0], seconds=[max(times) for times in zip(*(row.seconds for row in rows), strict=True)])


def steps_for(world: World) -> list[Steps]:
    strategies = ["zero3", "ddp"] + ["hsdp"] * (world.num_nodes > 1 and world.node_size > 1)
    kinds = [True] + [False] * (world.size <= (os.cpu_count() or 1))
    return [Steps(strategy, sleeps) for sleeps in kinds for strategy in strategies]


@dataclass(frozen=True)
class Row:
    """Something planned and seen in one world."""

    world: World
    planned: Seen
    seen: Seen

    @property
    def kind(self) -> str:
        """What it is summed up with."""
        if not self.seen.axis:
            return f"training steps, {self.seen.what.partition(', ')[2]}"
        if self.seen.axis == "node":
            return "inside a node, over the loopback"
        num_ranks = self.world.num_nodes if self.seen.axis == "replicate" else self.world.size
        return f"{self.seen.what}, {num_ranks} ranks"

    @property
    def error(self) -> float:
        return self.planned.median_s / self.seen.median_s - 1

    @property
    def cells(self) -> dict[str, str]:
        seen_ms = [seconds * 1e3 for seconds in self.seen.seconds]
        limited = self.world.mbit_per_s > 0
        return {
            "world": str(self.world),
            "what": f"{self.seen.what} over {self.seen.axis}" if self.seen.axis else self.seen.what,
            "MB": f"{self.seen.num_bytes / 1e6:.3g}",
            "planned ms": f"{self.planned.median_s * 1e3:.1f}",
            "seen ms": f"{statistics.median(seen_ms):.1f}",
            "min-max": f"{min(seen_ms):.1f}-{max(seen_ms):.1f}",
            "planned / seen": f"{1 + self.error:.2f}",
            "NIC MB planned": f"{self.planned.nic_bytes / 1e6:.3f}" if limited else "",
            "counted": f"{self.seen.nic_bytes / 1e6:.3f}" if limited else "",
        }


@dataclass(frozen=True)
class Comparison:
    """All of one world: what the fabric was told, and the rows."""

    world: World
    fabric: str
    rows: list[Row]


def compare(world: World, sizes: list[int], steps: list[Steps], repetitions: int) -> Comparison:
    with tempfile.TemporaryDirectory() as folder, nodes_of(world) as nodes:
        real = [
            Job(
                world,
                rank,
                nodes[rank // world.node_size].interface,
                f"{folder}/store",
                f"{folder}/rank{rank}.json",
                "",
                sizes,
                steps,
                repetitions,
            )
            for rank in range(world.size)
        ]
        seen = {rows[0].key: slowest(rows) for rows in zip(*launch(real, nodes), strict=True)}
        emulated = str(fabric_for(world, seen))
        (planned,) = launch([replace(real[0], fabric=emulated, answer=f"{folder}/planned.json")], nodes)
    return Comparison(world, emulated, [Row(world, row, seen[row.key]) for row in planned])


# ---------------------------------------------------------------------------------------------------------
# the report


def summary(rows: list[Row]) -> list[dict[str, Any]]:
    """How far off the plan is, by kind of row."""
    large = [row for row in rows if not row.seen.axis or row.seen.num_bytes >= LARGE_BYTES]
    found = []
    for kind in dict.fromkeys(row.kind for row in large):
        errors = sorted(row.error for row in large if row.kind == kind)
        found.append(
            {
                "what": kind,
                "rows": len(errors),
                "median error": f"{statistics.median(errors):+.0%}",
                "from": f"{errors[0]:+.0%}",
                "to": f"{errors[-1]:+.0%}",
                "within 10 %": sum(abs(error) <= 0.1 for error in errors),
            }
        )
    return found


def table_of(rows: list[dict[str, Any]]) -> str:
    return table(rows[0], (row.values() for row in rows))


def page_of(comparisons: list[Comparison]) -> Page:
    machine = {
        "cores": os.cpu_count(),
        "Linux": platform.release(),
        "torch": torch.__version__,
        "commit": commit(),
    }
    note = " ".join((__doc__ or "").partition("Real:")[2].split())
    rows = [row for comparison in comparisons for row in comparison.rows]
    told = [{"world": str(comparison.world), "fabric": comparison.fabric} for comparison in comparisons]
    parts = [
        f"Real: {note}",
        f"Errors of the plan, for training steps and for buffers of {LARGE_BYTES / 1e6:.0f} MB or more:",
        table_of(summary(rows)),
        "What the fabric was told:",
        table_of(told),
        "Everything. Milliseconds are medians, min-max those of the real ones; bytes are of one node's NIC, outgoing:",
        table_of([row.cells for row in rows]),
    ]
    figures = {"summary": summary(rows), "worlds": [asdict(comparison) for comparison in comparisons]}
    title = "The emulated fabric against gloo"
    return benchmark_page("fabric_against_gloo", title, datetime.datetime.now(), machine, figures, after=parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", type=int, default=[50, 200, 1000], help="Mbit/s of a NIC")
    parser.add_argument("--worlds", nargs="+", default=["2x1", "4x1", "2x2"], help="nodes x ranks of a node")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="bytes of a collective's buffer")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one rate, two sizes")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.quick:
        options.rates, options.sizes, options.repetitions = options.rates[-1:], SIZES[1:], 5
    shapes = [tuple(map(int, text.split("x"))) for text in options.worlds]
    worlds = [World(*shape, rate) for shape in shapes for rate in options.rates]
    if not can_make_namespaces():
        print("no root, ip or tc: ranks of one node on an unlimited loopback")
        worlds = [World(1, 2, 0)]
    end_on_signals()
    comparisons = []
    for world in worlds:
        comparisons.append(compare(world, options.sizes, steps_for(world), options.repetitions))
        print(f"\n{comparisons[-1].fabric}\n{table_of([row.cells for row in comparisons[-1].rows])}", flush=True)
    path = write(page_of(comparisons), options.out)
    rows = [row for comparison in comparisons for row in comparison.rows]
    print(f"\n{table_of(summary(rows))}\n\n{path}")


if __name__ == "__main__":
    if "--worker" in sys.argv:
        told = json.loads(sys.argv[-1])
        work(Job(**{**told, "world": World(**told["world"]), "steps": [Steps(**step) for step in told["steps"]]}))
    else:
        main()
