"""Builds the model of a run on the meta device. `sw.shard` then allocates its weights, one unit at a time.

built = build(settings, tokenizer.vocab_size, device)
model, optimizer = sw.shard(built.model, optimizer, ..., seed=settings.seed)
if built.weights is not None:
    sw.load_full_state_dict(model, built.weights)
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...base.errors import ConfigurationError, import_library
from ...planner.hardware.gpus import flops_per_token
from ...planner.training import ALL_LINEAR
from ..model import Transformer
from ..settings import Settings
from .facts import ModelFacts, check, in_tree_shape, require_vocabulary, shape_in, weight_files
from .fused_parts import use_fused_parts
from .headloss import LossPath, find_path, has_plain_head, set_path
from .llama import IN_TREE_LEAVES
from .lora import adapters_for, with_adapters, with_beginnings, with_stored
from .weights import LazyWeights, hugging_face_weights, in_tree_weights, names_by_tensor, stored_tensors


@dataclass(frozen=True)
class Built:
    model: nn.Module
    facts: ModelFacts
    weights: LazyWeights | None  # None: sw.shard initialises them
    num_params: int
    num_trainable: int
    isolates_documents: bool  # loss_sum accepts positions, which isolate the documents of a row
    num_matmul_params: int  # parameters in matrix products per token; a frozen one counts two thirds
    layers: int
    attention_width: int

    def flops_per_token(self, seq: int) -> float:
        return flops_per_token(self.num_matmul_params, self.layers, self.attention_width, seq)


def build(
    settings: Settings, vocab_size: int, device: torch.device, adapters: Any = None, facts: ModelFacts | None = None
) -> Built:
    """Build a model. `vocab_size` is the tokenizer's. Adapters are on `device`, all other weights on the meta device.

    `adapters` is a peft configuration; it replaces `settings.lora`. `facts` is the result of `check(settings)`,
    if the caller has it already.
    """
    facts = check(settings) if facts is None else facts
    require_vocabulary(facts, vocab_size)
    is_in_tree = facts.kind == "in-tree"
    folder = facts.folder if facts.has_weights else None
    if is_in_tree:
        shape = in_tree_shape(settings, vocab_size) if facts.folder is None else shape_in(facts.config, settings.model)
        with torch.device("meta"):
            model: Any = Transformer(shape)
        path = LossPath("in-tree", isolates=True)
        weights = None if folder is None else in_tree_weights(model, folder)
        layers, width, active = shape.layers, shape.hidden, 1.0
    else:
        model = _hugging_face_model(settings, facts)
        path = find_path(model)
        weights = None if folder is None else hugging_face_weights(model, folder)
        layers, width, active = _work_of(model.config.get_text_config())
    num_lookup_elems = _num_lookup_elems(model)
    if settings.lora is not None and adapters is None:
        lora = settings.lora
        needs = {"lora.dora": lora.dora, "lora.modules_to_save": lora.modules_to_save, "lora_from": settings.lora_from}
        if weights is None and (what := next((name for name, value in needs.items() if value), "")):
            raise ConfigurationError(
                f"{what} begins with the model's weights, but model {settings.model} starts from random ones: "
                "use a folder with weights"
            )
        adapters = adapters_for(lora, model)
    if adapters is not None:
        if is_in_tree:  # a peft configuration has Llama's module names, the model has ours
            for key in ("target_modules", "modules_to_save"):
                if isinstance(getattr(adapters, key), list | set):
                    setattr(adapters, key, {IN_TREE_LEAVES.get(name, name) for name in getattr(adapters, key)})
            adapters.task_type = None
        names_before = names_by_tensor(model)
        model = with_adapters(model, adapters, settings.seed, device)
        if settings.lora is not None and settings.lora.targets == (ALL_LINEAR,) and adapters.target_parameters:
            raise ConfigurationError(
                f"lora.targets {ALL_LINEAR}: peft would adapt the experts of this model, too: name the layers instead, "
                "as in targets=q_proj+k_proj+v_proj+o_proj"
            )
        if weights is not None:
            names_after = names_by_tensor(model)
            names = [pair for key, old in names_before.items() for pair in zip(old, names_after[key], strict=True)]
            added = {name: param.detach() for name, param in model.named_parameters() if id(param) not in names_before}
            weights = with_beginnings(
                model, weights.with_tensors(added, dict(names)), settings.quantize or facts.quantized
            )
            if settings.lora_from is not None:
                weights = with_stored(model, weights, Path(settings.lora_from).expanduser())
        adapters.base_model_name_or_path = facts.origin
        if path.how == "chunked" and not has_plain_head(model):
            path = LossPath("plain", path.isolates)
    set_path(model, path)
    params = dict(model.named_parameters())
    # A frozen weight takes part in two matrix products instead of three: forward, and gradient of the input.
    num_matmul_params = sum(
        param.numel() * (1.0 if param.requires_grad else 2 / 3) * (active if ".experts." in name else 1.0)
        for name, param in params.items()
    )
    return Built(
        model=model,
        facts=facts,
        weights=weights,
        num_params=sum(param.numel() for param in params.values()),
        num_trainable=sum(param.numel() for param in params.values() if param.requires_grad),
        isolates_documents=path.isolates,
        num_matmul_params=round(num_matmul_params - num_lookup_elems * (1.0 if adapters is None else 2 / 3)),
        layers=layers,
        attention_width=width,
    )


def _hugging_face_model(settings: Settings, facts: ModelFacts) -> Any:
    transformers = import_library("transformers", f"model {settings.model!r}")
    loader = transformers.AutoModelForCausalLM
    try:
        config = transformers.AutoConfig.from_pretrained(str(facts.config_file), trust_remote_code=False)
        config.use_cache = False
        config.return_dict = True
        with torch.device("meta"):
            # Use the dtype of the files: exports and frozen weights keep it. Trainable weights have master weights.
            model = loader.from_config(config, dtype=_dtype(config, facts, settings), trust_remote_code=False)
    except (ValueError, KeyError, TypeError, ImportError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigurationError(f"model {settings.model!r}: transformers cannot build it: {reason}") from None
    use_fused_parts(model)
    return model.train()


def _dtype(config: Any, facts: ModelFacts, settings: Settings) -> torch.dtype:
    if not facts.has_weights and settings.lora is None:
        return torch.float32  # random weights that are trained
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    if not facts.has_weights or facts.folder is None:
        return torch.float32
    stored = stored_tensors(weight_files(facts.folder)[:1])
    dtypes = (tensor.dtype for tensor in stored.values())  # views of a mapped file: no data is read
    return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)


def _num_lookup_elems(model: Any) -> int:
    """Return the number of embedding elements that are only looked up (not those of a tied head)."""
    head = model.head if isinstance(model, Transformer) else model.get_output_embeddings()
    head_params = set() if head is None else {id(param) for param in head.parameters()}
    tables = [part for part in model.modules() if isinstance(part, nn.Embedding)]
    params = {id(param): param.numel() for part in tables for param in part.parameters()}
    return sum(num_elems for key, num_elems in params.items() if key not in head_params)


def _work_of(config: Any) -> tuple[int, int, float]:
    """Return the number of layers, the width of the queries, and the share of a layer's experts that a token uses.

    The first two are 0 if the config does not have them, the share is 1.0 without experts.
    """
    layers, hidden, heads, head_dim, chosen = (
        getattr(config, key, None) or 0
        for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim", "num_experts_per_tok")
    )
    keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    num_experts = next((value for key in keys if (value := getattr(config, key, None))), None)
    return layers, heads * head_dim or hidden, chosen / num_experts if chosen and num_experts else 1.0
