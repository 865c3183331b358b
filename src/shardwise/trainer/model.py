"""A Llama-like decoder in plain torch, for examples, tests and benchmarks.

Pre-norm blocks of grouped-query attention with rotary positions and a SwiGLU feed-forward. Nothing here
knows about sharding; the loss is computed inside the head, the one module that reads the head's weight. Every
module that owns parameters has `reset_parameters`, and no module owns a buffer (the rotary table is computed
from the positions in each forward), so a model made on the meta device can be filled in module by module.

If positions are given, several documents share a row: a position that does not follow the one before it begins
another document. Rotary angles restart there, and attention does not cross the boundary.

With a cache, the tokens continue a text: their keys and values are added to those of the tokens before them.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .loss import USUAL_CHUNKS, Chunks, Reduction, chunked_cross_entropy
from .shapes import TransformerShape


class Linear(nn.Linear):
    """A projection without bias whose initial weights keep the variance of the input."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)


class Embedding(nn.Embedding):
    """Initialised like a `Linear` from `hidden`, so that a tied weight is the same whichever module initialises it."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)


class Head(Linear):
    """The output projection, and the loss if targets are given: in one module, as the weight is gathered only here."""

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        reduction: Reduction = "mean",
        chunks: Chunks = USUAL_CHUNKS,
    ) -> Tensor:
        """Return logits (batch, seq, vocab), or the cross-entropy in fp32, computed without holding all logits."""
        if targets is None:
            return F.linear(x, self.weight)
        return chunked_cross_entropy(x, self.weight, targets, reduction=reduction, chunks=chunks)


class LayerCache:
    """Keys and values of the tokens that a layer has seen, (batch, heads, seq, dim); named as in transformers."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat((self.keys, keys), dim=2), torch.cat((self.values, values), dim=2)
        self.keys, self.values = keys, values
        return keys, values


class Attention(nn.Module):
    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.query = Linear(shape.hidden, shape.heads * shape.head_dim)
        self.key = Linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.value = Linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.out = Linear(shape.heads * shape.head_dim, shape.hidden)

    def forward(self, x: Tensor, rotary: Tensor, mask: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        query = rotate(self._heads(self.query(x)), rotary)
        key = rotate(self._heads(self.key(x)), rotary)
        value = self._heads(self.value(x))
        if cache is not None:
            key, value = cache.update(key, value)
        num_groups = query.shape[1] // key.shape[1]
        if mask is not None and num_groups > 1:
            # With a mask, the only GPU kernel for grouped queries stores all scores. Repeat the keys instead.
            key, value = (part.repeat_interleave(num_groups, dim=1) for part in (key, value))
        is_causal = mask is None and query.shape[2] == key.shape[2]  # else it is one token, which attends to all
        mixed = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, enable_gqa=query.shape[1] != key.shape[1]
        )
        return self.out(mixed.transpose(1, 2).flatten(2))  # (batch, heads, seq, dim) -> (batch, seq, hidden)

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, seq, heads * dim) -> (batch, heads, seq, dim)"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.gate = Linear(shape.hidden, shape.ffn)
        self.up = Linear(shape.hidden, shape.ffn)
        self.down = Linear(shape.ffn, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.ffn = FeedForward(shape)

    def forward(self, x: Tensor, rotary: Tensor, mask: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary, mask, cache)
        return x + self.ffn(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.head = Head(shape.hidden, shape.vocab)
        if shape.tied:
            self.head.weight = self.embed.weight

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        reduction: Reduction = "mean",
        chunks: Chunks = USUAL_CHUNKS,
        cache: Sequence[LayerCache] | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Return logits (batch, seq, vocab), or the cross-entropy in fp32 if targets are given.

        positions (batch, seq) count from 0 in each of the documents of a row; without them a row is one document.

        With a cache (one for each block), the tokens follow those in it, at these positions, and only the logits of the
        last one are returned. attention_mask (batch, all tokens) is False for padding, which comes first in a row.
        """
        num_tokens = tokens.shape[1]
        if num_tokens > self.shape.max_seq:
            raise ValueError(f"{num_tokens} tokens in a row, but the shape's max_seq is {self.shape.max_seq}")
        if cache is not None and positions is not None:
            mask = continued_mask(attention_mask, num_tokens)
            rotary = rotary_at(positions[:, None], self.shape.head_dim)
        elif positions is None:
            rotary, mask = rotary_at(torch.arange(num_tokens, device=tokens.device), self.shape.head_dim), None
        else:
            rotary, mask = rotary_at(positions[:, None], self.shape.head_dim), document_mask(positions)
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x, rotary, mask, None if cache is None else cache[index])
        if cache is not None:
            x = x[:, -1:]
        return self.head(self.norm(x), targets, reduction, chunks)


def rotary_at(positions: Tensor, head_dim: int) -> Tensor:
    """Return cosine and sine of position x frequency, (2, ..., dim / 2); in fp32: bf16 rounds late positions."""
    pairs = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = 10000.0 ** (-pairs / head_dim)
    angles = positions.float()[..., None] * frequencies
    return torch.stack((angles.cos(), angles.sin()))


def document_mask(positions: Tensor) -> Tensor:
    """Mask of the tokens that a token attends to: itself and those before it in its document; (batch, 1, seq, seq)."""
    begins = positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1
    document = begins.cumsum(1)
    return (document[:, None, :, None] == document[:, None, None, :]).tril()


def continued_mask(attention_mask: Tensor | None, num_tokens: int) -> Tensor | None:
    """Mask for the last `num_tokens` of a row with padding in front, (batch, 1, num_tokens, all tokens)."""
    if attention_mask is None:
        return None
    num_all = attention_mask.shape[1]
    causal = attention_mask.new_ones(num_tokens, num_all).tril(num_all - num_tokens)
    itself = attention_mask.new_ones(num_tokens, num_all).triu(num_all - num_tokens) & causal  # padding has only this
    return ((attention_mask[:, None] & causal) | itself)[:, None]


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate each pair (i, i + dim / 2) of a head by its angle. Computed in fp32, returned in x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rotary
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
