"""Shapes of the in-tree transformer, by name, and settings that suit each. This file does not import torch."""

from dataclasses import dataclass, field, fields
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


def _llama(hidden: int, ffn: int, layers: int, heads: int, max_seq: int, tied: bool = False) -> Preset:
    shape = {"hidden": hidden, "layers": layers, "heads": heads, "kv_heads": 8, "ffn": ffn, "max_seq": max_seq}
    return Preset({**shape, "tied": tied}, vocab=128256)


PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        {"hidden": 192, "layers": 4, "heads": 6, "kv_heads": 2, "ffn": 512, "max_seq": 512},
        vocab=257,
        settings={
            "seq_length": 128,
            "global_batch_size": 16,
            "max_steps": 200,
            "learning_rate": 3e-3,
            "warmup_steps": 10,
        },
    ),
    "50m": Preset(
        {"hidden": 512, "layers": 12, "heads": 8, "kv_heads": 8, "ffn": 1408, "max_seq": 2048},
        vocab=8192,
    ),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 4096, tied=True),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 4096, tied=True),
    "llama-3-8b": _llama(4096, 14336, 32, 32, 8192),
    "llama-3-70b": _llama(8192, 28672, 80, 64, 8192),
}

SHAPE_KEYS = tuple(entry.name for entry in fields(TransformerShape))
