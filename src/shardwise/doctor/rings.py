"""What collectives among the devices of this machine reach. Each rank is a process; the first of them tells.

Bus bandwidth, as nccl-tests has it: the bytes of the whole times (N - 1) / N, twice that for an all-reduce, by seconds.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from ..base.processes import as_child, end_with_parent, temporary_folder
from ..core.wire.loopback import interfaces

WHOLE_BYTES = {"nccl": 1 << 30, "gloo": 1 << 25}
BUDGET_S = 0.4
NUM_SMALL = 50
LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Rings:
    """None: not measured."""

    gather_bytes_per_s: float | None = None
    all_reduce_bytes_per_s: float | None = None
    latency_us: float | None = None


def measure_rings(backend: str, num_ranks: int) -> Rings:
    """Nothing is known where the ranks do not find each other."""
    with temporary_folder() as folder:
        store = str(folder / "store")
        variables = as_child({**os.environ, **interfaces(os.environ)})
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, backend, str(rank), str(num_ranks), store],
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        try:
            told = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
        except subprocess.TimeoutExpired:
            return Rings()
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if any(process.returncode for process in processes):
        return Rings()
    return Rings(**json.loads(told[0].splitlines()[-1]))


def _rank(backend: str, rank: int, num_ranks: int, store: str) -> None:
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        store=FileStore(store, num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=LIMIT_S),
    )
    num_elems = WHOLE_BYTES[backend] // 4 // num_ranks * num_ranks
    whole = torch.ones(num_elems, device=device)
    part = torch.ones(num_elems // num_ranks, device=device)
    share = whole.nbytes * (num_ranks - 1) / num_ranks
    gather_s = _seconds(lambda: dist.all_gather_into_tensor(whole, part), device)
    reduce_s = _seconds(lambda: dist.all_reduce(whole), device)
    small, smaller = whole[: 64 * num_ranks], part[:64]
    small_s = _seconds(lambda: dist.all_gather_into_tensor(small, smaller), device)
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(asdict(Rings(share / gather_s, 2 * share / reduce_s, small_s * 1e6))))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The same number of times on every rank: how often, the first one decides by how long a call takes."""

    def run(num_calls: int) -> float:
        began_s = time.perf_counter()
        for _ in range(num_calls):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began_s) / num_calls

    run(1)
    chosen = torch.tensor([max(2, min(NUM_SMALL, round(BUDGET_S / run(2))))], device=device)
    dist.broadcast(chosen, 0)
    return run(int(chosen))


if __name__ == "__main__":
    end_with_parent()
    _rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
