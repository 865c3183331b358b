"""Checks of Accelerate's keywords and the Trainer's arguments.

Options that choose another engine, or that are not supported, are refused with a sentence that names the replacement
(arguments.yaml). Options of DistributedDataParallel have no effect, and are reported.
"""

from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any

from accelerate.utils import AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs
from accelerate.utils.dataclasses import DistributedType, DynamoBackend

from ..base.documents import yaml_tree
from ..base.errors import ConfigurationError

# Accelerate's names for one process, and for processes with one device each.
_KINDS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)

_CONDITIONS: dict[str, Callable[[Any], bool]] = {
    "n_gpu": lambda value: value > 1,
    "gradient_checkpointing_kwargs": lambda value: bool((value or {}).get("use_reentrant")),
    "optim": lambda value: str(getattr(value, "value", value)).endswith("lomo"),
}
_OF_DDP = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")


@cache
def _reasons(section: str) -> dict[str, str]:
    """A section of arguments.yaml."""
    text = resources.files(__package__).joinpath("arguments.yaml").read_text(encoding="utf-8")
    return dict(yaml_tree(text, "arguments.yaml", 3)[section])


def refuse_keywords(keywords: dict[str, Any]) -> None:
    """Check the keywords of an Accelerator."""
    for name, instead in _reasons("other_engines").items():
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
    for name, reason in _reasons("refused").items():
        value = getattr(args, name, None)
        if value is not None and _CONDITIONS.get(name, bool)(value):
            raise ConfigurationError(f"TrainingArguments({name}={value!r}) {reason.format(value=value)}")


def without_effect(args: Any) -> list[str]:
    """Arguments that were given but have no effect here."""
    return [f"{name}={getattr(args, name)}" for name in _OF_DDP if getattr(args, name) is not None]
