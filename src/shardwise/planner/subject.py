"""Models that can be planned: by name, by config.json, by sizes, or the module itself."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

from ..base.errors import ConfigurationError
from .assess import Subject
from .hardware.gpus import flops_per_token
from .shapes.hf_config import module_of_config, num_positions_in, read_config, shape_of_config, why_no_shape
from .shapes.names import is_file, shape_of
from .shapes.shape import ModelShape, StatesOnly, units_of
from .training import Training
from .work.activations import works_of

if TYPE_CHECKING:
    from torch import nn

Planned = Union[str, Mapping[str, Any], ModelShape, StatesOnly, "nn.Module"]


@dataclass(frozen=True, slots=True)
class Built:
    """A module built from a config.json. `num_positions`: its maximum sequence length; 0: the config gives none."""

    name: str
    module: "nn.Module"
    num_positions: int


def model_of(model: Planned) -> "ModelShape | StatesOnly | Built | nn.Module":
    """Look up a name, turn a config into a shape or a module, and return everything else unchanged."""
    if isinstance(model, str):
        return _of_config(model) if is_file(model) else shape_of(model)
    if isinstance(model, Mapping):
        return _of_config(model)
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedConfig):
        return _of_config(model.to_dict())
    is_module = "torch" in sys.modules and isinstance(model, sys.modules["torch"].nn.Module)
    if not is_module and not isinstance(model, (ModelShape, StatesOnly)):
        raise ConfigurationError(
            f"sw.plan takes a model's name, the path of its config.json or what is in it, a shape or a module, not "
            f"{type(model).__name__} {model!r}"
        )
    return model


def _of_config(config: str | Mapping[str, Any]) -> ModelShape | Built:
    name, read = read_config(config)
    why = why_no_shape(read)
    if not why:
        return shape_of_config(config)
    module = module_of_config(name, read, why)
    return Built(name, module, num_positions_in(module))


def subject_of(shape: ModelShape, training: Training) -> Subject:
    if 0 < shape.num_positions < training.seq:
        raise ConfigurationError(
            f"model {shape.name!r} has {shape.num_positions} positions, but sequences of {training.seq} tokens were "
            f"asked for; give --seq {shape.num_positions} or less"
        )
    return Subject(
        name=shape.name,
        units=tuple(units_of(shape, training.lora)),
        works=lambda asked: works_of(shape, asked),
        flops_per_token=flops_per_token(shape.num_multiplying, shape.layers, shape.query_width, training.seq),
        facts=facts_of(shape),
        head_dim=shape.head_dim,
    )


def facts_of(shape: ModelShape) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": shape.name, "num_params": shape.num_params}
    for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied", "code"):
        facts[field] = getattr(shape, field)
    if shape.num_experts > 1:
        facts |= {"num_experts": shape.num_experts, "num_active_experts": shape.num_active_experts}
    return facts
