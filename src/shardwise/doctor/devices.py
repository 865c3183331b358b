"""GPUs as torch sees them, and whether they reach each other without the host."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

from .finding import Finding, size

TOPIC = "devices"
DRIVER = Path("/proc/driver/nvidia/version")
CROWDED = 0.1  # of the memory taken by somebody else
TOOL_S = 5.0


def look() -> Iterator[Finding]:
    driver = driver_version(DRIVER)
    if not torch.cuda.is_available():
        yield _without_gpus(driver)
        return
    if driver is not None:
        yield Finding(TOPIC, "driver", driver, "NVIDIA's, for all GPUs")
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
        return Finding(TOPIC, "GPUs", "none", "runs are on CPUs, with 2 ranks unless --nproc-per-node says otherwise")
    if torch.version.cuda is None:
        fix = "install a torch that is built for CUDA (pytorch.org/get-started)"
    else:
        fix = f"check CUDA_VISIBLE_DEVICES, and that driver {driver} is new enough for CUDA {torch.version.cuda}"
    meaning = f"there is a driver ({driver}), but torch {torch.__version__} cannot use it: runs are on CPUs"
    return Finding(TOPIC, "GPUs", "none for torch", meaning, "broken", fix)


def _gpu(index: int) -> Finding:
    about = torch.cuda.get_device_properties(index)
    name = f"cuda:{index}"
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        return Finding(
            TOPIC, name, about.name, f"it cannot be used: {reason}", "broken", "nvidia-smi shows who holds it"
        )
    value = f"{about.name}, {size(total)}, {size(free)} free, compute capability {about.major}.{about.minor}"
    bf16 = "bf16 runs at full speed" if about.major >= 8 else "no fast bf16 before 8.0: use --precision fp16"
    if free < (1 - CROWDED) * total:
        fix = "nvidia-smi shows who holds the rest; a plan for this device counts on all of it"
        return Finding(TOPIC, name, value, bf16, "worse", fix)
    return Finding(TOPIC, name, value, bf16)


def _peers(num_gpus: int) -> Finding:
    pairs = [(a, b) for a in range(num_gpus) for b in range(num_gpus) if a != b]
    num_direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    value = f"{num_direct} of {len(pairs)} pairs directly, {_links()}"
    if num_direct == len(pairs):
        return Finding(TOPIC, "GPU to GPU", value, "gathers and reductions do not pass through the host")
    fix = "in a virtual machine turn ACS off or pass NVLink through; else prefer strategies that move less"
    return Finding(TOPIC, "GPU to GPU", value, "what is not direct passes through the host's memory", "worse", fix)


def _links() -> str:
    """By nvidia-smi's matrix: NV18 is 18 links of NVLink."""
    try:
        asked = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=TOOL_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "links unknown: no nvidia-smi"
    found = sorted(set(re.findall(r"\bNV\d+\b", asked)), key=lambda word: int(word[2:]))
    return f"NVLink ({', '.join(found)})" if found else "no NVLink"
