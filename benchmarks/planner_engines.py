"""Other engines held against the plan of them: FSDP1, FSDP2 and DeepSpeed's stages, in memory and on a GPU in time.

    python -m benchmarks.planner_engines                                         # two CPU ranks, a small model, memory
    python -m benchmarks.planner_engines --device cuda                           # one GPU as one of 8 emulated ranks
    python -m benchmarks.planner_engines --device cuda --contenders fsdp1,fsdp2,deepspeed:3 --tokens 2048,8192

Every contender is one of `shardwise bench`, in a process of its own. DeepSpeed runs with its own defaults; on a CPU its
buckets are small, so that they fill. A CPU has no allocator with statistics: `StorageTracker` counts tensors. Kernels'
scratch memory and the workspaces of libraries are not among them, so the plan's are taken off.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.planner_seen import EMULATED
from shardwise.bench.case import SHAPES, Case, Shape, case_from_json
from shardwise.bench.launch import launch
from shardwise.planner.assess import Assessment, Assessor, Machine
from shardwise.planner.cost.deepspeed import Zero, deepspeed_memory_of
from shardwise.planner.cost.fsdp import WRAPPINGS, fsdp_memory_of
from shardwise.planner.cost.peak import WORKSPACE_BYTES, Memory
from shardwise.planner.hardware.cluster import make_cluster
from shardwise.planner.hardware.gpus import efficiency_of
from shardwise.planner.hardware.links import parse
from shardwise.planner.search import assess_named
from shardwise.planner.shapes.shape import ModelShape
from shardwise.planner.subject import subject_of
from shardwise.planner.training import Training

GPU = "H200-141GB"
SMALL = Shape("small", hidden=512, ffn=1376, layers=6, heads=8, kv_heads=8, tokens=16, vocab=2048)
# 3.5B parameters, blocks as in `blocks-202m`, but with a vocabulary, as the planner needs it.
LARGE = Shape("3.5b", hidden=4096, ffn=11008, layers=16, heads=32, kv_heads=32, tokens=4096, vocab=32000)
STAGES = ("ddp", "zero1", "zero2", "zero3")
CONTENDERS = ("fsdp1", "fsdp2", *(f"deepspeed:{stage}" for stage in range(4)))
# Its embedding and head are units of their own for us, too.
WIDE_ENDS = replace(SMALL, name="wide ends", vocab=8192)
# DeepSpeed's settings on a CPU, and the plan's.
ZERO = {"reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6, "stage3_prefetch_bucket_size": 10**6}
SMALL_ZERO = Zero(reduce_bucket=10**6, prefetch_bucket=10**6)


def case_of(contender: str, device: str, shape: Shape, fabric: str, **settings: Any) -> Case:
    world = parse(fabric) if device == "cuda" else None
    size, node = (world.world_size, world.node_size) if world else (2, 2)
    default = {"reduce": "bf16", "micro_batches": 1, "precision": "bf16", "checkpointing": "none"} | settings
    return Case(contender=contender, shape=shape, device=device, world_size=size, node_size=node,
                fabric=fabric if world else "", batch=1, clip=1.0 if world else 0.0, compile=False, warmup=3, steps=6,
                seed=0, **default)  # fmt: skip


def planned(case: Case) -> Assessment:
    family, _, stage = case.contender.partition(":")
    shape = case.shape
    if not shape.vocab:
        raise SystemExit(f"--shape {shape.name}: blocks alone have no plan; take a shape with a vocabulary")
    model = ModelShape(name=shape.name, layers=shape.layers, hidden=shape.hidden, heads=shape.heads,
                       kv_heads=shape.kv_heads, head_dim=shape.hidden // shape.heads, ffn=shape.ffn,
                       vocab=shape.vocab, tied=shape.tied, code="in-tree")  # fmt: skip
    training = Training(seq=shape.tokens, num_micro_batches=case.micro_batches, precision=case.precision,
                        reduce=case.reduce, checkpointing=case.checkpointing, engine=family)  # type: ignore[arg-type]  # fmt: skip
    cluster = make_cluster(f"{case.node_size}x{GPU}", case.world_size // case.node_size)
    if case.fabric:
        fabric = parse(case.fabric)
        cluster = replace(cluster, intra=fabric.intra, inter=fabric.inter, switch=None)
    assess = Assessor(subject_of(model, training), Machine(cluster, efficiency_of(GPU), EMULATED))
    return assess_named(assess, STAGES[int(stage)] if stage else "zero3", ((training,),))


def planned_memory(case: Case, **zero: Any) -> Memory:
    """The plan with the optimizer of `shardwise bench`, which is fused; `zero`: changes of `SMALL_ZERO`."""
    entry = planned(case)
    if entry.training.is_fsdp:
        wrapping = replace(WRAPPINGS[entry.training.engine], is_foreach=False)
        return fsdp_memory_of(entry.schedule, entry.works, entry.training, wrapping)
    return deepspeed_memory_of(entry.schedule, entry.works, entry.training, replace(SMALL_ZERO, **zero))


def peaks(memory: Memory) -> tuple[int, int]:
    """Bytes at the peak of forward, backward and reductions, and at that of the step."""
    update = ("update", "the gradients' cast")
    before = max(instant.total for instant in memory.instants if instant.name not in update)
    return before - WORKSPACE_BYTES, memory.peak.total - WORKSPACE_BYTES


@contextmanager
def own_defaults(**zero: Any) -> Iterator[None]:
    """Leave the settings of DeepSpeed and FSDP as they are, apart from `zero`. `shardwise bench` tunes both for speed:
    with FSDP1's forward prefetch, the gradients of two units are there at once, and FSDP2 gets a second reduction."""
    from torch.distributed import fsdp

    from shardwise.bench import contenders

    made, wrap = contenders.config_of, fsdp.FullyShardedDataParallel

    def untuned(*args: Any, **kwargs: Any) -> Any:
        return wrap(*args, **{**kwargs, "forward_prefetch": False})

    def config_of(case: Case, request: Any) -> dict[str, Any]:
        config = made(case, request)
        return config | {"zero_optimization": {"stage": request.stage, "contiguous_gradients": True, **zero}}

    with (
        mock.patch.object(contenders, "config_of", config_of),
        mock.patch.object(contenders, "_own_group_for_reductions"),
        mock.patch.object(fsdp, "FullyShardedDataParallel", untuned),
    ):
        yield


def tracked(case: Case, **zero: Any) -> dict[str, int]:
    """Bytes of this rank's tensors: at rest, at the peak before the optimizer's step, and at the peak of all. The
    process group is there already."""
    import torch
    import torch.distributed as dist

    from benchmarks.storage_tracker import StorageTracker, without_modes
    from shardwise.bench.contenders import find
    from shardwise.bench.model import batches_of, device_of

    with own_defaults(**ZERO | zero):
        others = StorageTracker.count()
        run = find(case.contender)(case)
    batches = batches_of(case, dist.get_rank(), device_of(case), run.input_dtype, 3)
    for batch in batches[:2]:
        run.step(batch)
    stepping: Any = torch.optim.AdamW
    if case.contender.startswith("deepspeed"):
        import deepspeed.runtime.engine  # type: ignore[import-not-found, import-untyped, unused-ignore]

        stepping = deepspeed.runtime.engine.DeepSpeedEngine
    before = []
    step = stepping.step

    def marked(*args: Any, **kwargs: Any) -> Any:
        before.append(tracker.peak)
        return step(*args, **kwargs)

    # Gloo copies what it reduces; other backends do not.
    hidden = mock.patch.object(dist, "reduce_scatter_single", without_modes(dist.reduce_scatter_single))
    with mock.patch.object(stepping, "step", marked), hidden, StorageTracker() as tracker:
        rest = tracker.peak
        run.step(batches[2])
    sizes = {"rest": rest, "before": before[-1], "peak": tracker.peak}
    return {name: size - others for name, size in sizes.items()}


def work(case: Case, file: Path) -> int:
    """Measure in a process that `launch` has started."""
    import shardwise.bench.measure as bench

    def count(case: Case, _: int) -> dict[str, int]:
        bench.join(case)
        if case.contender.startswith("deepspeed"):
            import deepspeed.ops  # type: ignore[import-not-found, import-untyped, unused-ignore]

            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
        return tracked(case)

    if case.device == "cpu":
        os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE=str(case.world_size))
        with mock.patch.object(bench, "measure", count):
            return bench.main(case, file)
    with own_defaults():
        return bench.main(case, file)


def rows(case: Case) -> Iterator[tuple[str, float, float]]:
    """Yield name, plan and measurement, in MB or ms."""
    outcome = launch(case, timeout_s=1200, module="benchmarks.planner_engines")
    if outcome.status != "ok":
        raise SystemExit(f"{case}: {outcome.status}: {outcome.error}")
    seen, entry = outcome.answers[0], planned(case)
    if case.device == "cpu":
        for name, plan in zip(("before", "peak"), peaks(planned_memory(case)), strict=True):
            yield f"{name} MB", plan / 1e6, seen[name] / 1e6
        return
    memory = seen["memory"]
    yield "active MB", entry.memory.peak.total / 1e6, memory["active_gb"] * 1e3
    yield "reserved MB", entry.reserved.expected / 1e6, memory["reserved_gb"] * 1e3
    yield "step ms", entry.step_s * 1e3, statistics.median(seen["seconds"]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--shape", default="")
    parser.add_argument("--tokens", default="", help="per sequence, separated by commas")
    parser.add_argument("--fabric", default="1x8,intra=400GB/s,inter=50GB/s")
    parser.add_argument("--reduce", default="bf16")
    parser.add_argument("--checkpointing", default="none")
    asked = parser.parse_args()
    shape = SHAPES[asked.shape] if asked.shape else SMALL if asked.device == "cpu" else LARGE
    print("| case | | planned | measured | error |\n|---|---|---|---|---|")
    for contender in asked.contenders.split(","):
        for tokens in map(int, asked.tokens.split(",")) if asked.tokens else (shape.tokens,):
            settings = {"reduce": asked.reduce, "checkpointing": asked.checkpointing}
            case = case_of(contender, asked.device, replace(shape, tokens=tokens), asked.fabric, **settings)
            for name, plan, seen in rows(case):
                print(f"| {case} | {name} | {plan:,.1f} | {seen:,.1f} | {plan / seen - 1:+.1%} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("{"):
        sys.exit(work(case_from_json(sys.argv[1]), Path(sys.argv[2])))
    main()
