"""Training steps on slow links: layouts that move less, beside torch's FSDP2 and HSDP and DeepSpeed, in one run.

    sudo python -m benchmarks.wire_links
    sudo python -m benchmarks.wire_links --rates 1000 --contenders fsdp2 shardwise:zeropp --steps 3

Two nodes of two ranks: network namespaces whose NICs `tc` limits (`namespaces`), which needs root; nothing of them is
left afterwards. Every contender is started anew for each rate and repetition, contenders in turn. All compute in bf16
with fp32 master weights on the same small batches, have the same weights and AdamW, and reduce in fp32; where a
strategy says that something travels encoded, it does. The peers are `shardwise bench`'s: `fsdp2` (prefetch, a group of
its own for reductions), `hsdp` (the same on a mesh of nodes x ranks, replicated over the nodes), `deepspeed:3`, and
`deepspeed:3+hpz` with ZeRO++'s second copy in the node.

A step ends when the last rank has ended it. Bytes out of the node are what the kernel counted for a step on the first
node's NIC, TCP's headers with it; those inside went over its loopback, which nothing limits. The plan says how many
must cross a node's border at least. Gloo puts more there: its rings pass through every rank, and its reduce-scatter is
its all-reduce. DeepSpeed is not planned.
"""

import argparse
import datetime
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.bench.case import DEEPSPEED, HSDP, OURS, SHAPES, Case, case_from_json
from shardwise.bench.contenders import find
from shardwise.bench.launch import environment
from shardwise.bench.measure import join
from shardwise.bench.model import batches_of, build, num_params
from shardwise.bench.pages import commit, processor
from shardwise.core.wire.ledger import Call
from shardwise.planner.hardware.cluster import make_cluster
from shardwise.planner.hardware.links import Fabric, Kind, plan_transfer
from shardwise.planner.training import Training

from .namespaces import NIC, Node, Rank, can_make_namespaces, end_on_signals, namespaces, run_ranks, sent_bytes
from .pages import Page, benchmark_page, table, write

RESULTS = Path(__file__).parent / "results"
NUM_NODES, NODE_SIZE = 2, 2
PEER = "fsdp2"
CONTENDERS = [
    PEER,
    HSDP,
    "deepspeed:3",
    "deepspeed:3+hpz",
    "shardwise:zero3",
    "shardwise:hsdp",
    "shardwise:hpz",
    "shardwise:zero3+grads_as=bf16",
    "shardwise:zero3+params_as=int8+grads_as=int4",
    "shardwise:zeropp",
]
# What the planner calls those of torch's that it knows: an engine and a strategy.
PLANNED_AS = {PEER: ("fsdp2", "zero3"), HSDP: ("fsdp2", "hsdp")}
FIRST_PORT = 29500
DEADLINE_S = 300
QUIET_S = 0.3  # until what a step began for the next one has arrived


@dataclass(frozen=True)
class Planned:
    """Bytes out of one node for a step."""

    must_cross: float
    over_gloo: float


Plans = dict[str, Planned | None]  # by contender


@dataclass(frozen=True)
class Seen:
    """One contender on one link: seconds of each step, and bytes out of the first node, and inside it, for one."""

    contender: str
    mbit_per_s: int
    repetition: int
    seconds: list[float]
    between_bytes: float
    inside_bytes: float
    losses: list[float]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


# ---------------------------------------------------------------------------------------------------------
# in a worker


def work(case: Case, answer: Path) -> None:
    rank = int(os.environ["RANK"])
    join(case)
    run = find(case.contender)(case)
    batches = batches_of(case, rank, torch.device("cpu"), run.input_dtype, case.warmup + case.steps)
    losses = [run.step(batch) for batch in batches[: case.warmup]]
    before = counted()
    instants = [time.perf_counter()]  # the machine's clock, the same for all ranks
    for batch in batches[case.warmup :]:
        losses.append(run.step(batch))
        instants.append(time.perf_counter())
    moved = [(after - start) / case.steps for start, after in zip(before, counted(), strict=True)]
    found = {"instants": instants, "losses": torch.stack(losses).tolist(), "moved": moved}
    answer.write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a normal exit would wait in destructors of groups for ranks that have gone


def counted() -> list[int]:
    """Sent by this node so far, to others and to itself, when all ranks have come this far and nothing is under way."""
    dist.barrier()
    time.sleep(QUIET_S)
    found = [sent_bytes(interface) for interface in (NIC, "lo")]
    dist.barrier()
    return found


# ---------------------------------------------------------------------------------------------------------
# the run


def measure(case: Case, nodes: list[Node], mbit_per_s: int, repetition: int, port: int) -> Seen:
    with tempfile.TemporaryDirectory(prefix="shardwise-links-") as folder:
        answers = [Path(folder) / f"rank{rank}.json" for rank in range(case.world_size)]
        module = [sys.executable, "-m", "benchmarks.wire_links", "--worker"]
        ranks = [
            Rank(
                nodes[rank // NODE_SIZE],
                [*module, case.to_json(), str(answer)],
                {
                    **environment(case, rank, port),
                    "LOCAL_RANK": str(rank % NODE_SIZE),
                    "MASTER_ADDR": nodes[0].address,
                    "GLOO_SOCKET_IFNAME": NIC,
                },
                answer.with_suffix(".log"),
            )
            for rank, answer in enumerate(answers)
        ]
        run_ranks(ranks, DEADLINE_S)
        found = [json.loads(answer.read_text()) for answer in answers]
    losses = [statistics.fmean(by_rank) for by_rank in zip(*(one["losses"] for one in found), strict=True)]
    seconds = seconds_of([one["instants"] for one in found])
    return Seen(case.contender, mbit_per_s, repetition, seconds, *found[0]["moved"], losses)


def seconds_of(instants: list[list[float]]) -> list[float]:
    """Of each step, given when each rank began and ended them: it lasts until the last rank has ended it."""
    ends = [max(of_ranks) for of_ranks in zip(*instants, strict=True)]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def planned(contender: str, case: Case) -> Planned | None:
    family, _, argument = contender.partition(":")
    if family == DEEPSPEED:
        return None
    engine, strategy = PLANNED_AS.get(contender) or (OURS, argument)
    training = Training(seq=case.shape.tokens, precision=case.precision, reduce=case.reduce, engine=engine)
    model = build(case.shape, torch.device("meta"), 0)
    cluster = make_cluster(f"{NODE_SIZE}xH100-80GB", NUM_NODES)
    found = sw.plan(model, cluster, training, strategy=strategy, search=False).found[0]
    over_gloo = sum(gloo_bytes(call) for event in found.events for call in event.calls)
    return Planned(NODE_SIZE * found.moved.inter_node, NODE_SIZE * over_gloo)


def gloo_bytes(call: Call) -> float:
    """Across the border, by one rank. Encoded gradients are exchanged, others go round in a ring."""
    world = range(NUM_NODES * NODE_SIZE)
    ranks = {"world": world, "node": range(NODE_SIZE), "replicate": range(0, len(world), NODE_SIZE)}[call.axis]
    is_encoded = call.dtype not in ("float32", "float64", "bfloat16", "float16", "int32")
    reduction: Kind = "all_to_all" if is_encoded else "all_reduce"
    kind: Kind = reduction if call.kind == "reduce_scatter" else call.kind
    return plan_transfer(Fabric(NUM_NODES, NODE_SIZE), kind, call.num_bytes, ranks, 0).moved_bytes["inter"]


# ---------------------------------------------------------------------------------------------------------
# the report


def rows_of(seen: list[Seen], plans: Plans, mbit_per_s: int) -> list[dict[str, Any]]:
    """One for each contender. The ratio is how many times as fast as FSDP2 it is, taken within a repetition."""
    here = [one for one in seen if one.mbit_per_s == mbit_per_s]
    peers = {one.repetition: one.median_s for one in here if one.contender == PEER}
    rows = []
    for contender in dict.fromkeys(one.contender for one in here):
        own = [one for one in here if one.contender == contender]
        plan = plans[contender]
        seconds = [second for one in own for second in one.seconds]
        ratios = [peers[one.repetition] / one.median_s for one in own if one.repetition in peers]
        rows.append(
            {
                "contender": contender,
                "s / step": f"{statistics.median(one.median_s for one in own):.2f}",
                "min-max": f"{min(seconds):.2f}-{max(seconds):.2f}",
                f"x {PEER}": f"{statistics.median(ratios):.2f}" if ratios else "",
                "MB out of the node": f"{statistics.fmean(one.between_bytes for one in own) / 1e6:.1f}",
                "planned over gloo": f"{plan.over_gloo / 1e6:.1f}" if plan else "",
                "must cross": f"{plan.must_cross / 1e6:.1f}" if plan else "",
                "MB inside": f"{statistics.fmean(one.inside_bytes for one in own) / 1e6:.1f}",
                "last loss": f"{own[0].losses[-1]:.4f}",
            }
        )
    return rows


def page_of(seen: list[Seen], plans: Plans, case: Case, began: datetime.datetime) -> Page:
    machine = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "ranks": case.world_size,
        "Linux": platform.release(),
        "torch": torch.__version__,
        "commit": commit(),
    }
    sizes = (
        f"{case.shape.name}: {num_params(case.shape) / 1e6:.1f}M parameters, {case.batch} x {case.shape.tokens} tokens "
        f"a rank; medians of {case.steps} steps after {case.warmup}, then of "
        f"{len({one.repetition for one in seen})} repetitions; min-max over all steps."
    )
    note = " ".join((__doc__ or "").partition("Two nodes")[2].split())
    tables = {rate: rows_of(seen, plans, rate) for rate in dict.fromkeys(one.mbit_per_s for one in seen)}
    parts = [sizes, f"Two nodes {note}"]
    for rate, rows in tables.items():
        parts += [f"## {rate / 1000:g} Gbit/s", table(rows[0], (row.values() for row in rows))]
    figures = {
        "sizes": sizes,
        "rows": tables,
        "planned": {name: asdict(plan) for name, plan in plans.items() if plan},
        "runs": [asdict(one) for one in seen],
    }
    return benchmark_page("wire_links", "Steps on slow links", began, machine, figures, after=parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", type=int, default=[1000, 10000], help="Mbit/s of a NIC")
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, help="as `shardwise bench` has them")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="50m")
    parser.add_argument(
        "--tokens", type=int, default=32, help="of a rank's one sequence: few, so that links are the limit"
    )
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument(
        "--nice", type=int, default=0, help="of the ranks; below 0, other programs keep them waiting less"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not can_make_namespaces():
        sys.exit("wire_links makes network namespaces, for which it needs root, ip and tc: run it with sudo")
    if any(name.startswith(DEEPSPEED) for name in options.contenders) and find_spec("deepspeed") is None:
        sys.exit("deepspeed is not installed: DS_BUILD_OPS=0 pip install deepspeed, or name --contenders without it")
    os.nice(options.nice)  # the ranks inherit it
    end_on_signals()
    case = Case(
        PEER, replace(SHAPES[options.shape], tokens=options.tokens), "cpu", NUM_NODES * NODE_SIZE, NODE_SIZE, "",
        batch=1, micro_batches=1, precision="bf16", reduce="fp32", clip=0.0, compile=False, checkpointing="none",
        warmup=options.warmup, steps=options.steps, seed=0,
    )  # fmt: skip
    plans = {contender: planned(contender, case) for contender in options.contenders}
    seen: list[Seen] = []
    began = datetime.datetime.now()
    for repetition in range(options.repetitions):
        for rate in options.rates:
            with namespaces(NUM_NODES, rate) as nodes:
                for index, contender in enumerate(options.contenders):
                    own = replace(case, contender=contender)
                    seen.append(measure(own, nodes, rate, repetition, FIRST_PORT + index))
                    print(f"{rate} Mbit/s {contender}: {seen[-1].median_s:.2f} s", flush=True)
            page = page_of(seen, plans, case, began)
            path = write(page, options.out)  # as much as there is
    print(f"\n{page}\n{path}")


if __name__ == "__main__":
    if "--worker" in sys.argv:
        told, answer_file = sys.argv[-2:]
        work(case_from_json(told), Path(answer_file))
    else:
        main()
