"""A Llama as torchtitan writes it: what published measurements ran, for comparing tapes and trackers with."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return wide.type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, has_norms: bool = False) -> None:
        super().__init__()
        self.head_dim, self.groups = hidden // heads, heads // kv_heads
        linear = partial(nn.Linear, bias=False)
        narrow = self.head_dim * kv_heads
        self.wq, self.wk, self.wv = linear(hidden, hidden), linear(hidden, narrow), linear(hidden, narrow)
        self.wo = linear(hidden, hidden)
        # Those of its Qwen3.
        self.norms = nn.ModuleList(nn.RMSNorm(self.head_dim) if has_norms else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q, k, v = (part.view(batch, seq, -1, self.head_dim) for part in (q, k, v))
        turned = _turned if turns.is_complex() else _turned_by_halves
        q, k = (turned(norm(part), turns) for norm, part in zip(self.norms, (q, k), strict=True))
        keys, values = self._repeated(k), self._repeated(v)
        q, keys, values = (part.transpose(1, 2) for part in (q, keys, values))
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
        return self.wo(out.transpose(1, 2).contiguous().view(batch, seq, -1))

    def _repeated(self, x: Tensor) -> Tensor:
        batch, seq, heads, dim = x.shape
        return x[:, :, :, None].expand(batch, seq, heads, self.groups, dim).reshape(batch, seq, -1, dim)


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None]).flatten(3).type_as(x)


def _turned_by_halves(x: Tensor, turns: Tensor) -> Tensor:
    cos, sin = turns[None, :, None].to(x.dtype).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return (x * cos) + (torch.cat((-second, first), dim=-1) * sin)


class FeedForward(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.w1, self.w2, self.w3 = linear(hidden, ffn), linear(ffn, hidden), linear(hidden, ffn)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int, has_norms: bool = False) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(hidden, heads, kv_heads, has_norms), FeedForward(hidden, ffn)
        self.attention_norm, self.ffn_norm = Norm(hidden), Norm(hidden)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), turns)
        return h + self.feed_forward(self.ffn_norm(h))


class Titan(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, seq: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads, kv_heads, ffn) for _ in range(layers))
        self.norm = Norm(hidden)
        self.output = nn.Linear(hidden, vocab, bias=False)
        self.register_buffer("turns", torch.ones(seq, hidden // heads // 2, dtype=torch.complex64), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x, self.turns)
        return self.output(self.norm(x))
