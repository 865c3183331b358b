"""The configuration of the DeepSpeed peer. No torch.

Buffer sizes are those of its documentation, and for SuperOffload those of its examples. With an offloaded optimizer,
DeepSpeed must build the optimizer itself (`DeepSpeedCPUAdam`): it refuses other optimizers there.
"""

from typing import Any

from .case import Case
from .names import NVME, DeepSpeed

# The same hyper-parameters for every contender.
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}

_AIO = {
    "block_size": 1 << 20,
    "queue_depth": 32,
    "intra_op_parallelism": 4,
    "single_submit": False,
    "overlap_events": True,
}


def config_of(case: Case, request: DeepSpeed) -> dict[str, Any]:
    """The configuration for `deepspeed.initialize`."""
    hpz_qwz_qgz: dict[str, dict[str, Any]] = {
        "hpz": {"zero_hpz_partition_size": case.node_size},
        "qwz": {"zero_quantized_weights": True},
        "qgz": {"zero_quantized_gradients": True},
    }
    plus = {key: value for part in request.parts for key, value in hpz_qwz_qgz[part].items()}
    return {
        "train_micro_batch_size_per_gpu": case.batch,
        "gradient_accumulation_steps": case.micro_batches,
        "zero_optimization": _zero(request) | _offload(request, case.disk_path) | plus,
        "bf16": {"enabled": case.precision == "bf16"},
        "communication_data_type": case.reduce,
        "gradient_clipping": case.clip,
        "zero_allow_untested_optimizer": True,
        **({"optimizer": {"type": "AdamW", "params": ADAMW}} if request.offload else {}),
        **({"aio": _AIO} if request.offload == NVME else {}),
    }


def _zero(request: DeepSpeed) -> dict[str, Any]:
    is_super = request.offload == "super_offload"
    bucket_elems = 400_000_000 if is_super else 500_000_000
    zero: dict[str, Any] = {
        "stage": request.stage,
        "overlap_comm": not is_super,
        "contiguous_gradients": True,
        "reduce_bucket_size": bucket_elems,
        "allgather_bucket_size": bucket_elems,
    }
    if request.stage == 3:
        zero["stage3_prefetch_bucket_size"] = bucket_elems
        zero["sub_group_size"] = bucket_elems if is_super else 1_000_000_000
    return zero


def _offload(request: DeepSpeed, disk_path: str) -> dict[str, Any]:
    if not request.offload:
        return {}
    if request.offload == NVME:
        place = {"device": "nvme", "nvme_path": disk_path, "pin_memory": True}
        return {"offload_optimizer": {**place, "pipeline_read": True, "pipeline_write": True}, "offload_param": place}
    place = {"device": "cpu", "pin_memory": True}
    optimizer: dict[str, Any] = {**place, "ratio": request.ratio}
    if request.offload == "super_offload":
        return {"offload_optimizer": {**optimizer, "super_offload": True, "cpuadam_cores_perc": 0.9}}
    moves_params = request.stage == 3 and request.offload == "offload"
    return {"offload_optimizer": optimizer, **({"offload_param": place} if moves_params else {})}
