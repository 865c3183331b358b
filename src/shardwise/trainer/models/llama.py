"""The in-tree transformer in files: it is a Llama, so exports have Llama's names and config.json.

The config also has the in-tree shape, under SHAPE_KEY, so that shardwise can open the folder without transformers.
"""

import dataclasses
import re
from typing import Any

from ..shapes import TransformerShape

SHAPE_KEY = "shardwise_shape"

_OUTSIDE = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_IN_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
# The last parts of module names, as in the targets of adapters: from the in-tree name to Llama's, and back.
LEAVES = {ours.rpartition(".")[2]: theirs.rpartition(".")[2] for ours, theirs in (_IN_BLOCK | _OUTSIDE).items()}
IN_TREE_LEAVES = {theirs: ours for ours, theirs in LEAVES.items()}
LINEAR_LEAVES = [ours.rpartition(".")[2] for ours in _IN_BLOCK if "." in ours]  # all except the head


def llama_name(name: str) -> str:
    """Return Llama's name of a tensor, module or adapter. A prefix that peft has added stays."""
    return _renamed(name, r"blocks\.(\d+)", "model.layers", _IN_BLOCK, _OUTSIDE)


def in_tree_name(name: str) -> str:
    inside, outside = ({theirs: ours for ours, theirs in table.items()} for table in (_IN_BLOCK, _OUTSIDE))
    return _renamed(name, r"model\.layers\.(\d+)", "blocks", inside, outside)


def _renamed(name: str, block: str, other_block: str, inside: dict[str, str], outside: dict[str, str]) -> str:
    parts, others = ("|".join(map(re.escape, sorted(table, key=len, reverse=True))) for table in (inside, outside))
    if match := re.match(rf"(^|.*\.){block}\.({parts})(?=\.|$)", name):
        return f"{match[1]}{other_block}.{match[2]}.{inside[match[3]]}{name[match.end() :]}"
    if match := re.match(rf"(^|.*\.)({others})(?=\.|$)", name):
        return f"{match[1]}{outside[match[2]]}{name[match.end() :]}"
    return name


def llama_config(shape: TransformerShape, dtype: str, end_id: int | None) -> dict[str, Any]:
    """A config.json for transformers. `dtype` is torch's name, like "float32"."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_seq,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": end_id,
        "pad_token_id": None,
        "use_cache": True,
        "dtype": dtype,
        SHAPE_KEY: dataclasses.asdict(shape),
    }
