"""Memory, cores and limits of this process; a container's are often lower than its machine's."""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from ..base.container_limits import cgroup_values, cpu_limit, memory_limit
from ..core.native.library import COMPILERS, cache_folder
from .finding import Finding, size

TOPIC = "limits"
SHM = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")
FEW_FILES = 4096
SMALL_SHM = 1 << 30
NO_SHM = 64 << 20  # Docker's default, less than NCCL and data loaders take


def look(num_gpus: int) -> Iterator[Finding]:
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
        return Finding(TOPIC, "memory", value, meaning, "worse", "end what else runs, or raise the container's limit")
    return Finding(TOPIC, "memory", value, meaning)


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0))
    limit = cpu_limit(cgroup_values("cpu.max", None))
    value = f"{usable} of {os.cpu_count()}" + (f", limited to the time of {limit:g}" if limit else "")
    meaning = "ranks share them: OMP_NUM_THREADS is cores / ranks unless you set it, and so many update on the host"
    if limit is not None and limit < usable:
        fix = f"set OMP_NUM_THREADS to {max(1, int(limit))} / ranks: more threads than time make each other wait"
        return Finding(TOPIC, "cores", value, meaning, "worse", fix)
    return Finding(TOPIC, "cores", value, meaning)


def _host_updates(kept: Path) -> Finding:
    """Looked for, not compiled: that takes seconds, and leaves a file."""
    meaning = "of optimizers that rest on the host or on disk (--offload): one pass over memory, on a rank's cores"
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        fix = f"install a C compiler ({', '.join(COMPILERS)}), if something shall rest there"
        return Finding(TOPIC, "host updates", "by torch's operations, slower", meaning, "worse", fix)
    when = f"compiled in {kept}" if any(kept.glob("*.so")) else f"compiled when first needed, into {kept}"
    return Finding(TOPIC, "host updates", f"in C ({compiler}), {when}", meaning)


def _pinned() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    value = "unlimited" if soft == resource.RLIM_INFINITY else size(soft)
    meaning = (
        "memory that one may lock (ulimit -l); InfiniBand registers its buffers that way. What rests on the host is "
        "pinned by CUDA, which seldom minds it; a run says if it could not be"
    )
    if soft != resource.RLIM_INFINITY and INFINIBAND.is_dir() and any(INFINIBAND.iterdir()):
        fix = "this machine has InfiniBand: ulimit -l unlimited (Docker: --ulimit memlock=-1)"
        return Finding(TOPIC, "locked memory", value, meaning, "worse", fix)
    return Finding(TOPIC, "locked memory", value, meaning)


def _shm(num_gpus: int) -> Finding:
    if not SHM.is_dir():
        fix = "mount a tmpfs there"
        return Finding(TOPIC, str(SHM), "missing", "ranks of a machine share memory in it", "broken", fix)
    seen = shutil.disk_usage(SHM)
    value = f"{size(seen.total)}, {size(seen.free)} free"
    meaning = "NCCL passes data between the GPUs of a machine in it, where they have no direct way"
    fix = "Docker: --shm-size=8g, or --ipc=host; Kubernetes: an emptyDir with medium Memory on /dev/shm"
    if seen.free < SMALL_SHM:
        is_broken = num_gpus > 1 and seen.free < NO_SHM
        return Finding(TOPIC, str(SHM), value, meaning, "broken" if is_broken else "worse", fix)
    return Finding(TOPIC, str(SHM), value, meaning)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    meaning = "of a process; a rank keeps sockets to its partners and maps of weights and data open"
    value = f"{soft} (at most {hard})"
    if soft < FEW_FILES:
        return Finding(TOPIC, "open files", value, meaning, "worse", f"ulimit -n {min(hard, 65536)}")
    return Finding(TOPIC, "open files", value, meaning)
