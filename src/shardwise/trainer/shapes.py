"""Shapes of the in-tree transformer, by name, and settings that suit each. This file does not import torch."""

from dataclasses import dataclass, field, fields
from typing import Any

from ..base.errors import ConfigurationError
from ..planner.shapes.names import IN_TREE


@dataclass(frozen=True, slots=True)
class TransformerShape:
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    max_seq: int
    tied: bool = False  # the output projection is the embedding

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "layers", "heads", "kv_heads", "ffn", "max_seq"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"shape: {name} {getattr(self, name)}, but it must be at least 1")
        if self.hidden % self.heads or self.head_dim % 2:
            raise ConfigurationError(
                f"shape: hidden {self.hidden} / heads {self.heads} is not an even whole number, which "
                "rotary positions need: choose other heads"
            )
        if self.heads % self.kv_heads:
            raise ConfigurationError(f"shape: heads {self.heads} is no multiple of kv_heads {self.kv_heads}")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True, slots=True)
class Preset:
    """A named shape. `shape` has all fields of a `TransformerShape` except the vocabulary, which is the tokenizer's.

    Benchmarks use `vocab`. `settings`: defaults of a run with this shape.
    """

    shape: dict[str, Any]
    vocab: int
    settings: dict[str, Any] = field(default_factory=dict)


_MAX_SEQ = {
    "tiny": 512, "50m": 2048, "llama-3.2-1b": 4096, "llama-3.2-3b": 4096, "llama-3-8b": 8192, "llama-3-70b": 8192,
}  # fmt: skip
_TINY = {"seq_length": 128, "global_batch_size": 16, "max_steps": 200, "learning_rate": 3e-3, "warmup_steps": 10}


def _preset(name: str) -> Preset:
    shape = {key: getattr(IN_TREE[name], key) for key in SHAPE_KEYS if key not in ("vocab", "max_seq")}
    return Preset({**shape, "max_seq": _MAX_SEQ[name]}, IN_TREE[name].vocab, _TINY if name == "tiny" else {})


SHAPE_KEYS = tuple(entry.name for entry in fields(TransformerShape))
# The sizes come from the planner.
PRESETS = {name: _preset(name) for name in IN_TREE}
