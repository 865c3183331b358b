"""What of Accelerate's keywords and of the Trainer's arguments asks for another engine, or for what is not here.

Each is refused in a sentence that says what to write instead; hints for DistributedDataParallel are told to be idle.
"""

from collections.abc import Callable
from typing import Any

from accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
    GradScalerKwargs,
)

from ..base.errors import ConfigurationError

# What Accelerate calls a process alone, and processes that each have a device of their own.
_KINDS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)

# Keywords of Accelerate's that choose another engine, and what to write instead.
_OTHER_ENGINES = {
    "deepspeed_plugin": "**sw.from_deepspeed(FILE).words",
    "deepspeed_plugins": "**sw.from_deepspeed(FILE).words",
    "fsdp_plugin": "**sw.from_accelerate(FILE).words, or strategy='full_shard', 'shard_grad_op', 'hybrid_shard' ...",
    "megatron_lm_plugin": "strategy='zero3'; tensor and pipeline parallelism are not here",
    "torch_tp_plugin": "strategy='zero3'; tensor parallelism is not here",
    "parallelism_config": "strategy='hsdp' and node_size= for dp_shard_size; other parallelisms are not here",
}

# An argument, when it is in the way, and what to write instead. Arguments that only TRL has are found as well.
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("deepspeed", bool, "chooses another engine: leave it out, and write sharded(Trainer, "
     "**sw.from_deepspeed({value!r}).words); learning rate, schedule and clipping of the file go into the arguments"),
    ("fsdp", bool, "chooses another engine: leave it and fsdp_config out, and write strategy='full_shard', "
     "'shard_grad_op', 'hybrid_shard' ..., or **sw.from_accelerate(FILE).words"),
    ("parallelism_config", bool, "splits more than the data: write strategy='hsdp' and node_size= for dp_shard_size; "
     "tensor, context and sequence parallelism are not here"),
    ("torch_compile", bool, "compiles the whole model, with gathers inside: compile its blocks, as in `for layer in "
     "model.model.layers: layer.compile()`, and leave it out"),
    ("fp16_full_eval", bool, "casts the model: evaluation computes in the precision of the training; leave it out"),
    ("bf16_full_eval", bool, "casts the model: evaluation computes in the precision of the training; leave it out"),
    ("auto_find_batch_size", bool, "tries again on the rank that ran out of memory, while the others wait: say "
     "per_device_train_batch_size, which `shardwise plan` helps to choose"),
    ("save_on_each_node", bool, "writes whole weights on every node: checkpoints go to a file system that all ranks "
     "share; leave it out"),
    ("activation_offloading", bool, "moves what a backward needs by its own hooks: leave it out, and write "
     "strategy='...+activations=host'"),
    ("n_gpu", lambda value: value > 1, "is DataParallel, one process for all GPUs: start one for each, with torchrun "
     "--nproc-per-node {value}"),
    ("gradient_checkpointing_kwargs", lambda value: bool((value or {}).get("use_reentrant")), "hides the forward from "
     "the engine: leave use_reentrant out"),
    ("optim", lambda value: str(getattr(value, "value", value)).endswith("lomo"), "updates inside the backward, around "
     "the optimizer: use adamw_torch, or early_update=True"),
)  # fmt: skip

_OF_DDP = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")


def refuse_keywords(keywords: dict[str, Any]) -> None:
    """Of an Accelerator."""
    for name, instead in _OTHER_ENGINES.items():
        if keywords.get(name) is not None:
            raise ConfigurationError(f"Accelerator({name}=...) chooses another engine: write {instead}")
    if str(keywords.get("mixed_precision")) == "fp8":
        raise ConfigurationError(
            "mixed_precision='fp8': matrices are not multiplied in fp8 here; use 'bf16', and strategy="
            "'zero3+params_as=fp8' for parameters that travel in fp8"
        )
    for handler in keywords.get("kwargs_handlers") or ():
        if isinstance(handler, (AutocastKwargs, GradScalerKwargs)) or "RecipeKwargs" in type(handler).__name__:
            raise ConfigurationError(
                f"kwargs_handlers=[{type(handler).__name__}]: the engine casts and scales itself; say precision= "
                "(a name, or a sw.Precision) instead"
            )
        if isinstance(handler, DistributedDataParallelKwargs):
            hook = str(handler.comm_hook).rpartition(".")[2].lower()
            if hook != "no":
                raise ConfigurationError(
                    f"comm_hook={hook!r}: gradients travel as strategy='...+grads_as=bf16' says (or fp16, int8, int4); "
                    "leave it out"
                )


def refuse_surroundings(kind: DistributedType, dynamo: Any) -> None:
    """What `accelerate launch` has said, or an earlier Accelerator."""
    if kind not in _KINDS:
        raise ConfigurationError(
            f"Accelerate was set up for {kind.value}: start with torchrun, or with a configuration whose "
            f"distributed_type is MULTI_GPU, and say what {kind.value} did as strategy=... or "
            "**sw.from_accelerate(FILE).words"
        )
    if dynamo.backend != DynamoBackend.NO:
        raise ConfigurationError(
            f"torch.compile of the whole model (dynamo backend {dynamo.backend.value}, or "
            "torch_compile=True): gathers lie inside it; compile its blocks, as in `for layer in "
            "model.model.layers: layer.compile()`, and leave it out"
        )


def refuse_arguments(args: Any) -> None:
    """Of a Trainer."""
    for name, is_in_the_way, reason in _REFUSED:
        value = getattr(args, name, None)
        if value is not None and is_in_the_way(value):
            raise ConfigurationError(f"TrainingArguments({name}={value!r}) {reason.format(value=value)}")


def without_effect(args: Any) -> list[str]:
    """Arguments that were given and change nothing here."""
    return [f"{name}={getattr(args, name)}" for name in _OF_DDP if getattr(args, name) is not None]
