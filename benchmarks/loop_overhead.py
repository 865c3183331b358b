"""What the trainer's loop costs over a bare loop on the same engine.

    python -m benchmarks.loop_overhead [--model tiny] [--device cpu] ...

The same ranks, model, optimizer and batches, turn by turn: a stretch of steps in the loop (reading data, agreeing
on what comes next, learning rates, metrics, progress), then a stretch of forward, backward, clip and step over batches
that were read before. Takes flags of `shardwise train`, each with a value.
"""

import statistics
import sys
import time

import torch

from shardwise.core import mesh
from shardwise.trainer.checks import completed
from shardwise.trainer.config import resolve
from shardwise.trainer.launcher import launch
from shardwise.trainer.loop import run_steps
from shardwise.trainer.models.headloss import loss_sum
from shardwise.trainer.out_of_memory import FailureContext
from shardwise.trainer.run import set_up
from shardwise.trainer.run_state import Run
from shardwise.trainer.settings import settings_from_json

STRETCH = 20  # steps
TURNS = 8  # of each, after one of each to warm up


def measure(text: str) -> int:
    settings = completed(settings_from_json(text), torch.cuda.is_available())
    mesh.init(device=settings.device)
    run = set_up(settings, FailureContext())
    ratios = []
    for turn in range(TURNS + 1):
        first = 2 * turn * STRETCH
        loop_s, bare_s = in_the_loop(run, first), bare(run, first + STRETCH)
        if turn:
            ratios.append(loop_s / bare_s)
            run.progress.say(f"loop {loop_s / STRETCH * 1e3:8.2f} ms a step, bare {bare_s / STRETCH * 1e3:8.2f}")
    run.progress.say(
        f"loop / bare: {statistics.median(ratios):.4f} ({min(ratios):.4f}-{max(ratios):.4f}), {TURNS} turns of "
        f"{STRETCH} steps each"
    )
    mesh.leave()
    return 0


def in_the_loop(run: Run, first: int) -> float:
    run.step, run.num_steps, run.records.num_steps = first, first + STRETCH, first + STRETCH
    began = now(run)
    run_steps(run, lambda: None)
    return now(run) - began


def bare(run: Run, first: int) -> float:
    run.num_steps = first + STRETCH
    batches = [[batch.to(run.device) for batch in run.micro_batches(step)] for step in range(first, run.num_steps)]
    scale = 1 / batches[0][0].num_targets
    began = now(run)
    for (batch,) in batches:
        (loss_sum(run.model, batch) * scale).backward()
        run.optimizer.clip_grad_norm(1.0)
        run.optimizer.step()
        run.optimizer.zero_grad()
    return now(run) - began


def now(run: Run) -> float:
    if run.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    words = sys.argv[1:]
    names = (word.removeprefix("--").replace("-", "_") for word in words[::2])
    flags = {"max_steps": str(2 * STRETCH * (TURNS + 1)), **dict(zip(names, words[1::2], strict=True))}
    resolved = resolve([], flags, {})
    sys.exit(launch(resolved.settings, resolved.origin, entry="benchmarks.loop_overhead:measure"))


if __name__ == "__main__":
    main()
