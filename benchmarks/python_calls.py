"""Python function calls that sharding adds to a step, per unit.

    python -m benchmarks.python_calls                       # shardwise:zero3 and fsdp2
    python -m benchmarks.python_calls shardwise:ddp --top 20

Counted are the interpreter's 'call' events of one whole step (forward, backward, optimizer, zero_grad)
after warm-up, on rank 0 of two gloo ranks, in all threads; on the CPU the backward runs in the calling
thread. The plain model with the plain optimizer at the same depth is subtracted. The difference between two
depths, divided by the units between them, is the cost of a unit; what is left is the cost of a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import record
from benchmarks.launch import answer, launch
from benchmarks.model import Block, Shape, batch_of
from benchmarks.peers import Case, find

SHAPE = Shape(hidden=64, ffn=128, heads=4, num_blocks=0, tokens=16, vocab=256)
SHALLOW, DEEP = 4, 8
WARMUP = 4


def count_calls(function: Callable[[], object]) -> Counter[str]:
    calls: Counter[CodeType] = Counter()

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls[frame.f_code] += 1

    threading.setprofile(on_event)  # threads that start from now on
    sys.setprofile(on_event)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    by_name: Counter[str] = Counter()
    for code, times in calls.items():
        by_name[f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_qualname}"] += times
    return by_name


def worker(job: dict[str, Any]) -> None:
    dist.init_process_group("gloo")
    case = Case(dataclasses.replace(SHAPE, num_blocks=job["num_blocks"]), torch.device("cpu"))
    run = find(job["contender"])(case)
    batch = batch_of(case.shape, case.device, case.compute_dtype, 0, dist.get_rank())
    for _ in range(WARMUP):
        run.step(batch)
    calls = count_calls(lambda: run.step(batch))
    if dist.get_rank() == 0:
        answer(calls)
    dist.barrier()


def added(contender: str, num_blocks: int) -> Counter[str]:
    """Calls by function, those of the plain model taken off."""
    seen, plain = (
        Counter(launch("benchmarks.python_calls", {"contender": name, "num_blocks": num_blocks}, world_size=2))
        for name in (contender, "plain")
    )
    seen.subtract(plain)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contenders", nargs="*", default=["shardwise:zero3", "fsdp2"])
    parser.add_argument("--top", type=int, default=0, help="also list the functions that a unit calls most")
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    options = parser.parse_args()

    rows, raw = [], {}
    for contender in options.contenders:
        shallow, deep = added(contender, SHALLOW), added(contender, DEEP)
        per_unit = Counter({name: (deep[name] - shallow[name]) / (DEEP - SHALLOW) for name in {*shallow, *deep}})
        total = sum(per_unit.values())
        per_step = sum(shallow.values()) - SHALLOW * total
        rows.append(
            {
                "contender": contender,
                "per unit and step": f"{total:.0f}",
                "per step besides": f"{per_step:.0f}",
            }
        )
        raw[contender] = {name: times for name, times in per_unit.most_common() if times}
        for name, times in list(raw[contender].items())[: options.top]:
            print(f"{times:8.1f}  {name}")

    params = len(list(Block(SHAPE).parameters()))
    note = f"Python calls added to a step; a unit is a block with {params} parameters, fp32, two gloo ranks."
    page = record.write("python-calls", note, rows, raw, options.out)
    print(f"\n{note}\n\n{record.markdown_table(rows)}\n\n{page}")


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker(json.loads(sys.argv[-1]))
    else:
        main()
