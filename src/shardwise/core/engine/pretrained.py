"""`save_pretrained` of sharded models: those of Hugging Face, and PEFT's adapters.

The scripts of these libraries call it on every rank after the training. Here every rank takes part in gathering, one
unit after the other, and rank 0 writes the whole weights with the model's own method.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...base.errors import ConfigurationError
from ..mesh import patient_hosts
from .full_weights import whole_parts
from .guards import engine_of
from .rank_agreement import all_or_none

_METHOD = "save_pretrained"


def serve_save_pretrained(model: nn.Module) -> None:
    for module in model.modules():
        if getattr(type(module), _METHOD, None) is not None:
            module.__dict__[_METHOD] = partial(_save_pretrained, module)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights that `save_pretrained` writes, whole on the host of rank 0. Every rank calls it."""
    parts = whole_parts(model, rank0_only=True, wants=_wanted(model))
    return {name: value for part in parts for name, value in part.items()}


def _save_pretrained(model: Any, *args: Any, **kwargs: Any) -> None:
    engine = engine_of(model)
    words = inspect.signature(type(model).save_pretrained).bind(model, *args, **kwargs).arguments
    words |= words.pop("kwargs", {})
    if engine.whole_modules or words.get("state_dict") is not None:
        _write(**words)
        return
    words["state_dict"] = whole_weights(model)
    write = partial(_write_on_first, engine.mesh.rank, words)
    # If every rank has all weights, scripts may call it on rank 0 alone.
    is_split = any(state.flat.depth_of_master for unit in engine.units for state in unit.states)
    if is_split:
        all_or_none(patient_hosts(), write)
    else:
        write()


def _write_on_first(rank: int, words: dict[str, Any]) -> None:
    if rank != 0:
        return
    if not words.get("is_main_process", True):
        raise ConfigurationError(
            "save_pretrained(is_main_process=False) on rank 0, which writes: give it is_main_process=(rank == 0), or "
            "leave it out, and call it on every rank"
        )
    _write(**words)


def _write(self: Any, save_directory: Any, **words: Any) -> None:
    """Write with the model's own method, which may empty the dict of weights."""
    weights = words.get("state_dict") or {}
    dtype = next((value.dtype for value in weights.values() if value.is_floating_point()), None)
    type(self).save_pretrained(self, save_directory, **words)
    # The configuration has the dtype that parameters compute in; the weights are written as they were given.
    is_written = words.get("is_main_process", True) and _is_pretrained(self) and not self._hf_peft_config_loaded
    if is_written and dtype is not None:
        self.config.dtype = dtype
        self.config.save_pretrained(save_directory)


def _is_pretrained(model: nn.Module) -> bool:
    """True for a `PreTrainedModel`. PEFT's wrappers have the attributes of what they wrap, but not the class's."""
    return getattr(type(model), "base_model_prefix", None) is not None


def _wanted(model: Any) -> Callable[[str], bool]:
    """Choose the weights to write: of a model that PEFT wraps, its adapters and embeddings (they may belong to one)."""
    adapters = None if _is_pretrained(model) else getattr(model, "peft_config", None)
    if adapters is None:
        return lambda name: True
    embeddings = {
        id(param)
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        if module is not None
        for param in module.parameters()
    }
    left_out = {
        name
        for name, param in model.named_parameters(remove_duplicate=False)
        if not param.requires_grad
        and id(param) not in embeddings
        and not any(f".{adapter}." in f"{name}." for adapter in adapters)
    }
    return lambda name: name not in left_out
