"""What a token costs to train on, and what a device could do at best: together, the model FLOP utilisation (MFU)."""

import re

from ..dtypes import BF16, FP16, DType

# Dense FLOP/s in 16 bits, summed in fp32, from the vendors' data sheets; the first name that is words of the device's.
_PEAK_FLOPS = {
    "GB300": 2500e12, "B300": 2250e12, "GB200": 2500e12, "B200": 2250e12,
    "H200 NVL": 835e12, "H200": 989.5e12, "GH200": 989.5e12,
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989.5e12, "H800": 989.5e12, "H20": 148e12,
    "A100": 312e12, "A800": 312e12, "A40": 149.7e12, "A30": 165e12, "A10G": 70e12, "A10": 125e12,
    "L40S": 362e12, "L40": 181e12, "L4": 121e12,
    "RTX A6000": 154.8e12, "RTX 6000 Ada": 364.2e12,
    "RTX 5090": 209.5e12, "RTX 4090": 165.2e12, "RTX 3090": 71e12,
    # An MI250X is two devices.
    "MI355X": 2516e12, "MI350X": 2307e12, "MI325X": 1307e12, "MI300X": 1307e12, "MI250X": 191.5e12,
}  # fmt: skip


def peak_flops(device_name: str, dtype: DType) -> float | None:
    """Dense FLOP/s of a device; None where a share of it would say nothing: unknown devices, and 32 bits, whose peak
    depends on whether products may be rounded to tf32."""
    # A laptop's chip has the name of another one.
    if dtype not in (BF16, FP16) or "laptop" in device_name.lower():
        return None
    found = (flops for name, flops in _PEAK_FLOPS.items() if re.search(rf"\b{name}\b", device_name, re.IGNORECASE))
    return next(found, None)


def flops_per_token(num_multiplying_params: int, layers: int, hidden: int, seq: int) -> float:
    """Forward and backward, as torchtitan counts them: 6 for each parameter that multiplies, and attention in full.

    An embedding is looked up, not multiplied; where it is tied, it multiplies as the head. `hidden` is heads x the size
    of a head. What is computed a second time, for activation checkpointing, does not count.
    """
    return 6 * num_multiplying_params + 12 * layers * hidden * seq
