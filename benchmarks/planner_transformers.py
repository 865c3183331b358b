"""Memory of transformers' own models, as a user's script trains them, held against what a shape alone predicts.

    python -m benchmarks.planner_transformers                                # meta device: no GPU, no memory
    python -m benchmarks.planner_transformers --device cuda --out FILE.json  # one GPU
    python -m benchmarks.planner_transformers --cases 'llama*' 'qwen3*'

A model of a few blocks is built from its configuration, in bf16, with or without peft's adapters and transformers'
gradient checkpointing. One step runs `model(input_ids, labels=...).loss.backward()`. Compared is the peak of the memory
that the step allocates on top of the weights, its gradients included. On the meta device nothing is computed: a
dispatch mode counts storages, and attention is one kernel (`work/probe.py`). On a GPU the allocator is asked.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from shardwise.base.dtypes import BF16
from shardwise.base.errors import import_library
from shardwise.planner.shapes.hf_config import shape_of_config
from shardwise.planner.shapes.shape import ModelShape
from shardwise.planner.training import Lora, Training
from shardwise.planner.work.activations import works_of
from shardwise.planner.work.probe import Counting, StandIns
from shardwise.planner.work.work import chain

SIZES = {
    "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 2816,
    "num_hidden_layers": 4, "vocab_size": 32000, "head_dim": 128, "max_position_embeddings": 4096, "use_cache": False,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 512}
ROUTED = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, **EXPERTS}
LATENT = {**ROUTED, "num_key_value_heads": 8, "kv_lora_rank": 256, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64,
          "v_head_dim": 64, "n_shared_experts": 1, "head_dim": 64}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "phi3": {"pad_token_id": 0},
    "olmo2": {},
    "granite": {},
    "glm4": {"pad_token_id": 0},
    "starcoder2": {},
    "smollm3": {"pad_token_id": 0},
    "cohere": {},
    "phi": {},
    "gpt_neox": {"num_key_value_heads": 8},
    "gpt2": {
        "n_embd": 1024,
        "n_layer": 4,
        "n_head": 8,
        "n_positions": 4096,
        "n_inner": 2816,
        "intermediate_size": None,
    },
    "opt": {"ffn_dim": 2816, "word_embed_proj_dim": 1024},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, **EXPERTS},
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 1024, **EXPERTS},
    "deepseek_v3": {**LATENT, "q_lora_rank": 512},
    "deepseek_v2": {**LATENT, "q_lora_rank": None},
    "glm4_moe": {**ROUTED, "n_shared_experts": 1},
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 4096},
    "qwen3_next": {
        "num_experts": 8,
        "shared_expert_intermediate_size": 512,
        "linear_num_value_heads": 16,
        "linear_num_key_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        **EXPERTS,
    },
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
}
ADAPTED = ("llama", "qwen3", "gemma2", "phi3")


@dataclass(frozen=True, slots=True)
class Case:
    """`lora`: adapters of this rank on `targets`. `is_reentrant`: the older kind of gradient checkpointing."""

    model_type: str
    micro_batch: int = 2
    seq: int = 1024
    vocab: int = 32000
    checkpointing: str = "none"
    is_reentrant: bool = False
    lora: Lora | None = None

    def __str__(self) -> str:
        lora = "" if self.lora is None else f", lora {self.lora.dropout:g}{' fp32' if self.lora.upcast else ''}"
        how = f"{self.checkpointing}{' reentrant' if self.is_reentrant else ''}"
        return f"{self.model_type}, {self.micro_batch} x {self.seq}, {self.vocab}, {how}{lora}"

    @property
    def config(self) -> Mapping[str, Any]:
        return {"model_type": self.model_type, **SIZES, **CONFIGS[self.model_type], "vocab_size": self.vocab}

    @property
    def shape(self) -> ModelShape:
        return replace(shape_of_config(self.config), dtype=BF16)

    @property
    def training(self) -> Training:
        return Training(
            micro_batch=self.micro_batch, seq=self.seq, precision="pure-bf16", loss="plain", engine="fsdp2",
            checkpointing=self.checkpointing, lora=self.lora,  # type: ignore[arg-type]
        )  # fmt: skip


def cases() -> Iterator[Case]:
    linear = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    for kind in CONFIGS:
        yield Case(kind, vocab=512)
        yield Case(kind)
        yield Case(kind, vocab=512, checkpointing="full")
    for kind in ("llama", "gpt2"):
        yield Case(kind, vocab=512, checkpointing="full", is_reentrant=True)
    for kind in ADAPTED:
        targets = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") if kind == "phi3" else linear
        for dropout in (0.0, 0.1):
            for upcast in (False, True):
                yield Case(kind, vocab=512, lora=Lora(16, targets, dropout=dropout, upcast=upcast))
        yield Case(
            kind, vocab=512, lora=Lora(16, upcast=True) if kind != "phi3" else Lora(16, ("qkv_proj",), upcast=True)
        )
        yield Case(kind, vocab=512, checkpointing="full", lora=Lora(16, targets, dropout=0.1, upcast=True))


def build(case: Case, device: torch.device) -> Any:
    transformers = import_library("transformers", "this benchmark")
    config = transformers.AutoConfig.for_model(**{**case.config, "bos_token_id": None, "eos_token_id": None})
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    if case.lora is not None:
        peft = import_library("peft", "this benchmark")
        lora = peft.LoraConfig(
            r=case.lora.r, lora_dropout=case.lora.dropout, target_modules=list(case.lora.targets) or None,
            task_type="CAUSAL_LM",
        )  # fmt: skip
        model.enable_input_require_grads() if case.checkpointing == "full" else None
        with device:
            model = peft.get_peft_model(model, lora)
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.data = param.data.to(torch.float32 if case.lora.upcast else torch.bfloat16)
    if case.checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": case.is_reentrant})
    return model


def seen_bytes(case: Case, device: torch.device) -> int:
    """Return the peak of a step above the weights."""
    model = build(case, device)
    tokens = torch.zeros(case.micro_batch, case.seq, dtype=torch.int64, device=device)

    if device.type == "cuda":
        for _ in range(2):  # the first one also loads kernels and their workspaces
            model.zero_grad(set_to_none=True)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(input_ids=tokens, labels=tokens).loss.backward()
        return torch.cuda.max_memory_allocated() - before
    counting, stand_ins = Counting(), StandIns(frozenset())
    counting.leave_out((list(model.parameters()), list(model.buffers()), tokens))
    # Gradient checkpointing runs the forward of a block again, in the backward.
    for part in [part for part in model.modules() if isinstance(part, nn.ModuleList)]:
        for block in part if isinstance(part[0], GradientCheckpointingLayer) else ():
            block.forward = counting.noting(block.forward, stand_ins)
    run = counting.noting(lambda: model(input_ids=tokens, labels=tokens).loss, stand_ins)
    with counting:
        counting.begin()
        run().backward()
    return counting.peak - counting.before


def planned_bytes(case: Case) -> int:
    work = chain(list(works_of(case.shape, case.training).values()))
    return max(work.forward_peak_bytes, work.saved_bytes + work.output_bytes + work.backward_peak_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="meta")
    parser.add_argument("--cases", nargs="*", default=["*"])
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found = []
    print("| case | seen MB | planned MB | error |\n|---|---|---|---|")
    for case in cases():
        if not any(fnmatchcase(str(case), pattern) for pattern in asked.cases):
            continue
        seen, planned = seen_bytes(case, torch.device(asked.device)), planned_bytes(case)
        found.append({**asdict(case), "seen": seen, "planned": planned})
        print(f"| {case} | {seen / 1e6:.1f} | {planned / 1e6:.1f} | {planned / seen - 1:+.1%} |", flush=True)
    errors = [abs(each["planned"] / each["seen"] - 1) for each in found]
    sizes = (
        f"median error {statistics.median(errors):.2%}, mean {statistics.mean(errors):.2%}, largest {max(errors):.2%}"
    )
    print(f"{len(errors)} cases: {sizes}")
    if asked.out:
        asked.out.write_text(json.dumps({"device": asked.device, "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
