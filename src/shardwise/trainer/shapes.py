"""Shapes of the in-tree transformer, by name, and settings that suit each. This file does not import torch."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..base.errors import ConfigurationError


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
                f"shape: hidden {self.hidden} / heads {self.heads} is not an even whole number; "
                "choose heads so that each has an even dim, which rotary positions turn in pairs"
            )
        if self.heads % self.kv_heads:
            raise ConfigurationError(
                f"shape: heads {self.heads} does not divide into kv_heads {self.kv_heads}; "
                "every key-value head serves the same number of query heads"
            )

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

    def with_vocab(self, vocab: int) -> TransformerShape:
        return TransformerShape(vocab=vocab, **self.shape)


def _preset(
    hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, max_seq: int, vocab: int, tied: bool = False
) -> Preset:
    sizes = {"hidden": hidden, "layers": layers, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, "max_seq": max_seq}
    return Preset({**sizes, "tied": tied}, vocab)


_TINY = {"seq_length": 128, "global_batch_size": 16, "max_steps": 200, "learning_rate": 3e-3, "warmup_steps": 10}
PRESETS: dict[str, Preset] = {
    "tiny": replace(_preset(192, 4, 6, 2, 512, 512, 257), settings=_TINY),
    "50m": _preset(512, 12, 8, 8, 1408, 2048, 8192),
    "llama-3.2-1b": _preset(2048, 16, 32, 8, 8192, 4096, 128256, tied=True),
    "llama-3.2-3b": _preset(3072, 28, 24, 8, 8192, 4096, 128256, tied=True),
    "llama-3-8b": _preset(4096, 32, 32, 8, 14336, 8192, 128256),
    "llama-3-70b": _preset(8192, 80, 64, 8, 28672, 8192, 128256),
}

SHAPE_KEYS = tuple(entry.name for entry in fields(TransformerShape))
