"""LoRA adapters, made by peft on a model on the meta device, and their names in files.

peft creates adapters on the device of the weights, here the meta device. This module then allocates the adapters and
initialises them; their values depend only on the seed and on their names. The base weights stay on the meta device and
are frozen. `merged` adds adapters to the base weights, one weight at a time, in fp32: W + scale * B @ A.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...base.errors import ConfigurationError, did_you_mean, import_library
from ...checkpoint.tensor_files import Source
from ...checkpoint.writer import converted
from ..settings import Lora
from .llama import llama_name

ADAPTER = "default"  # peft's default name
IN_TREE_TARGETS = ("query", "value")  # the same projections as peft's default for Llama


def adapters_for(lora: Lora, is_in_tree: bool) -> Any:
    peft = import_library("peft", "lora")
    return peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets or IN_TREE_TARGETS) if lora.targets or is_in_tree else None,
        task_type=None if is_in_tree else peft.TaskType.CAUSAL_LM,
    )


def with_adapters(model: nn.Module, config: Any, seed: int, device: torch.device) -> Any:
    """Return the model as a PeftModel with trainable adapters on `device`. All other weights are frozen."""
    from peft import get_peft_model

    # peft warns if the config names another base model. Saved configs are in inference mode, which freezes adapters.
    config.base_model_name_or_path, config.inference_mode = None, False
    leaves = {path.rpartition(".")[2] for path, part in model.named_modules() if isinstance(part, nn.Linear)}
    try:
        adapted: Any = get_peft_model(model, config)
    except ValueError as error:
        wrong = next((name for name in config.target_modules or () if name not in leaves), "")
        raise ConfigurationError(f"lora: {str(error).rstrip('.')}; {did_you_mean(wrong, leaves)}") from None
    for path, module in adapted.named_modules():
        if callable(getattr(module, "reset_lora_parameters", None)):
            _initialise(module, config, f"{seed}:{path}", device)
    return adapted


def _initialise(layer: Any, config: Any, seed: str, device: torch.device) -> None:
    for part in layer.modules():
        for name, param in part._parameters.items():
            if param is not None and param.is_meta and param.requires_grad:
                part._parameters[name] = nn.Parameter(torch.empty(param.shape, dtype=param.dtype))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        # Initialise on the host, so that the values are the same for every kind of device.
        torch.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little", signed=True))
        layer.reset_lora_parameters(ADAPTER, config.init_lora_weights)
    for part in layer.modules():
        for param in part._parameters.values():
            if param is not None and not param.is_meta:
                param.data = param.data.to(device)


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def base_name(name: str) -> str:
    """Return the parameter's name without the parts that peft adds."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def adapter_file_name(name: str, is_in_tree: bool) -> str:
    """Return peft's name of a tensor in files: without the adapter's name, and as in Llama for an in-tree model."""
    name = re.sub(rf"(\.lora_\w+)\.{ADAPTER}(?=\.|$)", r"\1", name)
    return llama_name(name) if is_in_tree else name


def merged(model: Any, sources: Iterable[Source]) -> list[Source]:
    """Return the base model's tensors under their original names, with the adapters merged into them."""
    config = model.peft_config[ADAPTER]
    unusual = [key for key in ("use_dora", "lora_bias", "modules_to_save") if getattr(config, key, None)]
    if unusual:
        raise ConfigurationError(f"adapters with {unusual[0]} cannot be merged here: use peft's merge_and_unload")
    by_name = {source.name: source for source in sources}

    def rows(source: Source, down: str, up: str, scale: float, is_transposed: bool) -> list[Tensor]:
        product = by_name[up].read().float() @ by_name[down].read().float()
        whole = source.read().float()
        whole.add_(product.T if is_transposed else product, alpha=scale)
        return [converted(source.name, whole, source.dtype)]

    adapted = {}
    for path, layer in model.named_modules():
        scaling = getattr(layer, "scaling", None)
        if not isinstance(scaling, dict) or ADAPTER not in scaling:
            continue
        name = f"{path}.base_layer.weight"
        if layer.get_base_layer().weight.dim() != 2:
            raise ConfigurationError(f"adapters on {path!r}, which is not a matrix, cannot be merged here")
        if name not in by_name:
            raise ConfigurationError(f"adapters on {name!r}, which is not among the weights to merge with")
        is_table = ADAPTER in layer.lora_embedding_A
        kind, ending = ("lora_embedding_", "") if is_table else ("lora_", ".weight")
        down, up = (f"{path}.{kind}{letter}.{ADAPTER}{ending}" for letter in "AB")
        is_transposed = is_table or bool(getattr(layer, "fan_in_fan_out", False))
        adapted[name] = partial(rows, by_name[name], down, up, float(scaling[ADAPTER]), is_transposed)
    base = [source for source in by_name.values() if not is_adapter(source.name)]
    return [replace(each, name=base_name(each.name), rows=adapted.get(each.name, each.rows)) for each in base]
