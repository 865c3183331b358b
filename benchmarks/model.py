"""The Llama-like model that every contender trains, and the batches it is fed.

Weights depend on the seed alone, batches on seed, step and rank: whoever runs a case sees the same numbers.
With `vocab=0` there is neither embedding nor head: hidden states come in and their mean square is the loss,
so that nothing but the blocks costs time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    hidden: int
    ffn: int
    heads: int
    num_blocks: int
    tokens: int
    vocab: int = 0


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.RMSNorm(shape.hidden)
        self.query, self.key, self.value, self.output = (
            nn.Linear(shape.hidden, shape.hidden, bias=False) for _ in range(4)
        )
        self.ffn_norm = nn.RMSNorm(shape.hidden)
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (
            part(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [batch, heads, tokens, hidden / heads]
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(-2))
        h = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.hidden) if shape.vocab else nn.Identity()
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_blocks))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False) if shape.vocab else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> Model:
    """The model on `device`, initialised there: no host copy of it is ever made."""
    torch.manual_seed(seed)
    with device:
        model = Model(shape).to(dtype)
    for weight in model.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.02)
    return model


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Next-token loss of token ids, or the mean square of what came of hidden states."""
    if batch.is_floating_point():
        return model(batch).float().square().mean()
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def batch_of(shape: Shape, device: torch.device, dtype: torch.dtype, step: int, rank: int = 0) -> Tensor:
    """One sequence: ids [1, tokens + 1], or hidden states [1, tokens, hidden]."""
    generator = torch.Generator(device).manual_seed(1_000_003 * step + rank)
    if shape.vocab:
        # Skewed ids, so that there is something to learn and the losses fall.
        uniform = torch.rand(1, shape.tokens + 1, device=device, generator=generator)
        return (uniform.pow(4) * shape.vocab).long()
    return torch.randn(1, shape.tokens, shape.hidden, device=device, generator=generator).to(dtype)
