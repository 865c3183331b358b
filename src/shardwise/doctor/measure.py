"""What this machine reaches, measured in some seconds, for plans that shall be about it and not about its data sheets.

Each rate is that of work repeated for a fraction of a second, after it has been done once. Collectives need more than
one device, and processes of their own (`rings.py`); two of a processor's ranks stand in for GPUs where there are none.
"""

import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from torch import Tensor

from ..base.container_limits import cgroup_values, memory_limit
from ..planner.hardware.measured import CPU_RANKS, MATRIX, Measured
from .disk import existing, speeds
from .rings import Rings, measure_rings

BUDGET_S = 0.4
CONTEXT_BYTES = 1 << 29  # where it cannot be told from what others hold
MOST_CONTEXT_BYTES = 2 << 30
MODEL_NAME = Path("/proc/cpuinfo")


def measure(folder: Path) -> Measured:
    """The first GPU, or the processor; the host; and the disk of `folder`."""
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if is_gpu else torch.device("cpu")
    num_devices = torch.cuda.device_count() if is_gpu else 1
    num_ranks = num_devices if is_gpu else CPU_RANKS
    rings = measure_rings("nccl" if is_gpu else "gloo", num_ranks) if num_ranks > 1 else Rings()
    place = existing(folder)
    written, read = speeds(place)
    host_bytes = _host_bytes()
    flops, fp32_flops, copied = _products(device, _half(device)), _products(device, torch.float32), _copies(device)
    return Measured(
        device=torch.cuda.get_device_name(device) if is_gpu else _processor(),
        kind="cuda" if is_gpu else "cpu",
        num_devices=num_devices,
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if is_gpu else host_bytes,
        context_bytes=_context_bytes(device) if is_gpu else 0,
        flops=flops,
        fp32_flops=fp32_flops,
        memory_bytes_per_s=copied,
        to_host_bytes_per_s=_transfers(device, to_host=True) if is_gpu else None,
        from_host_bytes_per_s=_transfers(device, to_host=False) if is_gpu else None,
        gather_bytes_per_s=rings.gather_bytes_per_s,
        all_reduce_bytes_per_s=rings.all_reduce_bytes_per_s,
        collective_latency_us=rings.latency_us,
        host_memory_bytes=host_bytes,
        host_adam_elems_per_s=_updates(),
        disk_bytes=shutil.disk_usage(place).free,
        disk_read_bytes_per_s=read,
        disk_write_bytes_per_s=written,
    )


def rate(work: Callable[[], object], amount: float, device: torch.device) -> float:
    """`amount` is what one call does; per second."""
    work()
    _wait(device)
    began_s, num_calls, elapsed_s = time.perf_counter(), 0, 0.0
    while elapsed_s < BUDGET_S:
        # Some at once, so that the wait is not what is measured.
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


def _half(device: torch.device) -> torch.dtype:
    has_bf16 = device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if has_bf16 else torch.float16


def _products(device: torch.device, dtype: torch.dtype) -> float:
    size = MATRIX if device.type == "cuda" else 1024
    one, other = (torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)
    return rate(lambda: torch.mm(one, other, out=out), 2.0 * size**3, device)


def _copies(device: torch.device) -> float:
    """Bytes read and written."""
    source = _filled(1 << 30 if device.type == "cuda" else 1 << 27, device)
    target = torch.empty_like(source)
    return rate(lambda: target.copy_(source), 2.0 * source.nbytes, device)


def _transfers(device: torch.device, *, to_host: bool) -> float:
    there, here = _filled(1 << 28, device), _filled(1 << 28, torch.device("cpu")).pin_memory()
    target, source = (here, there) if to_host else (there, here)
    return rate(lambda: target.copy_(source, non_blocking=True), float(source.nbytes), device)


def _filled(num_bytes: int, device: torch.device) -> Tensor:
    return torch.ones(num_bytes // 4, device=device)


def _updates() -> float:
    """Parameters that AdamW on the host's cores updates in a second."""
    param = torch.nn.Parameter(_filled(1 << 25, torch.device("cpu")))
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW([param], fused=True)
    return rate(optimizer.step, float(param.numel()), torch.device("cpu"))


def _context_bytes(device: torch.device) -> int:
    """What is taken of the device and not by torch's allocator, once kernels have run; by others, too, which shows as
    too much."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    taken = total - free - torch.cuda.memory_reserved(device)
    return taken if 0 < taken <= MOST_CONTEXT_BYTES else CONTEXT_BYTES


def _host_bytes() -> int:
    total: int = psutil.virtual_memory().total
    return memory_limit(cgroup_values("memory.max", "memory.limit_in_bytes"), total) or total


def _processor() -> str:
    try:
        lines = MODEL_NAME.read_text().splitlines()
    except OSError:
        lines = []
    found = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"cpu ({found or platform.machine()})"
