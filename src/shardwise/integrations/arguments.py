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

_CONDITIONS: dict[str, Callable[[Any], bool]] = {  # when an argument is refused; default: if it is true
    "n_gpu": lambda value: value > 1,
    "gradient_checkpointing_kwargs": lambda value: bool((value or {}).get("use_reentrant")),
    "optim": lambda value: str(getattr(value, "value", value)).endswith("lomo"),
}
OF_DDP = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")


@cache
def _reasons(section: str) -> dict[str, str]:
    """Return a section of arguments.yaml: from the name of an option to its replacement, or to the reason."""
    text = resources.files(__package__).joinpath("arguments.yaml").read_text(encoding="utf-8")
    return dict(yaml_tree(text, "arguments.yaml", 3)[section])


def refuse_keywords(keywords: dict[str, Any]) -> None:
    """Refuse keywords of an Accelerator that are not supported."""
    for name, instead in _reasons("other_engines").items():
        if keywords.get(name) is not None:
            raise ConfigurationError(f"Accelerator({name}=...) chooses another engine: write {instead}")
    if str(keywords.get("mixed_precision")) == "fp8":
        fix = "use 'bf16', and strategy='zero3+params_as=fp8' for parameters that are sent in fp8"
        raise ConfigurationError(f"mixed_precision='fp8': matrices are not multiplied in fp8 here; {fix}")
    for handler in keywords.get("kwargs_handlers") or ():
        if isinstance(handler, (AutocastKwargs, GradScalerKwargs)) or "RecipeKwargs" in type(handler).__name__:
            what = f"kwargs_handlers=[{type(handler).__name__}]: the engine casts and scales itself"
            raise ConfigurationError(f"{what}; set precision= (a name, or a sw.Precision) instead")
        if isinstance(handler, DistributedDataParallelKwargs):
            hook = str(handler.comm_hook).rpartition(".")[2].lower()
            if hook != "no":
                fix = "leave it out, and use strategy='...+grads_as=bf16' (or fp16, int8, int4)"
                raise ConfigurationError(f"comm_hook={hook!r}: {fix}")


def refuse_surroundings(kind: DistributedType, dynamo: Any) -> None:
    """Refuse what `accelerate launch` or an earlier Accelerator has set up, if it is not supported."""
    if kind not in _KINDS:
        fix = "start with torchrun, or with distributed_type MULTI_GPU in the configuration"
        instead = "strategy=... or **sw.from_accelerate(FILE).words"
        raise ConfigurationError(f"Accelerate was set up for {kind.value}: {fix}, and write {instead} in its place")
    if dynamo.backend != DynamoBackend.NO:
        what = f"dynamo backend {dynamo.backend.value}: torch.compile of the whole model would contain the gathers"
        fix = "compile its blocks, as in `for layer in model.model.layers: layer.compile()`, and leave it out"
        raise ConfigurationError(f"{what}; {fix}")


def refuse_arguments(args: Any) -> None:
    """Refuse arguments of a Trainer that are not supported."""
    for name, reason in _reasons("refused").items():
        value = getattr(args, name, None)
        if value is not None and _CONDITIONS.get(name, bool)(value):
            raise ConfigurationError(f"TrainingArguments({name}={value!r}) {reason.format(value=value)}")
