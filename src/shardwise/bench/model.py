"""The models that every contender trains, and their batches.

Weights depend on the seed alone. Batches depend on the seed, the step and the micro-batch's index in the global batch.
So every contender sees the same numbers. Models are built on the device they run on, without a copy on the host.
"""

from dataclasses import asdict
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..planner.hardware.gpus import flops_per_token
from ..trainer.model import Transformer
from ..trainer.shapes import TransformerShape
from .case import Case, Shape


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


class Blocks(nn.Module):
    """Blocks and a norm, without embedding or head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        for weight in self.blocks.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def build(shape: Shape, device: torch.device, seed: int) -> Transformer | Blocks:
    torch.manual_seed(seed)
    with device:
        if not shape.vocab:
            return Blocks(shape)
        sizes = {name: size for name, size in asdict(shape).items() if name not in ("name", "tokens")}
        return Transformer(TransformerShape(max_seq=shape.tokens, **sizes))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the next-token loss for token ids; for hidden states, the mean squared distance to the previous position.

    That distance is about two for any initial weights. If an update is missing, later losses differ. (The mean square
    of the output alone would not show that: the last layer is a norm, so it would always be one.)
    """
    if batch.is_floating_point():
        return (model(batch).float() - batch.roll(1, dims=1)).square().mean()
    return model(batch[:, :-1], batch[:, 1:])


def batches_of(case: Case, rank: int, device: torch.device, dtype: torch.dtype, num_steps: int) -> list[list[Tensor]]:
    """Return the micro-batches of a rank by step: ids [batch, tokens + 1], or hidden states [batch, tokens, hidden].

    Hidden states are large, and would add to the measured memory, so all steps use the same ones.
    """
    shape = case.shape

    def batch(step: int, index: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(case.seed + 1_000_003 * step + index)
        if not shape.vocab:
            size = (case.batch, shape.tokens, shape.hidden)
            return torch.randn(size, device=device, generator=generator).to(dtype)
        # Skewed ids, so that there is something to learn and the losses fall.
        uniform = torch.rand(case.batch, shape.tokens + 1, device=device, generator=generator)
        return (uniform.pow(4) * shape.vocab).long()

    indices = range(rank * case.micro_batches, (rank + 1) * case.micro_batches)
    if not shape.vocab:
        return [[batch(0, index) for index in indices]] * num_steps
    return [[batch(step, index) for index in indices] for step in range(num_steps)]


@cache
def num_params(shape: Shape) -> int:
    return sum(weight.numel() for weight in build(shape, torch.device("meta"), 0).parameters())


def flops_of(shape: Shape) -> float:
    """FLOP of forward and backward per token."""
    looked_up = 0 if shape.tied else shape.vocab * shape.hidden
    return flops_per_token(num_params(shape) - looked_up, shape.layers, shape.hidden, shape.tokens)


def device_of(case: Case) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if case.device == "cuda" else torch.device("cpu")
