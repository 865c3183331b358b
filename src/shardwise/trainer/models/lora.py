"""Low-rank adapters with peft, on a model on the meta device.

peft creates adapters on the device of the weights, here the meta device. This module gives them memory, and values that
depend on the seed and on their names alone; the base weights stay on the meta device and are frozen.
"""

import hashlib
from typing import Any

import torch
from torch import nn

from ...base.errors import ConfigurationError, did_you_mean
from ...planner.shapes.hf_config import hush
from ..settings import Lora

ADAPTER = "default"  # peft's default name
IN_TREE_TARGETS = ("query", "value")  # as peft's default for Llama


def adapters_for(lora: Lora, is_in_tree: bool) -> Any:
    """The configuration for peft."""
    hush()
    try:
        import peft
    except ImportError:
        raise ConfigurationError("lora needs peft: install shardwise[hf]") from None
    config: Any = peft.LoraConfig
    return config(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets or IN_TREE_TARGETS) if lora.targets or is_in_tree else None,
        task_type=None if is_in_tree else peft.TaskType.CAUSAL_LM,
    )


def with_adapters(model: nn.Module, config: Any, seed: int, device: torch.device) -> Any:
    """The model as a PeftModel: trainable adapters on `device`, everything else unchanged and frozen."""
    from peft import get_peft_model

    # peft writes the model's name there, and warns if it was another; saved configurations have inference mode on.
    config.base_model_name_or_path, config.inference_mode = None, False
    leaves = {path.rpartition(".")[2] for path, part in model.named_modules() if isinstance(part, nn.Linear)}
    try:
        adapted: Any = get_peft_model(model, config)
    except ValueError as error:
        wrong = next((name for name in config.target_modules or () if name not in leaves), "")
        raise ConfigurationError(f"lora: {str(error).rstrip('.')}; {did_you_mean(wrong, leaves)}") from None
    for path, module in adapted.named_modules():
        if callable(getattr(module, "reset_lora_parameters", None)):
            _fill(module, config, f"{seed}:{path}", device)
    return adapted


def _fill(layer: Any, config: Any, seed: str, device: torch.device) -> None:
    for part in layer.modules():
        for name, param in part._parameters.items():
            if param is not None and param.is_meta and param.requires_grad:
                part._parameters[name] = nn.Parameter(torch.empty(param.shape, dtype=param.dtype))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        # Initialised on the host, so that every kind of device has the same numbers.
        torch.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little", signed=True))
        layer.reset_lora_parameters(ADAPTER, config.init_lora_weights)
    for part in layer.modules():
        for param in part._parameters.values():
            if param is not None and not param.is_meta:
                param.data = param.data.to(device)
