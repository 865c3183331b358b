"""Checks of Accelerate's keywords and the Trainer's arguments.

Options that choose another engine, or that are not supported, are refused with a sentence that names the replacement.
Options of DistributedDataParallel have no effect, and are reported.
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

# Accelerate's names for one process, and for processes with one device each.
_KINDS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)

# Keywords of Accelerate that choose another engine, and their replacement.
_OTHER_ENGINES = {
    "deepspeed_plugin": "**sw.from_deepspeed(FILE).words",
    "deepspeed_plugins": "**sw.from_deepspeed(FILE).words",
    "fsdp_plugin": "**sw.from_accelerate(FILE).words, or strategy='full_shard', 'shard_grad_op', 'hybrid_shard' ...",
    "megatron_lm_plugin": "strategy='zero3'; tensor and pipeline parallelism are not here",
    "torch_tp_plugin": "strategy='zero3'; tensor parallelism is not here",
    "parallelism_config": "strategy='hsdp' and node_size= for dp_shard_size; other parallelisms are not here",
}

# An argument of the Trainer or of TRL, when to refuse it, and its replacement.
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
    """Check the keywords of an Accelerator."""
    for name, instead in _OTHER_ENGINES.items():
        if keywords.get(name) is not None:
            raise ConfigurationError(f"Accelerator({name}=...) chooses another engine: write {instead}")
    if str(keywords.get("mixed_precision")) == "fp8":
        raise ConfigurationError(
            "mixed_precision='fp8': matrices are not multiplied in fp8 here; use 'bf16', and strategy="
            "'zero3+params_as=fp8' for parameters that are sent in fp8"
        )
    for handler in keywords.get("kwargs_handlers") or ():
        if isinstance(handler, (AutocastKwargs, GradScalerKwargs)) or "RecipeKwargs" in type(handler).__name__:
            raise ConfigurationError(
                f"kwargs_handlers=[{type(handler).__name__}]: the engine casts and scales itself; set precision= "
                "(a name, or a sw.Precision) instead"
            )
        if isinstance(handler, DistributedDataParallelKwargs):
            hook = str(handler.comm_hook).rpartition(".")[2].lower()
            if hook != "no":
                raise ConfigurationError(
                    f"comm_hook={hook!r}: use strategy='...+grads_as=bf16' (or fp16, int8, int4) instead; leave it out"
                )


def refuse_surroundings(kind: DistributedType, dynamo: Any) -> None:
    """Check the state set by `accelerate launch` or an earlier Accelerator."""
    if kind not in _KINDS:
        raise ConfigurationError(
            f"Accelerate was set up for {kind.value}: start with torchrun, or with a configuration whose "
            f"distributed_type is MULTI_GPU, and express what {kind.value} did as strategy=... or "
            "**sw.from_accelerate(FILE).words"
        )
    if dynamo.backend != DynamoBackend.NO:
        raise ConfigurationError(
            f"torch.compile of the whole model (dynamo backend {dynamo.backend.value}, or "
            "torch_compile=True): it would contain the gathers; compile its blocks, as in `for layer in "
            "model.model.layers: layer.compile()`, and leave it out"
        )


def refuse_arguments(args: Any) -> None:
    """Check the arguments of a Trainer."""
    for name, is_in_the_way, reason in _REFUSED:
        value = getattr(args, name, None)
        if value is not None and is_in_the_way(value):
            raise ConfigurationError(f"TrainingArguments({name}={value!r}) {reason.format(value=value)}")


def without_effect(args: Any) -> list[str]:
    """Arguments that were given but have no effect here."""
    return [f"{name}={getattr(args, name)}" for name in _OF_DDP if getattr(args, name) is not None]
