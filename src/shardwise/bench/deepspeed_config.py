"""What DeepSpeed is asked for, as the dictionary that it reads. Pure.

Sizes are those of its documentation, and for SuperOffload those of its examples. Where the optimizer leaves the device
it is the one that DeepSpeed makes itself (`DeepSpeedCPUAdam`): it refuses optimizers of others there.
"""

from typing import Any

from .case import Case
from .names import DeepSpeed

# The same for all contenders.
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}

_PINNED = {"pin_memory": True}
_AIO = {
    "block_size": 1 << 20,
    "queue_depth": 32,
    "intra_op_parallelism": 4,
    "single_submit": False,
    "overlap_events": True,
}


def config_of(case: Case, asked: DeepSpeed) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": case.batch,
        "gradient_accumulation_steps": case.micro_batches,
        "zero_optimization": _zero(asked) | _elsewhere(asked, case.disk_path) | _plus(asked, case.node_size),
        "bf16": {"enabled": case.precision == "bf16"},
        "communication_data_type": case.reduce,
        "gradient_clipping": case.clip,
        "zero_allow_untested_optimizer": True,
        **({"optimizer": {"type": "AdamW", "params": ADAMW}} if asked.away else {}),
        **({"aio": _AIO} if asked.away == "nvme" else {}),
    }


def _zero(asked: DeepSpeed) -> dict[str, Any]:
    is_super = asked.away == "super_offload"
    bucket_elems = 400_000_000 if is_super else 500_000_000
    zero: dict[str, Any] = {
        "stage": asked.stage,
        "overlap_comm": not is_super,
        "contiguous_gradients": True,
        "reduce_bucket_size": bucket_elems,
        "allgather_bucket_size": bucket_elems,
    }
    if asked.stage == 3:
        zero["stage3_prefetch_bucket_size"] = bucket_elems
        zero["sub_group_size"] = bucket_elems if is_super else 1_000_000_000
    return zero


def _plus(asked: DeepSpeed, node_size: int) -> dict[str, Any]:
    """The parts of ZeRO++; the second copy is split over the ranks of a node."""
    keys: dict[str, dict[str, Any]] = {
        "hpz": {"zero_hpz_partition_size": node_size},
        "qwz": {"zero_quantized_weights": True},
        "qgz": {"zero_quantized_gradients": True},
    }
    return {key: value for part in asked.parts for key, value in keys[part].items()}


def _elsewhere(asked: DeepSpeed, disk_path: str) -> dict[str, Any]:
    """What rests on the host or on disk."""
    if not asked.away:
        return {}
    if asked.away == "nvme":
        place = {"device": "nvme", "nvme_path": disk_path, **_PINNED}
        return {"offload_optimizer": {**place, "pipeline_read": True, "pipeline_write": True}, "offload_param": place}
    place = {"device": "cpu", **_PINNED}
    optimizer: dict[str, Any] = {**place, "ratio": asked.ratio}
    if asked.away == "super_offload":
        return {"offload_optimizer": {**optimizer, "super_offload": True, "cpuadam_cores_perc": 0.9}}
    moves_params = asked.stage == 3 and asked.away == "offload"
    return {"offload_optimizer": optimizer, **({"offload_param": place} if moves_params else {})}
