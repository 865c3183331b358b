"""The DeepSpeed peer: the names it is requested by, and the configuration that DeepSpeed reads. No torch.

Buffer sizes are those of its documentation, and for SuperOffload those of its examples. With an offloaded optimizer,
DeepSpeed must build the optimizer itself (`DeepSpeedCPUAdam`): it refuses other optimizers there.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigurationError, did_you_mean

if TYPE_CHECKING:
    from .case import Case

DEEPSPEED = "deepspeed"
NVME = "nvme"
# The same hyper-parameters for every contender.
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}

# Kinds of offload, and the ZeRO stages that support each.
OFFLOADS: dict[str, tuple[int, ...]] = {
    "offload": (1, 2, 3),  # the optimizer to host memory; at stage 3 parameters too
    "offload_optimizer": (3,),  # the optimizer alone
    "super_offload": (3,),  # the same, updated by a separate process
    NVME: (3,),  # optimizer and parameters to disk
}
# ZeRO++, whole or in parts. DeepSpeed supports it at stage 3, and silently ignores it below.
ZEROPP: dict[str, tuple[str, ...]] = {
    "hpz": ("hpz",),  # a second copy of the parameters, sharded within the node
    "qwz": ("qwz",),  # parameters are sent as int8
    "qgz": ("qgz",),  # gradients are sent as int4
    "zeropp": ("hpz", "qwz", "qgz"),
}
_AIO = {
    "block_size": 1 << 20,
    "queue_depth": 32,
    "intra_op_parallelism": 4,
    "single_submit": False,
    "overlap_events": True,
}


@dataclass(frozen=True, slots=True)
class DeepSpeed:
    """The parsed form of `deepspeed:3+offload:0.6`."""

    stage: int
    offload: str = ""  # a key of `OFFLOADS`
    ratio: float = 1.0  # the part of the optimizer that is offloaded
    parts: tuple[str, ...] = ()  # of ZeRO++


def read_deepspeed(argument: str) -> DeepSpeed:
    """Parse what follows `deepspeed:` in a contender's name."""
    name = f"'{DEEPSPEED}:{argument}'"
    stage, plus, words = argument.partition("+")
    if stage not in ("0", "1", "2", "3"):
        raise ConfigurationError(f"--peers: {name}; say which ZeRO stage, {DEEPSPEED}:0 to {DEEPSPEED}:3")
    if not plus:
        return DeepSpeed(int(stage))
    word, colon, part = words.partition(":")
    known = OFFLOADS | dict.fromkeys(ZEROPP, (3,))
    if word not in known:
        raise ConfigurationError(f"--peers: {name}: unknown option {word!r}; {did_you_mean(word, known)}")
    if int(stage) not in known[word]:
        stages = " or ".join(map(str, known[word]))
        raise ConfigurationError(f"--peers: {name}; DeepSpeed has {word!r} at stage {stages} only")
    if not colon:
        return DeepSpeed(3, parts=ZEROPP[word]) if word in ZEROPP else DeepSpeed(int(stage), word)
    if stage != "3" or word == NVME or word in ZEROPP:
        raise ConfigurationError(
            f"--peers: {name}; DeepSpeed offloads a part of the optimizer to the host only, at stage 3"
        )
    try:
        ratio = float(part)
    except ValueError:
        ratio = -1.0
    if not 0 < ratio <= 1:
        raise ConfigurationError(f"--peers: {name}; {part!r} is not a part of the optimizer: write 0.6")
    return DeepSpeed(int(stage), word, ratio)


def config_of(case: "Case", request: DeepSpeed) -> dict[str, Any]:
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
