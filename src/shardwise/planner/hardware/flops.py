"""What a token costs to train on, and what a device could do at best: together, the model FLOP utilisation (MFU)."""

from ...base.dtypes import BF16, FP16, DType
from .gpus import gpu_of_device


def peak_flops(device_name: str, dtype: DType) -> float | None:
    """Dense FLOP/s of a device; None where a share of it would say nothing: unknown devices, and 32 bits, whose peak
    depends on whether products may be rounded to tf32."""
    gpu = gpu_of_device(device_name)
    if gpu is None or dtype not in ((BF16, FP16) if gpu.has_bf16 else (FP16,)):
        return None
    return gpu.flops


def flops_per_token(num_multiplying_params: int, layers: int, hidden: int, seq: int) -> float:
    """Forward and backward, as torchtitan counts them: 6 for each parameter that multiplies, and attention in full.

    An embedding is looked up, not multiplied; where it is tied, it multiplies as the head. `hidden` is heads x the size
    of a head. What is computed a second time, for activation checkpointing, does not count.
    """
    return 6 * num_multiplying_params + 12 * layers * hidden * seq
