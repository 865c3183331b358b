"""Rates of this machine, measured in some seconds, for plans that are about it and not about its data sheets.

Each kind of work runs once to warm up, and is then repeated for a fraction of a second. Collectives need more than one
device and one process per rank; without GPUs there are two CPU ranks. Their rate is the bus bandwidth of nccl-tests:
the bytes of the whole buffer times (N - 1) / N, twice that for an all-reduce, divided by the seconds.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from ..base.processes import as_child, end_with_parent, memory_limit, temporary_folder
from ..planner.hardware.cluster import CPU_RANKS, MATRIX, Measured
from ..trainer.loopback import interfaces
from .disk import existing, speeds

BUDGET_S = 0.4
LIMIT_S = 60.0


def measure(folder: Path) -> Measured:
    """Measure the first GPU, or the processor; the host; and the disk of `folder`."""
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if is_gpu else torch.device("cpu")
    num_devices = torch.cuda.device_count() if is_gpu else 1
    num_ranks = num_devices if is_gpu else CPU_RANKS
    collectives = measure_collectives("nccl" if is_gpu else "gloo", num_ranks) if num_ranks > 1 else {}
    place = existing(folder)
    written, read = speeds(place)
    total: int = psutil.virtual_memory().total
    host_bytes = memory_limit(total) or total
    has_bf16 = not is_gpu or torch.cuda.get_device_capability(device) >= (8, 0)
    return Measured(
        device=torch.cuda.get_device_name(device) if is_gpu else _processor(),
        kind="cuda" if is_gpu else "cpu",
        num_devices=num_devices,
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if is_gpu else host_bytes,
        flops=_products(device, torch.bfloat16 if has_bf16 else torch.float16),
        fp32_flops=_products(device, torch.float32),
        memory_bytes_per_s=_copies(device),
        context_bytes=_context_bytes(device) if is_gpu else 0,  # once kernels have run
        to_host_bytes_per_s=_transfers(device, to_host=True) if is_gpu else None,
        from_host_bytes_per_s=_transfers(device, to_host=False) if is_gpu else None,
        **collectives,
        host_memory_bytes=host_bytes,
        host_adam_elems_per_s=_updates(),
        disk_bytes=shutil.disk_usage(place).free,
        disk_read_bytes_per_s=read,
        disk_write_bytes_per_s=written,
    )


def rate(work: Callable[[], object], amount: float, device: torch.device) -> float:
    """Work per second; `amount` is the work of one call."""
    work()
    _wait(device)
    began_s, num_calls, elapsed_s = time.perf_counter(), 0, 0.0
    while elapsed_s < BUDGET_S:
        # Several calls for each wait, so that the time of waits does not matter.
        num_more = max(1, num_calls)
        for _ in range(num_more):
            work()
        _wait(device)
        num_calls += num_more
        elapsed_s = time.perf_counter() - began_s
    return amount * num_calls / elapsed_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _products(device: torch.device, dtype: torch.dtype) -> float:
    size = MATRIX if device.type == "cuda" else 1024
    one, other = (torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)
    return rate(lambda: torch.mm(one, other, out=out), 2.0 * size**3, device)


def _copies(device: torch.device) -> float:
    """Bytes read and written per second."""
    source = torch.ones(1 << 28 if device.type == "cuda" else 1 << 25, device=device)
    target = torch.empty_like(source)
    return rate(lambda: target.copy_(source), 2.0 * source.nbytes, device)


def _transfers(device: torch.device, *, to_host: bool) -> float:
    there, here = torch.ones(1 << 26, device=device), torch.ones(1 << 26).pin_memory()
    target, source = (here, there) if to_host else (there, here)
    return rate(lambda: target.copy_(source, non_blocking=True), float(source.nbytes), device)


def _updates() -> float:
    """Parameters per second that AdamW updates on the host's cores."""
    param = torch.nn.Parameter(torch.ones(1 << 23))
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW([param], fused=True)
    return rate(optimizer.step, float(param.numel()), torch.device("cpu"))


def _context_bytes(device: torch.device) -> int:
    """Device memory outside torch's allocator; 512 MiB if it is so large that it must include other processes."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    taken = total - free - torch.cuda.memory_reserved(device)
    return taken if 0 < taken <= 2 << 30 else 1 << 29


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: *(.+)", info.read_text() if info.is_file() else "", re.MULTILINE)
    return f"cpu ({found[1].strip() if found else platform.machine()})"


def measure_collectives(backend: str, num_ranks: int) -> dict[str, Any]:
    """Measure in one process per rank. Return fields of `Measured`; an empty dict if a rank fails or takes too long."""
    with temporary_folder() as folder:
        store = str(folder / "store")
        variables = as_child({**os.environ, **interfaces(os.environ)})
        processes = []
        for rank in range(num_ranks):
            # The module's name is written out, because __name__ may be __main__.
            command = [sys.executable, "-m", "shardwise.doctor.measure", backend, str(rank), str(num_ranks), store]
            pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
            processes.append(subprocess.Popen(command, env=variables, stdout=pipe, stderr=nowhere, text=True))
        try:
            outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
        except subprocess.TimeoutExpired:
            return {}
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if any(process.returncode for process in processes):
        return {}
    rates: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return rates


def _rank(backend: str, rank: int, num_ranks: int, store: str) -> None:
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    limit, file = timedelta(seconds=LIMIT_S), FileStore(store, num_ranks)
    dist.init_process_group(backend, store=file, rank=rank, world_size=num_ranks, timeout=limit)
    whole_bytes = 1 << (30 if backend == "nccl" else 25)
    num_elems = whole_bytes // 4 // num_ranks * num_ranks
    whole = torch.ones(num_elems, device=device)
    part = torch.ones(num_elems // num_ranks, device=device)
    sent = whole.nbytes * (num_ranks - 1) / num_ranks
    gather_s = _call_seconds(lambda: dist.all_gather_into_tensor(whole, part), device)
    reduce_s = _call_seconds(lambda: dist.all_reduce(whole), device)
    small, smaller = whole[: 64 * num_ranks], part[:64]
    small_s = _call_seconds(lambda: dist.all_gather_into_tensor(small, smaller), device)
    dist.destroy_process_group()
    if rank == 0:
        rates = {"gather_bytes_per_s": sent / gather_s, "all_reduce_bytes_per_s": 2 * sent / reduce_s}
        print(json.dumps({**rates, "collective_latency_us": small_s * 1e6}))


def _call_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call. The first rank chooses the number of calls, which is the same on every rank."""

    def run(num_calls: int) -> float:
        began_s = time.perf_counter()
        for _ in range(num_calls):
            work()
        _wait(device)
        return (time.perf_counter() - began_s) / num_calls

    run(1)
    chosen = torch.tensor([max(2, min(50, round(BUDGET_S / run(2))))], device=device)
    dist.broadcast(chosen, 0)
    return run(int(chosen))


if __name__ == "__main__":
    end_with_parent()
    _rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
