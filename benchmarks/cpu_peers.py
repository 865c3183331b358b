"""shardwise beside DDP, FSDP2 and DeepSpeed on gloo ranks of this machine: seconds per step.

    python -m benchmarks.cpu_peers                      # everything, about a quarter of an hour on two cores
    python -m benchmarks.cpu_peers --pairs shardwise:zero3=fsdp2 --repetitions 1

Every contender runs in its own processes, and the repetitions are interleaved (A B C A B C ...), so that a
slow minute of the machine falls on all of them. First of all the losses: a pair whose losses differ from
one process on the whole batch by more than 1e-4 is an error, not a ratio.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import record
from benchmarks.launch import answer, launch
from benchmarks.model import Shape, batch_of, build, loss_of
from benchmarks.peers import Case, adamw, find

SHAPES = {
    "50m": Shape(hidden=512, ffn=1408, heads=8, num_blocks=12, tokens=64, vocab=8192),
    "smoke": Shape(hidden=64, ffn=128, heads=4, num_blocks=2, tokens=16, vocab=256),
}
PAIRS = [
    "shardwise:ddp=torch-ddp",
    "shardwise:zero3=fsdp2",
    "shardwise:zero1=deepspeed:1",
    "shardwise:zero2=deepspeed:2",
    "shardwise:zero3=deepspeed:3",
]
WARMUP, MEASURED = 3, 9
TOLERANCE = 1e-4


def worker(job: dict[str, Any]) -> None:
    """One rank of one contender. Answers with the losses, mean over the ranks, and the measured seconds."""
    dist.init_process_group("gloo")
    case = Case(SHAPES[job["shape"]], torch.device("cpu"))
    run = find(job["contender"])(case)
    steps = range(WARMUP + MEASURED)
    batches = [batch_of(case.shape, case.device, case.compute_dtype, step, dist.get_rank()) for step in steps]
    losses, instants = [], []
    for batch in batches:
        # Nothing but steps in this loop: what is started early for the next step is paid for inside it.
        losses.append(run.step(batch))
        instants.append(time.perf_counter())
    means = torch.stack(losses)
    dist.all_reduce(means)
    means /= dist.get_world_size()
    if dist.get_rank() == 0:
        seconds = [later - earlier for earlier, later in itertools.pairwise(instants)]
        answer({"losses": means.tolist(), "seconds": seconds[WARMUP - 1 :]})
    dist.barrier()


def reference(shape: Shape, world_size: int) -> list[float]:
    """Losses of one process that sees the batches of all ranks."""
    device = torch.device("cpu")
    model = build(shape, device)
    optimizer = adamw(model)
    losses = []
    for step in range(WARMUP + MEASURED):
        ranks = [batch_of(shape, device, torch.float32, step, rank) for rank in range(world_size)]
        loss = loss_of(model, torch.cat(ranks))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def largest_difference(losses: list[float], expected: list[float]) -> float:
    return max(abs(seen - want) / abs(want) for seen, want in zip(losses, expected, strict=True))


def row(ours: str, peer: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Ratios are taken within a repetition, where both saw the same machine."""
    medians = {name: [statistics.median(run["seconds"]) for run in runs[name]] for name in (ours, peer)}
    ratios = [theirs / mine for mine, theirs in zip(medians[ours], medians[peer], strict=True)]
    first, last = (runs[ours][0]["losses"][i] for i in (0, -1))
    return {
        "ours": ours,
        "peer": peer,
        "ours s": f"{statistics.median(medians[ours]):.3f}",
        "peer s": f"{statistics.median(medians[peer]):.3f}",
        "peer / ours": f"{statistics.median(ratios):.2f}",
        "min-max": f"{min(ratios):.2f}-{max(ratios):.2f}",
        "loss first, last": f"{first:.4f}, {last:.4f}",
        "peer's": "{:.4f}, {:.4f}".format(*(runs[peer][0]["losses"][i] for i in (0, -1))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=PAIRS, metavar="OURS=PEER")
    parser.add_argument("--shape", choices=SHAPES, default="50m")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    options = parser.parse_args()

    pairs = [pair.split("=") for pair in options.pairs]
    names = list(dict.fromkeys(name for pair in pairs for name in pair))
    shape = SHAPES[options.shape]
    num_params = sum(weight.numel() for weight in build(shape, torch.device("meta")).parameters())
    expected = reference(shape, options.world_size)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for repetition in range(options.repetitions):
        for name in names:
            job = {"contender": name, "shape": options.shape}
            run = launch("benchmarks.cpu_peers", job, options.world_size)
            off = largest_difference(run["losses"], expected)
            if off > TOLERANCE:
                sys.exit(f"{name}: losses {run['losses']} are {off:.1e} off those of one process, {expected}")
            runs[name].append(run)
            median_s = statistics.median(run["seconds"])
            print(f"{repetition} {name:22} {median_s:.3f} s, losses {off:.0e} off", flush=True)

    rows = [row(ours, peer, runs) for ours, peer in pairs]
    note = (
        f"{num_params / 1e6:.1f}M parameters, fp32, {shape.tokens} tokens per rank, "
        f"{options.world_size} gloo ranks with one thread each; median of {MEASURED} steps after {WARMUP}, "
        f"then median and spread over {options.repetitions} repetitions."
    )
    page = record.write("cpu-peers", note, rows, runs, options.out)
    print(f"\n{note}\n\n{record.markdown_table(rows)}\n\n{page}")


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker(json.loads(sys.argv[-1]))
    else:
        main()
