"""GPUs as torch sees them; memory, cores and limits of this process, which a container may lower; and the interfaces by
which ranks communicate."""

import contextlib
import os
import re
import resource
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from ..base.processes import cpu_limit, memory_limit
from ..core.native.library import COMPILERS, cache_folder
from . import Finding, Grade, judged, size

DEVICES, LIMITS, NETWORK = "devices", "limits", "network"
INFINIBAND = Path("/sys/class/infiniband")
# NCCL prefers interfaces in this order, by the beginning of their names; any other interface has place 1.
NCCL_PLACES = {"ib": 0, "docker": 2, "virbr": 3, "lo": 4}
NO_SHM = 64 << 20  # Docker's default, less than NCCL and data loaders need


def look(variables: Mapping[str, str]) -> Iterator[Finding]:
    num_gpus, driver = torch.cuda.device_count(), driver_version(Path("/proc/driver/nvidia/version"))
    if not torch.cuda.is_available():
        yield _without_gpus(driver)
    else:
        if driver is not None:
            yield Finding(DEVICES, "driver", driver, "NVIDIA's, for all GPUs")
        yield from map(_gpu, range(num_gpus))
        if num_gpus > 1:
            yield _peers(num_gpus)
    yield from _look_at_limits(num_gpus)
    yield from _look_at_network(variables, num_gpus)


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
        meaning = f"it cannot be used: {str(error).splitlines()[0]}"
        return Finding(DEVICES, name, about.name, meaning, "broken", "nvidia-smi shows who holds it")
    value = f"{about.name}, {size(total)}, {size(free)} free, compute capability {about.major}.{about.minor}"
    bf16 = "bf16 runs at full speed" if about.major >= 8 else "no fast bf16 before 8.0: use --precision fp16"
    fix = "nvidia-smi shows who holds the rest; a plan for this device counts on all of it"
    return judged(DEVICES, name, value, bf16, fix if free < 0.9 * total else "")


def _peers(num_gpus: int) -> Finding:
    pairs = [(a, b) for a in range(num_gpus) for b in range(num_gpus) if a != b]
    num_direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    value = f"{num_direct} of {len(pairs)} pairs directly, {_links()}"
    if num_direct == len(pairs):
        return Finding(DEVICES, "GPU to GPU", value, "gathers and reductions do not pass through the host")
    fix = "in a virtual machine turn ACS off or pass NVLink through; else prefer strategies that move less"
    return judged(DEVICES, "GPU to GPU", value, "other pairs communicate through the host's memory", fix)


def _links() -> str:
    """The NVLink connections in nvidia-smi's matrix: NV18 means 18 links."""
    try:
        command = ["nvidia-smi", "topo", "-m"]
        matrix = subprocess.run(command, capture_output=True, text=True, timeout=5.0, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "links unknown: no nvidia-smi"
    found = sorted(set(re.findall(r"\bNV\d+\b", matrix)), key=lambda word: int(word[2:]))
    return f"NVLink ({', '.join(found)})" if found else "no NVLink"


def _look_at_limits(num_gpus: int) -> Iterator[Finding]:
    memory, cores, cpu = psutil.virtual_memory(), len(os.sched_getaffinity(0)), cpu_limit()
    limit = memory_limit(memory.total)
    value = f"{size(memory.total)}, {size(memory.available)} available"
    meaning = "weights are read and checkpoints gathered through it; beyond the limit the kernel kills a rank (SIGKILL)"
    is_low = min(memory.available, limit or memory.available) < 2 << 30
    fix = "end what else runs, or raise the container's limit" if is_low else ""
    yield judged(LIMITS, "memory", value + (f", limited to {size(limit)}" if limit else ""), meaning, fix)

    value = f"{cores} of {os.cpu_count()}" + (f", limited to the time of {cpu:g}" if cpu else "")
    meaning = "ranks share them: OMP_NUM_THREADS, also for updates on the host, is cores / ranks unless you set it"
    fix = f"set OMP_NUM_THREADS to {max(1, int(cpu or 0))} / ranks: more threads than time make each other wait"
    yield judged(LIMITS, "cores", value, meaning, fix if cpu is not None and cpu < cores else "")

    yield _host_updates(cache_folder())

    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    value = "unlimited" if locked == resource.RLIM_INFINITY else size(locked)
    meaning = (
        "memory that one may lock (ulimit -l); InfiniBand registers its buffers that way. Offloaded state is "
        "pinned by CUDA, which rarely needs it; a run reports if that failed"
    )
    fix = "this machine has InfiniBand: ulimit -l unlimited (Docker: --ulimit memlock=-1)"
    is_short = locked != resource.RLIM_INFINITY and bool(adapters())
    yield judged(LIMITS, "locked memory", value, meaning, fix if is_short else "")

    shm = Path("/dev/shm")
    if shm.is_dir():
        room = shutil.disk_usage(shm)
        meaning = "NCCL passes data between the GPUs of a machine in it, where they have no direct way"
        fix = "Docker: --shm-size=8g, or --ipc=host; Kubernetes: an emptyDir with medium Memory on /dev/shm"
        grade: Grade = "broken" if num_gpus > 1 and room.free < NO_SHM else "worse"
        value = f"{size(room.total)}, {size(room.free)} free"
        yield judged(LIMITS, str(shm), value, meaning, fix if room.free < 1 << 30 else "", grade)
    else:
        meaning = "ranks of a machine share memory in it"
        yield Finding(LIMITS, str(shm), "missing", meaning, "broken", "mount a tmpfs there")

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    meaning = "of a process; a rank keeps sockets to its partners and maps of weights and data open"
    fix = f"ulimit -n {min(hard, 65536)}" if soft < 4096 else ""
    yield judged(LIMITS, "open files", f"{soft} (at most {hard})", meaning, fix)


def _host_updates(folder: Path) -> Finding:
    """Report how updates on the host run. Only search for a compiler: compiling takes seconds and leaves a file."""
    meaning = "of offloaded optimizers (--offload): one pass over memory, on a rank's cores"
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        fix = f"install a C compiler ({', '.join(COMPILERS)}), if something is offloaded"
        return Finding(LIMITS, "host updates", "by torch's operations, slower", meaning, "worse", fix)
    when = f"compiled in {folder}" if any(folder.glob("*.so")) else f"compiled when first needed, into {folder}"
    return Finding(LIMITS, "host updates", f"in C ({compiler}), {when}", meaning)


@dataclass(frozen=True, slots=True)
class Interface:
    name: str
    address: str
    speed_mbit: int  # 0: unknown


def _look_at_network(variables: Mapping[str, str], num_gpus: int) -> Iterator[Finding]:
    backends = [("gloo", "CPU", dist.is_available() and dist.is_gloo_available() and "available")]
    if num_gpus:
        has_nccl = dist.is_available() and dist.is_nccl_available()
        backends.append(("NCCL", "GPU", has_nccl and ".".join(map(str, torch.cuda.nccl.version()))))
    for name, kind, version in backends:
        meaning = f"collectives of {kind} ranks" if version else f"{kind} ranks cannot communicate"
        fix = "" if version else f"install a torch with {name}"
        yield judged(NETWORK, name, version or "missing", meaning, fix, "broken")
    found = interfaces()
    for interface in found:
        speed = f", {interface.speed_mbit / 1000:g} Gbit/s" if interface.speed_mbit else ""
        yield Finding(NETWORK, interface.name, f"{interface.address}{speed}", "an interface that is up")
    host = socket.gethostname()
    address = lookup(host)
    fix = "for more than one machine: give it its address in /etc/hosts or DNS; one machine does without"
    is_local = address is None or address.startswith("127.")
    meaning = "other machines get this name at the rendezvous"
    yield judged(NETWORK, "host name", f"{host}, {address or 'not found'}", meaning, fix if is_local else "")
    yield _taken("gloo", "GLOO_SOCKET_IFNAME", variables, gloo_takes(found, address))
    if num_gpus:
        yield _taken("NCCL", "NCCL_SOCKET_IFNAME", variables, nccl_takes(found))
        meaning = "NCCL's way between machines" if adapters() else "between machines NCCL uses the interface above"
        yield Finding(NETWORK, "InfiniBand", ", ".join(adapters()) or "none", meaning)


def adapters() -> list[str]:
    return sorted(path.name for path in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []


def interfaces() -> list[Interface]:
    stats = psutil.net_if_stats()
    return [
        Interface(name, address.address, stats[name].speed)
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET and name in stats and stats[name].isup
    ]


def lookup(host: str) -> str | None:
    """The IPv4 address of a host; None if there is none, or if the name service takes too long."""
    answers: list[str] = []

    def ask() -> None:
        with contextlib.suppress(OSError):
            answers.append(socket.gethostbyname(host))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(2.0)
    return answers[0] if answers else None


def gloo_takes(found: Sequence[Interface], address: str | None) -> str | None:
    """The interface that gloo would use: the one with the address of the host name, else the loopback."""
    named = next((interface.name for interface in found if interface.address == address), None)
    return named or next((interface.name for interface in found if interface.address.startswith("127.")), None)


def nccl_takes(found: Sequence[Interface]) -> str | None:
    def place(interface: Interface) -> int:
        return next((place for prefix, place in NCCL_PLACES.items() if interface.name.startswith(prefix)), 1)

    return min(found, key=place).name if found else None


def _taken(backend: str, variable: str, variables: Mapping[str, str], guess: str | None) -> Finding:
    name = f"{backend} takes"
    if variable in variables:
        return Finding(NETWORK, name, variables[variable], f"{variable} is set")
    if guess is None:
        return Finding(NETWORK, name, "nothing", "no interface is up", "broken", "bring one up, if only the loopback")
    return Finding(NETWORK, name, guess, f"set {variable} to have it take another")
