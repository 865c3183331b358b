"""GPUs as torch sees them, and memory, cores and limits of this process, which a container may lower."""

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from ..base.container_limits import cgroup_values, cpu_limit, memory_limit
from ..core.native.library import COMPILERS, cache_folder
from . import Finding, size

DEVICES, LIMITS = "devices", "limits"
DRIVER = Path("/proc/driver/nvidia/version")
CROWDED = 0.1  # fraction of the memory that other processes hold
TOOL_S = 5.0
SHM = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")
FEW_FILES = 4096
SMALL_SHM = 1 << 30
NO_SHM = 64 << 20  # Docker's default, less than NCCL and data loaders take


def look_at_gpus() -> Iterator[Finding]:
    driver = driver_version(DRIVER)
    if not torch.cuda.is_available():
        yield _without_gpus(driver)
        return
    if driver is not None:
        yield Finding(DEVICES, "driver", driver, "NVIDIA's, for all GPUs")
    num_gpus = torch.cuda.device_count()
    for index in range(num_gpus):
        yield _gpu(index)
    if num_gpus > 1:
        yield _peers(num_gpus)


def driver_version(file: Path) -> str | None:
    try:
        text = file.read_text()
    except OSError:
        return None
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    return found[0] if found else "unknown"


def _without_gpus(driver: str | None) -> Finding:
    if driver is None:
        return Finding(DEVICES, "GPUs", "none", "runs are on CPUs, with 2 ranks unless --nproc-per-node says otherwise")
    if torch.version.cuda is None:
        fix = "install a torch that is built for CUDA (pytorch.org/get-started)"
    else:
        fix = f"check CUDA_VISIBLE_DEVICES, and that driver {driver} is new enough for CUDA {torch.version.cuda}"
    meaning = f"there is a driver ({driver}), but torch {torch.__version__} cannot use it: runs are on CPUs"
    return Finding(DEVICES, "GPUs", "none for torch", meaning, "broken", fix)


def _gpu(index: int) -> Finding:
    about = torch.cuda.get_device_properties(index)
    name = f"cuda:{index}"
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        return Finding(
            DEVICES, name, about.name, f"it cannot be used: {reason}", "broken", "nvidia-smi shows who holds it"
        )
    value = f"{about.name}, {size(total)}, {size(free)} free, compute capability {about.major}.{about.minor}"
    bf16 = "bf16 runs at full speed" if about.major >= 8 else "no fast bf16 before 8.0: use --precision fp16"
    if free < (1 - CROWDED) * total:
        fix = "nvidia-smi shows who holds the rest; a plan for this device counts on all of it"
        return Finding(DEVICES, name, value, bf16, "worse", fix)
    return Finding(DEVICES, name, value, bf16)


def _peers(num_gpus: int) -> Finding:
    pairs = [(a, b) for a in range(num_gpus) for b in range(num_gpus) if a != b]
    num_direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    value = f"{num_direct} of {len(pairs)} pairs directly, {_links()}"
    if num_direct == len(pairs):
        return Finding(DEVICES, "GPU to GPU", value, "gathers and reductions do not pass through the host")
    fix = "in a virtual machine turn ACS off or pass NVLink through; else prefer strategies that move less"
    return Finding(DEVICES, "GPU to GPU", value, "other pairs communicate through the host's memory", "worse", fix)


def _links() -> str:
    """NVLinks by nvidia-smi's matrix: NV18 is 18 links."""
    try:
        matrix = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=TOOL_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "links unknown: no nvidia-smi"
    found = sorted(set(re.findall(r"\bNV\d+\b", matrix)), key=lambda word: int(word[2:]))
    return f"NVLink ({', '.join(found)})" if found else "no NVLink"


def look_at_limits(num_gpus: int) -> Iterator[Finding]:
    yield _memory()
    yield _cores()
    yield _host_updates(cache_folder())
    yield _pinned()
    yield _shm(num_gpus)
    yield _files()


def _memory() -> Finding:
    seen = psutil.virtual_memory()
    limit = memory_limit(cgroup_values("memory.max", "memory.limit_in_bytes"), seen.total)
    value = f"{size(seen.total)}, {size(seen.available)} available" + (f", limited to {size(limit)}" if limit else "")
    meaning = "weights are read and checkpoints gathered through it; beyond the limit the kernel kills a rank (SIGKILL)"
    if min(seen.available, limit or seen.available) < 2 << 30:
        return Finding(LIMITS, "memory", value, meaning, "worse", "end what else runs, or raise the container's limit")
    return Finding(LIMITS, "memory", value, meaning)


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0))
    limit = cpu_limit(cgroup_values("cpu.max", None))
    value = f"{usable} of {os.cpu_count()}" + (f", limited to the time of {limit:g}" if limit else "")
    meaning = "ranks share them: OMP_NUM_THREADS, also for updates on the host, is cores / ranks unless you set it"
    if limit is not None and limit < usable:
        fix = f"set OMP_NUM_THREADS to {max(1, int(limit))} / ranks: more threads than time make each other wait"
        return Finding(LIMITS, "cores", value, meaning, "worse", fix)
    return Finding(LIMITS, "cores", value, meaning)


def _host_updates(folder: Path) -> Finding:
    """Search for a compiler without compiling, which takes seconds and leaves a file."""
    meaning = "of offloaded optimizers (--offload): one pass over memory, on a rank's cores"
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        fix = f"install a C compiler ({', '.join(COMPILERS)}), if something is offloaded"
        return Finding(LIMITS, "host updates", "by torch's operations, slower", meaning, "worse", fix)
    when = f"compiled in {folder}" if any(folder.glob("*.so")) else f"compiled when first needed, into {folder}"
    return Finding(LIMITS, "host updates", f"in C ({compiler}), {when}", meaning)


def _pinned() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    value = "unlimited" if soft == resource.RLIM_INFINITY else size(soft)
    meaning = (
        "memory that one may lock (ulimit -l); InfiniBand registers its buffers that way. Offloaded state is "
        "pinned by CUDA, which rarely needs it; a run reports if that failed"
    )
    if soft != resource.RLIM_INFINITY and INFINIBAND.is_dir() and any(INFINIBAND.iterdir()):
        fix = "this machine has InfiniBand: ulimit -l unlimited (Docker: --ulimit memlock=-1)"
        return Finding(LIMITS, "locked memory", value, meaning, "worse", fix)
    return Finding(LIMITS, "locked memory", value, meaning)


def _shm(num_gpus: int) -> Finding:
    if not SHM.is_dir():
        fix = "mount a tmpfs there"
        return Finding(LIMITS, str(SHM), "missing", "ranks of a machine share memory in it", "broken", fix)
    seen = shutil.disk_usage(SHM)
    value = f"{size(seen.total)}, {size(seen.free)} free"
    meaning = "NCCL passes data between the GPUs of a machine in it, where they have no direct way"
    fix = "Docker: --shm-size=8g, or --ipc=host; Kubernetes: an emptyDir with medium Memory on /dev/shm"
    if seen.free < SMALL_SHM:
        is_broken = num_gpus > 1 and seen.free < NO_SHM
        return Finding(LIMITS, str(SHM), value, meaning, "broken" if is_broken else "worse", fix)
    return Finding(LIMITS, str(SHM), value, meaning)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    meaning = "of a process; a rank keeps sockets to its partners and maps of weights and data open"
    value = f"{soft} (at most {hard})"
    if soft < FEW_FILES:
        return Finding(LIMITS, "open files", value, meaning, "worse", f"ulimit -n {min(hard, 65536)}")
    return Finding(LIMITS, "open files", value, meaning)
