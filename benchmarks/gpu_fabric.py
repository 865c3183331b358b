"""zero3 beside tuned FSDP2 on one GPU that plays one rank of an emulated 8-GPU fabric (see fabric.py).

    python -m benchmarks.gpu_fabric                  # all cases, under eight minutes on an H200
    python -m benchmarks.gpu_fabric --links 200 --reduce bf16 --trace
    python -m benchmarks.gpu_fabric --smoke          # the same path on the CPU with tiny sizes

Sixteen Llama-like blocks of 202M parameters without embedding or head, 2048 tokens, bf16 compute with fp32
master weights, fused AdamW. Every contender and link runs in its own process. Seconds are between events
recorded at the end of consecutive steps on the compute stream; the host never waits in between, so work
that is started early for the next step counts where it belongs. Two floors stand beside: the same blocks
unsharded in bf16, forward and backward alone, and with AdamW on an eighth of the parameters, which is what
a rank whose communication is hidden completely would take.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import fabric, record
from benchmarks.launch import answer, launch
from benchmarks.model import Shape, batch_of, build, loss_of
from benchmarks.peers import Case, Run, adamw, find

WORLD_SIZE = 8
SHAPES = {
    "h200": Shape(hidden=4096, ffn=11008, heads=32, num_blocks=16, tokens=2048),
    "smoke": Shape(hidden=64, ffn=128, heads=4, num_blocks=3, tokens=16),
}
SETTLE = 2  # steps in which the allocator takes again what the reset gave back
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def compute(case: Case) -> Run:
    """Forward and backward of the whole model, nothing else."""
    model = build(case.shape, case.device, case.compute_dtype)

    def step(batch: Tensor) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return Run(model, torch.optim.SGD(model.parameters()), step)


def compute_and_update(case: Case) -> Run:
    """The same and AdamW on an fp32 shard, the update that one of eight ranks has to make."""
    run = compute(case)
    num_elems = sum(weight.numel() for weight in run.model.parameters()) // WORLD_SIZE
    shard = torch.nn.Linear(1, num_elems, bias=False, device=case.device)
    optimizer = adamw(shard)
    shard.weight.grad = torch.randn_like(shard.weight)

    def step(batch: Tensor) -> Tensor:
        loss = run.step(batch)
        optimizer.step()
        return loss

    return Run(run.model, optimizer, step)


FLOORS: dict[str, Callable[[Case], Run]] = {"compute": compute, "compute + AdamW/8": compute_and_update}


def worker(job: dict[str, Any]) -> None:
    """One contender on one link, in this process alone."""
    on_gpu = torch.cuda.is_available() and job["shape"] != "smoke"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    case = Case(SHAPES[job["shape"]], device, "bf16", DTYPES[job["reduce"]])
    link = fabric.Link(job["gigabytes_per_s"], shared=job["shared"])
    begin = time.perf_counter()
    fabric.start(WORLD_SIZE, link)
    setup = FLOORS[job["contender"]] if job["contender"] in FLOORS else find(job["contender"])
    run = setup(case)
    batch = batch_of(case.shape, device, case.compute_dtype, 0)
    clock = DeviceClock() if on_gpu else HostClock()
    losses = [run.step(batch) for _ in range(job["warmup"])]
    clock.reset()
    for _ in range(SETTLE):
        run.step(batch)
    setup_s = time.perf_counter() - begin
    busy_s = fabric.busy_s()
    clock.tick()
    for _ in range(job["steps"]):
        losses.append(run.step(batch))
        clock.tick()
    result = {"seconds": clock.seconds(), "setup_s": setup_s, **clock.memory()}
    result["wire_s"] = (fabric.busy_s() - busy_s) / job["steps"]
    result["losses"] = [losses[0].item(), losses[-1].item()]
    if job["trace"]:
        trace(lambda: run.step(batch), job["trace"])
    answer(result)


class DeviceClock:
    """Ends of steps as events on the compute stream, and the allocator's peaks since the reset."""

    def __init__(self) -> None:
        self.events: list[torch.cuda.Event] = []

    def reset(self) -> None:
        """What the set-up left in the allocator is given back; the next steps say what is needed."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def tick(self) -> None:
        self.events.append(torch.cuda.Event(enable_timing=True))
        self.events[-1].record()

    def seconds(self) -> list[float]:
        torch.cuda.synchronize()
        return [earlier.elapsed_time(later) * 1e-3 for earlier, later in itertools.pairwise(self.events)]

    def memory(self) -> dict[str, float]:
        return {
            "allocated_gb": torch.cuda.max_memory_allocated() / 1e9,
            "reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
        }


class HostClock:
    """The same for the CPU, where there is no peak to be read."""

    def __init__(self) -> None:
        self.instants: list[float] = []

    def reset(self) -> None:
        self.instants.clear()

    def tick(self) -> None:
        self.instants.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.instants)]

    def memory(self) -> dict[str, float]:
        return {"allocated_gb": 0.0, "reserved_gb": 0.0}


def trace(step: Callable[[], object], path: str) -> None:
    """A chrome trace of one step, with the one before it running into it."""
    from torch.profiler import ProfilerActivity, profile, schedule

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(
        activities=activities,
        schedule=schedule(wait=1, warmup=1, active=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(path),
    ) as profiler:
        for _ in range(3):
            step()
            profiler.step()


def row(job: dict[str, Any], result: dict[str, Any]) -> dict[str, str]:
    seconds = result["seconds"]
    is_floor = job["contender"] in FLOORS
    return {
        "contender": job["contender"],
        "link GB/s": "-" if is_floor else f"{job['gigabytes_per_s']:g}",
        "reduce": "-" if is_floor else job["reduce"],
        "s per step": f"{statistics.median(seconds):.4f}",
        "min-max": f"{min(seconds):.4f}-{max(seconds):.4f}",
        "wire s": "-" if is_floor else f"{result['wire_s']:.4f}",
        "allocated / reserved GB": f"{result['allocated_gb']:.1f} / {result['reserved_gb']:.1f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", default=["fsdp2", "shardwise:zero3"])
    parser.add_argument("--links", nargs="+", type=float, default=[1000, 200, 100], help="GB/s")
    parser.add_argument("--reduce", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--own-wires", action="store_true", help="a wire for each process group, not one for all")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--trace", action="store_true", help="a chrome trace of one step of each case")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    options = parser.parse_args()

    links = list(itertools.product(options.reduce, options.links, options.contenders))
    cases = [(options.reduce[0], options.links[0], floor) for floor in FLOORS] + links
    options.out.mkdir(parents=True, exist_ok=True)
    rows, raw = [], []
    for reduce, gigabytes_per_s, contender in cases * options.repetitions:
        traced = f"{contender.replace(':', '-')}-{gigabytes_per_s:g}-{reduce}.json.gz"
        job = {
            "contender": contender,
            "gigabytes_per_s": gigabytes_per_s,
            "reduce": reduce,
            "shape": "smoke" if options.smoke else "h200",
            "shared": not options.own_wires,
            "warmup": options.warmup,
            "steps": options.steps,
            "trace": str(options.out / traced) if options.trace and contender not in FLOORS else "",
        }
        result = launch("benchmarks.gpu_fabric", job)
        raw.append({**job, **result})
        rows.append(row(job, result))
        print(f"{rows[-1]} set-up {result['setup_s']:.0f} s, losses {result['losses']}", flush=True)

    shape = SHAPES[raw[0]["shape"]]
    note = (
        f"One rank of an emulated {WORLD_SIZE}-rank fabric, {shape.num_blocks} blocks of hidden "
        f"{shape.hidden} and ffn {shape.ffn}, {shape.tokens} tokens; "
        f"{'a wire per process group' if options.own_wires else 'one wire for all process groups'}; "
        f"median of {options.steps} steps after {options.warmup}; "
        "wire s: what the traffic of a step takes if nothing else runs."
    )
    page = record.write("gpu-fabric", note, rows, raw, options.out)
    print(f"\n{note}\n\n{record.markdown_table(rows)}\n\n{page}")


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker(json.loads(sys.argv[-1]))
    else:
        main()
