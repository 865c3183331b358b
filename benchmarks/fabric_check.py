"""The emulated fabric held against the clock: planned seconds beside seen ones.

    python -m benchmarks.fabric_check

Each row is a few transfers, timed from outside with device events (or the host's clock). Two groups at once
must take the sum on a shared wire and the larger one on wires of their own, also while the device
multiplies matrices, whatever that does to its clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks import fabric, record

WORLD_SIZE = 8
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
NUM_ELEMS = 1 << (28 if ON_GPU else 20)
GIGABYTES_PER_S = 200.0 if ON_GPU else 0.1

if torch.__version__ >= (2, 13):
    all_gather, reduce_scatter = dist.all_gather_single, dist.reduce_scatter_single
else:
    all_gather, reduce_scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor


def seen_s(queue: Callable[[], None]) -> float:
    if not ON_GPU:
        begin_s = time.perf_counter()
        queue()
        return time.perf_counter() - begin_s
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    queue()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e-3


def check(shared: bool) -> list[dict[str, str]]:
    link = fabric.Link(GIGABYTES_PER_S, shared=shared)
    fabric.start(WORLD_SIZE, link)
    gathers, reductions = dist.new_group(), dist.new_group()
    whole, gradient = (torch.ones(NUM_ELEMS, device=DEVICE) for _ in range(2))
    own, own_gradient = (tensor.view(WORLD_SIZE, -1)[0] for tensor in (whole, gradient))
    matrix = torch.randn(4096 if ON_GPU else 64, 4096 if ON_GPU else 64, device=DEVICE, dtype=torch.bfloat16)

    def gather(asynchronous: bool = False) -> dist.Work | None:
        return all_gather(whole, own, group=gathers, async_op=asynchronous)

    def both(num_products: int = 0) -> None:
        works = [
            gather(asynchronous=True),
            reduce_scatter(own_gradient, gradient, group=reductions, async_op=True),
        ]
        for _ in range(num_products):
            matrix @ matrix
        for work in works:
            work.wait()

    one_s = whole.nbytes * (WORLD_SIZE - 1) / WORLD_SIZE / GIGABYTES_PER_S * 1e-9 + link.latency_us * 1e-6
    two_s = 2 * one_s if shared else one_s
    gather()  # fills the slots, compiles the kernel
    cases = {
        "one gather": (gather, one_s),
        "an all-reduce": (lambda: dist.all_reduce(whole), 2 * one_s),
        "gather and reduction at once": (both, two_s),
        "the same beside matrix products": (lambda: both(num_products=20), two_s),
    }
    rows = []
    for name, (queue, planned_s) in cases.items():
        measured_s = min(seen_s(queue) for _ in range(3))
        rows.append(
            {
                "wires": "one" if shared else "one per group",
                "what": name,
                "planned ms": f"{planned_s * 1e3:.2f}",
                "seen ms": f"{measured_s * 1e3:.2f}",
                "seen / planned": f"{measured_s / planned_s:.3f}",
            }
        )
    dist.destroy_process_group()
    return rows


if __name__ == "__main__":
    print(record.markdown_table(check(shared=True) + check(shared=False)))
