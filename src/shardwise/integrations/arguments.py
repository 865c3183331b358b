"""What of the Trainer's arguments means another engine, or nothing here: refused in a sentence each, or told."""

from collections.abc import Callable
from typing import Any

from transformers import TrainingArguments

from ..errors import ConfigurationError

# An argument, when it is in the way, and what to write instead. Arguments that only TRL has are found as well.
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("deepspeed", bool, "chooses another engine: leave it out, and write sharded(Trainer, "
     "**sw.from_deepspeed({value!r}).words)"),
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


def refuse_arguments(args: TrainingArguments) -> None:
    for name, is_in_the_way, reason in _REFUSED:
        value = getattr(args, name, None)
        if value is not None and is_in_the_way(value):
            raise ConfigurationError(f"TrainingArguments({name}={value!r}) {reason.format(value=value)}")


def without_effect(args: TrainingArguments) -> list[str]:
    """Arguments that were given and change nothing here."""
    return [f"{name}={getattr(args, name)}" for name in _OF_DDP if getattr(args, name) is not None]
