"""GPUs by name. The one table of what devices have and do.

Memory is what drivers report to torch (`total_memory`), as its out-of-memory messages quote it; it is less than the
name says, and differs by some 0.1 GiB among drivers. FLOP/s (dense, summed in fp32) and device memory's bandwidth are
the vendors' data sheets'.

Links are the bus bandwidth that rings reach (nccl-tests). NVLink 4: 361 GB/s gathered on 8 x H200, and 480 where the
switch adds up. Other generations by NCCL's own constants, which say 371 for that: 20 GB/s for each of 12 links of an
A100 and of 6 of a V100, 40 for each of 18 of a B200, whose switch has been seen to add up at 830. PCIe: NCCL counts
12, 24 and 48 GB/s for generations 3, 4 and 5, of which many GPUs at once get some 80 %. Infinity Fabric: 310 of 448
GB/s on 8 x MI300X.
"""

import re

from ...base.errors import ConfigurationError, did_you_mean
from .links import Link
from .values import GIB, Gpu, Host

LATENCY_US = 20.0
HOST_LATENCY_US = 10.0

WITHIN = {
    "nvlink5": Link(720.0, LATENCY_US), "nvlink4": Link(361.0, LATENCY_US), "nvlink3": Link(240.0, LATENCY_US),
    "nvlink2": Link(120.0, LATENCY_US), "nvlink-8-links": Link(160.0, LATENCY_US),
    "xgmi4": Link(370.0, LATENCY_US), "xgmi3": Link(310.0, LATENCY_US), "xgmi2": Link(100.0, LATENCY_US),
    "pcie5": Link(38.0, LATENCY_US), "pcie4": Link(20.0, LATENCY_US), "pcie3": Link(10.0, LATENCY_US),
}  # fmt: skip
SWITCHES = {"nvlink4": Link(480.0, LATENCY_US), "nvlink5": Link(830.0, LATENCY_US)}
TO_HOST = {
    "pcie5": Link(50.0, HOST_LATENCY_US), "pcie4": Link(25.0, HOST_LATENCY_US), "pcie3": Link(12.0, HOST_LATENCY_US),
    "c2c": Link(380.0, HOST_LATENCY_US),
}  # fmt: skip

# A GPU's share. Disks: one NVMe for each GPU. Updates: bound by the host's memory, 30 bytes for a parameter. The 16
# cores beside one H200 do 4e9 a second; eight GPUs that share a node's memory get less of it each.
_SERVER = Host(
    memory_bytes=256 * 10**9, disk_bytes=3840 * 10**9, disk_read_bytes_per_s=3e9, disk_write_bytes_per_s=2e9,
    adam_elems_per_s=1.5e9,
)  # fmt: skip
_SMALL = Host(
    memory_bytes=64 * 10**9, disk_bytes=1000 * 10**9, disk_read_bytes_per_s=3e9, disk_write_bytes_per_s=2e9,
    adam_elems_per_s=8e8,
)  # fmt: skip


def _gpu(
    name: str, device: str, memory_gib: float, teraflops: float, fp32_teraflops: float, hbm_gigabytes_per_s: float,
    within: str, to_host: str, network: str, node_size: int = 8, has_bf16: bool = True,
) -> Gpu:  # fmt: skip
    return Gpu(
        name=name,
        device=device,
        memory_bytes=round(memory_gib * GIB),
        flops=teraflops * 1e12,
        fp32_flops=fp32_teraflops * 1e12,
        hbm_bytes_per_s=hbm_gigabytes_per_s * 1e9,
        intra=WITHIN[within],
        pcie=TO_HOST[to_host],
        switch=SWITCHES.get(within),
        has_bf16=has_bf16,
        node_size=node_size,
        network=network,
        host=_SERVER if network.startswith(("ib", "roce")) else _SMALL,
    )


# Of two whose words are in a device's name, the first is it.
_TABLE = (
    _gpu("GB300", "GB300", 276.5, 2500, 80, 8000, "nvlink5", "c2c", "ib-xdr", 4),
    _gpu("B300", "B300", 267.7, 2250, 75, 8000, "nvlink5", "pcie5", "ib-xdr"),
    _gpu("GB200", "GB200", 184.0, 2500, 80, 8000, "nvlink5", "c2c", "ib-ndr", 4),
    _gpu("B200", "B200", 178.35, 2250, 75, 8000, "nvlink5", "pcie5", "ib-ndr"),
    _gpu("H200-NVL", "H200 NVL", 139.8, 835, 60, 4800, "pcie5", "pcie5", "ib-ndr"),
    _gpu("H200-141GB", "H200", 139.8, 989.5, 67, 4800, "nvlink4", "pcie5", "ib-ndr"),
    _gpu("GH200-96GB", "GH200", 94.5, 989.5, 67, 4000, "nvlink4", "c2c", "ib-ndr", 1),
    _gpu("H100-PCIe", "H100 PCIe", 79.1, 756, 51, 2039, "pcie5", "pcie5", "ib-ndr"),
    _gpu("H100-NVL", "H100 NVL", 93.1, 835, 60, 3938, "pcie5", "pcie5", "ib-ndr"),
    _gpu("H100-96GB", "H100 96GB", 94.99, 989.5, 67, 2400, "nvlink4", "pcie5", "ib-ndr"),
    _gpu("H100-80GB", "H100", 79.1, 989.5, 67, 3352, "nvlink4", "pcie5", "ib-ndr"),
    _gpu("H800-80GB", "H800", 79.1, 989.5, 67, 3352, "nvlink-8-links", "pcie5", "ib-ndr"),
    _gpu("H20-96GB", "H20", 95.0, 148, 44, 4000, "nvlink4", "pcie5", "ib-ndr"),
    _gpu("A100-PCIe-40GB", "A100-PCIE-40GB", 39.39, 312, 19.5, 1555, "pcie4", "pcie4", "ib-hdr"),
    _gpu("A100-PCIe-80GB", "A100 80GB PCIe", 79.15, 312, 19.5, 1935, "pcie4", "pcie4", "ib-hdr"),
    _gpu("A100-40GB", "A100-SXM4-40GB", 39.39, 312, 19.5, 1555, "nvlink3", "pcie4", "ib-hdr"),
    _gpu("A100-80GB", "A100", 79.15, 312, 19.5, 2039, "nvlink3", "pcie4", "ib-hdr"),
    _gpu("A800-80GB", "A800", 79.15, 312, 19.5, 2039, "nvlink-8-links", "pcie4", "ib-hdr"),
    _gpu("A40", "A40", 44.4, 149.7, 37.4, 696, "pcie4", "pcie4", "ethernet-100"),
    _gpu("A30", "A30", 23.5, 165, 10.3, 933, "pcie4", "pcie4", "ethernet-100"),
    _gpu("A10G", "A10G", 22.1, 70, 35, 600, "pcie4", "pcie4", "ethernet-100"),
    _gpu("A10", "A10", 22.1, 125, 31.2, 600, "pcie4", "pcie4", "ethernet-100"),
    _gpu("L40S", "L40S", 44.4, 362, 91.6, 864, "pcie4", "pcie4", "ethernet-100"),
    _gpu("L40", "L40", 44.4, 181, 90.5, 864, "pcie4", "pcie4", "ethernet-100"),
    _gpu("L4", "L4", 22.0, 121, 30.3, 300, "pcie4", "pcie4", "ethernet-100"),
    _gpu("RTX-A6000", "RTX A6000", 47.5, 154.8, 38.7, 768, "pcie4", "pcie4", "ethernet-25", 4),
    _gpu("RTX-A5000", "RTX A5000", 23.5, 111.1, 27.8, 768, "pcie4", "pcie4", "ethernet-25", 4),
    _gpu("RTX-6000-Ada", "RTX 6000 Ada", 47.5, 364.2, 91.1, 960, "pcie4", "pcie4", "ethernet-25", 4),
    _gpu("RTX-5090", "RTX 5090", 31.4, 209.5, 104.8, 1792, "pcie5", "pcie5", "ethernet-10", 2),
    _gpu("RTX-4090", "RTX 4090", 23.64, 165.2, 82.6, 1008, "pcie4", "pcie4", "ethernet-10", 2),
    _gpu("RTX-3090", "RTX 3090", 23.69, 71, 35.6, 936, "pcie4", "pcie4", "ethernet-10", 2),
    _gpu("V100-16GB", "V100-[A-Z0-9]+-16GB", 15.77, 125, 15.7, 900, "nvlink2", "pcie3", "ib-edr", has_bf16=False),
    _gpu("V100-32GB", "V100", 31.74, 125, 15.7, 900, "nvlink2", "pcie3", "ib-edr", has_bf16=False),
    _gpu("T4", "T4", 14.75, 65, 8.1, 320, "pcie3", "pcie3", "ethernet-25", 4, has_bf16=False),
    _gpu("MI355X", "MI355X", 287.98, 2516, 157, 8000, "xgmi4", "pcie5", "roce-400"),
    _gpu("MI350X", "MI350X", 287.98, 2307, 144, 8000, "xgmi4", "pcie5", "roce-400"),
    _gpu("MI325X", "MI325X", 255.98, 1307, 163.4, 6000, "xgmi3", "pcie5", "roce-400"),
    _gpu("MI300X", "MI300X", 191.98, 1307, 163.4, 5300, "xgmi3", "pcie5", "roce-400"),
    # Each of the two devices that it is.
    _gpu("MI250X", "MI250X", 63.98, 191.5, 23.9, 1638, "xgmi2", "pcie4", "ib-hdr"),
)
GPUS = {gpu.name: gpu for gpu in _TABLE}

# What people say for the usual one. An A100 or V100 without its size is two different things.
_SHORT = {
    "h100": "H100-80GB", "h10080gbpcie": "H100-PCIe", "h10094gb": "H100-NVL", "h200": "H200-141GB", "h800": "H800-80GB",
    "h20": "H20-96GB", "gh200": "GH200-96GB", "a800": "A800-80GB", "b200180gb": "B200", "b200192gb": "B200",
    "a10080gbpcie": "A100-PCIe-80GB", "a10040gbpcie": "A100-PCIe-40GB", "mi300x192gb": "MI300X", "l40s48gb": "L40S",
    "l424gb": "L4", "a10g24gb": "A10G", "t416gb": "T4", "a6000": "RTX-A6000", "a5000": "RTX-A5000",
    "6000ada": "RTX-6000-Ada",
    **{short: f"RTX-{number}" for number in (5090, 4090, 3090) for short in (f"{number}", f"geforcertx{number}")},
}  # fmt: skip
_BY_LETTERS = {re.sub(r"[^a-z0-9]", "", name.lower()): gpu for name, gpu in GPUS.items()}
_BY_LETTERS |= {short: GPUS[name] for short, name in _SHORT.items()}


def gpu_named(name: str) -> Gpu:
    """`H100-80GB`, `h100`, `RTX 4090`, `A100-SXM4-80GB`: letters and digits count."""
    letters = re.sub(r"[^a-z0-9]|sxm\d?|^nvidia|^amd", "", name.lower())
    if letters in _BY_LETTERS:
        return _BY_LETTERS[letters]
    sizes = [known for known in GPUS if letters and re.fullmatch(rf"{letters}\d+gb", known.lower().replace("-", ""))]
    if len(sizes) > 1:
        raise ConfigurationError(f"--gpus: there are {' and '.join(sizes)}: say which {name!r} it is")
    raise ConfigurationError(
        f"--gpus: unknown GPU {name!r}; {did_you_mean(name.upper(), GPUS)}; of another one take the nearest with "
        "--gpu-memory, or measure it (shardwise doctor --measure)"
    )


def gpu_of_device(device_name: str) -> Gpu | None:
    """By the name that a driver gives it; a laptop's chip has the name of another one."""
    if "laptop" in device_name.lower():
        return None
    found = (gpu for gpu in _TABLE if re.search(rf"\b{gpu.device}\b", device_name, re.IGNORECASE))
    return next(found, None)
