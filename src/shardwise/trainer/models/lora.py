"""LoRA adapters, made by peft on a model on the meta device, and their names in files.

peft creates adapters on the device of the weights, here the meta device. This module then allocates the adapters and
initialises them; their values depend only on the seed and on their names. The base weights stay on the meta device and
are frozen. Values that begin as those of the base (copies of modules, and norms for DoRA) are read with its weights.
`merged` adds adapters to the base weights, one weight at a time, in fp32: W + scale * B @ A, with the norms of DoRA.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...base.errors import ConfigurationError, did_you_mean, import_library
from ...checkpoint.tensor_files import Source
from ...checkpoint.writer import converted
from ...planner.training import ALL_LINEAR
from ..model import Transformer
from ..settings import Lora
from .facts import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from .llama import IN_TREE_LEAVES, LINEAR_LEAVES, llama_name
from .quantized import is_quantizable, rounded
from .weights import LazyWeights, names_by_tensor, names_of, stored_tensors

ADAPTER = "default"  # peft's default name
_COPY, _ORIGINAL = f".modules_to_save.{ADAPTER}.", ".original_module."
_MAGNITUDE = f".lora_magnitude_vector.{ADAPTER}.weight"
IN_TREE_TARGETS = ("query", "value")  # the same projections as peft's default for Llama


def adapters_for(lora: Lora, model: nn.Module) -> Any:
    peft = import_library("peft", "lora")
    is_in_tree = isinstance(model, Transformer)
    shared = {name.rpartition(".")[0] for names in names_by_tensor(model).values() if len(names) > 1 for name in names}
    own_names = [IN_TREE_LEAVES.get(name, name) if is_in_tree else name for name in lora.modules_to_save]
    is_tied = any(path.endswith(name) for path in shared for name in own_names)
    if is_tied and is_in_tree:
        raise ConfigurationError(
            "lora.modules_to_save: embedding and head of this in-tree model share their weight: leave them out"
        )
    targets: Any = list(lora.targets or IN_TREE_TARGETS) if lora.targets or is_in_tree else None
    if targets == [ALL_LINEAR]:
        targets = list(LINEAR_LEAVES) if is_in_tree else _linear_layers(model)
    return peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        modules_to_save=own_names or None,
        ensure_weight_tying=is_tied,  # a table that is also the head stays so
        target_modules=targets,
        task_type=None if is_in_tree else peft.TaskType.CAUSAL_LM,
    )


def _linear_layers(model: Any) -> list[str]:
    """Return the paths of all linear layers except the head. peft's own "all-linear" also replaces experts."""
    from transformers.pytorch_utils import Conv1D

    head, kinds = model.get_output_embeddings(), (nn.Linear, Conv1D)
    return [path for path, part in model.named_modules() if isinstance(part, kinds) and part is not head]


def with_adapters(model: nn.Module, config: Any, seed: int, device: torch.device) -> Any:
    """Return the model as a PeftModel with trainable adapters on `device`. All other weights are frozen."""
    from peft import get_peft_model

    # peft warns if the config names another base model. Saved configs are in inference mode, which freezes adapters.
    config.base_model_name_or_path, config.inference_mode = None, False
    leaves = {path.rpartition(".")[2] for path, part in model.named_modules() if isinstance(part, nn.Linear)}
    owners = {path for path, part in model.named_modules() if part._parameters}
    for name in config.modules_to_save or ():
        if name in config.target_modules if isinstance(config.target_modules, set) else name == config.target_modules:
            raise ConfigurationError(f"lora: {name!r} is in targets and in modules_to_save: leave it out of one")
        if not any(path.endswith(name) for path in owners):
            near = did_you_mean(name, sorted({path.rpartition(".")[2] for path in owners}))
            raise ConfigurationError(f"lora.modules_to_save: no module with weights is called {name!r}; {near}")
    try:
        adapted: Any = get_peft_model(model, config)
    except ValueError as error:
        targets = [config.target_modules] if isinstance(config.target_modules, str) else config.target_modules or ()
        wrong = next((name for name in targets if name not in leaves), "")
        raise ConfigurationError(f"lora: {str(error).rstrip('.')}; {did_you_mean(wrong, leaves)}") from None
    for path, module in adapted.named_modules():
        if callable(getattr(module, "reset_lora_parameters", None)):
            _initialise(module, config, f"{seed}:{path}", device)
    return adapted


def _initialise(layer: Any, config: Any, seed: str, device: torch.device) -> None:
    for part in layer.modules():
        for name, param in part._parameters.items():
            if param is not None and param.is_meta and param.requires_grad:
                part._parameters[name] = nn.Parameter(torch.ones(param.shape, dtype=param.dtype))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        # Initialise on the host, so that the values are the same for every kind of device.
        torch.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little", signed=True))
        layer.reset_lora_parameters(ADAPTER, config.init_lora_weights)
    for part in layer.modules():
        for param in part._parameters.values():
            if param is not None and not param.is_meta:
                param.data = param.data.to(device)


def is_adapter(name: str) -> bool:
    return ".lora_" in name or _COPY in name


def base_name(name: str) -> str:
    """Return the parameter's name without the parts that peft adds."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    return name.replace(_ORIGINAL, ".").replace(_COPY, ".")


def adapter_file_name(name: str, is_in_tree: bool) -> str:
    """Return peft's name of a tensor in files: without the adapter's name, and as in Llama for an in-tree model."""
    name = name.replace(_COPY, ".").replace(_MAGNITUDE, ".lora_magnitude_vector")
    name = re.sub(rf"(\.lora_\w+)\.{ADAPTER}(?=\.|$)", r"\1", name)
    return llama_name(name) if is_in_tree else name


def with_beginnings(model: Any, weights: LazyWeights, codec: str | None) -> LazyWeights:
    """Add the adapters' values that begin as those of the base: copies of modules, and the norms of DoRA.

    Norms are those of the weights as they are stored, so that adapters change nothing before the first step.
    """

    def norm(name: str, shape: Sequence[int], dim: int) -> Tensor:
        is_rounded = codec is not None and is_quantizable(name, len(shape))
        return (rounded(weights[name], str(codec), shape) if is_rounded else weights[name].float()).norm(dim=dim)

    made: dict[str, Callable[[], Tensor]] = {}
    for name in model.state_dict():
        if _COPY in name and (original := name.replace(_COPY, _ORIGINAL)) in weights:
            made[name] = partial(weights.__getitem__, original)
        elif name.endswith(_MAGNITUDE):
            path = name.removesuffix(_MAGNITUDE)
            layer = model.get_submodule(path)
            shape, dim = layer.base_layer.weight.shape, 0 if _is_transposed(layer) else 1
            made[name] = partial(norm, f"{path}.base_layer.weight", shape, dim)
    return weights.with_tensors(LazyWeights(made))


def with_stored(model: Any, weights: LazyWeights | None, place: Path) -> LazyWeights:
    """Return the weights with the adapter of a folder."""
    is_in_tree = isinstance(model.get_base_model(), Transformer)
    stored, own = stored_tensors([place / ADAPTER_WEIGHTS]), model.state_dict()
    names = {adapter_file_name(name, is_in_tree): name for name in own if is_adapter(name)}
    wrong = sorted(set(names) ^ set(stored))
    wrong = wrong or [name for name in stored if stored[name].shape != own[names[name]].shape]
    if wrong:
        raise ConfigurationError(
            f"{place / ADAPTER_WEIGHTS} does not fit its {ADAPTER_CONFIG} and the model: first {wrong[0]!r}"
        )
    for tied in names_of(model).values():
        values = [stored[adapter_file_name(name, is_in_tree)] for name in tied if is_adapter(name)]
        if not all(torch.equal(value, values[0]) for value in values[1:]):
            raise ConfigurationError(f"{place}: {tied[0]!r} and {tied[1]!r} differ, but the model has one for both")
    if weights is None:
        raise ConfigurationError(f"{place}: its base model has no weights")
    return weights.with_tensors(LazyWeights({names[name]: partial(stored.__getitem__, name) for name in stored}))


def under_all_names(source: Source, names: Sequence[str]) -> list[Source]:
    """Return a tied tensor once for each name, as peft stores it. It is read once."""

    @cache
    def rows() -> list[Tensor]:
        return [source.read()]

    return [replace(source, name=name, rows=rows) for name in names] if len(names) > 1 else [source]


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Compute with the base weights alone. peft's own way also changes which parameters are trained."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    parts: list[Any] = [part for part in model.modules() if isinstance(part, kinds)]
    for part in parts:
        part._disable_adapters = True
    try:
        yield
    finally:
        for part in parts:
            part._disable_adapters = False


def _is_transposed(layer: Any) -> bool:
    return ADAPTER in layer.lora_embedding_A or bool(getattr(layer, "fan_in_fan_out", False))


def merged(model: Any, sources: Iterable[Source]) -> list[Source]:
    """Return the base model's tensors under their original names, with the adapters merged into them."""
    if model.peft_config[ADAPTER].lora_bias:
        raise ConfigurationError("adapters with lora_bias cannot be merged here: use peft's merge_and_unload")
    groups = {frozenset(names) for names in names_of(model).values()}
    for tied in (group for group in groups if len(group) > 1 and any(_ORIGINAL in name for name in group)):
        if frozenset(name.replace(_ORIGINAL, _COPY) for name in tied) not in groups:
            raise ConfigurationError(
                f"adapters with a copy of {min(tied)!r}, which has the same weight as {max(tied)!r} in the model, but "
                "not in the adapter, cannot be merged: use peft's merge_and_unload"
            )
    by_name = {source.name: source for source in sources}

    def rows(source: Source, down: str, up: str, norm: str, scale: float, is_transposed: bool) -> list[Tensor]:
        product = by_name[up].read().float() @ by_name[down].read().float()
        whole = source.read().float()
        whole.add_(product.T if is_transposed else product, alpha=scale)
        if norm in by_name:
            dim = 0 if is_transposed else 1
            whole.mul_((by_name[norm].read().float() / whole.norm(dim=dim)).unsqueeze(dim))
        return [converted(source.name, whole, source.dtype)]

    adapted: dict[str, Callable[[], Iterable[Tensor]]] = {}
    for path, layer in model.named_modules():
        scaling = getattr(layer, "scaling", None)
        if not isinstance(scaling, dict) or ADAPTER not in scaling:
            continue
        name = f"{path}.base_layer.weight"
        if layer.get_base_layer().weight.dim() != 2:
            raise ConfigurationError(f"adapters on {path!r}, which is not a matrix, cannot be merged here")
        if name not in by_name:
            raise ConfigurationError(f"adapters on {name!r}, which is not among the weights to merge with")
        kind, ending = ("lora_embedding_", "") if ADAPTER in layer.lora_embedding_A else ("lora_", ".weight")
        down, up = (f"{path}.{kind}{letter}.{ADAPTER}{ending}" for letter in "AB")
        scale = float(scaling[ADAPTER])
        adapted[name] = partial(rows, by_name[name], down, up, path + _MAGNITUDE, scale, _is_transposed(layer))

    def copied(source: Source, copy: Source) -> list[Tensor]:
        return [converted(source.name, copy.read(), source.dtype)]

    for name, copy in by_name.items():
        if _COPY in name:
            original = by_name[name.replace(_COPY, _ORIGINAL)]
            adapted[original.name] = partial(copied, original, copy)
    base = [source for source in by_name.values() if not is_adapter(source.name)]
    return [replace(each, name=base_name(each.name), rows=adapted.get(each.name, each.rows)) for each in base]
