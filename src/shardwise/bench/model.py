"""The models that every contender trains, their batches, AdamW, and the training step in plain torch.

Weights depend on the seed alone, batches on the seed, the step and the index of the micro-batch in the global batch:
every contender sees the same numbers. Models are built on the device they run on, without a copy on the host.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..planner.hardware.gpus import flops_per_token
from ..trainer.checkpointing import Mode, checkpoint_blocks
from ..trainer.model import Transformer
from ..trainer.shapes import TransformerShape
from .case import Case, Shape

# The same hyper-parameters for every contender.
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WEIGHTS = {"fp32": torch.float32, "bf16": torch.float32, "pure-bf16": torch.bfloat16}
COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "pure-bf16": torch.bfloat16}


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
        return Transformer(
            TransformerShape(
                vocab=shape.vocab,
                hidden=shape.hidden,
                layers=shape.layers,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                ffn=shape.ffn,
                max_seq=shape.tokens,
                tied=shape.tied,
            )
        )


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Next-token loss for token ids; for hidden states, the mean squared distance to the states one position earlier.

    That distance is about two for any initial weights, and later losses reveal every update that was missed. (The mean
    square of the output alone would always be one, because the last layer is a norm.)
    """
    if batch.is_floating_point():
        return (model(batch).float() - batch.roll(1, dims=1)).square().mean()
    return model(batch[:, :-1], batch[:, 1:])


def batches_of(case: Case, rank: int, device: torch.device, dtype: torch.dtype, num_steps: int) -> list[list[Tensor]]:
    """The micro-batches of a rank by step: ids [batch, tokens + 1], or hidden states [batch, tokens, hidden].

    Hidden states are large, and those of later steps would count as memory of this one: every step has the same ones.
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


@dataclass(frozen=True, slots=True)
class Run:
    """A contender that is ready to train. `step` takes micro-batches and returns their mean loss, on the device.

    `host_updates` is the prefix of the profiler ranges in which the host updates weights; empty if it does not.
    """

    step: Callable[[Sequence[Tensor]], Tensor]
    input_dtype: torch.dtype
    host_updates: str = ""
    moved_bytes: Callable[[], float | None] = lambda: None  # by this rank in the last step; None: not counted


def device_of(case: Case) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if case.device == "cuda" else torch.device("cpu")


def adamw(params: Any, capturable: bool = False) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, **ADAMW, fused=True, capturable=capturable)


def model_of(case: Case, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Any:
    """Build the model, not wrapped yet. Blocks are checkpointed and compiled in the same way for every contender."""
    model = build(case.shape, device or device_of(case), case.seed).to(dtype or WEIGHTS[case.precision])
    checkpoint_blocks(model, cast(Mode, case.checkpointing), blocks=[type(model.blocks[0])])
    if case.compile:
        for block in model.blocks:
            block.compile()
    return model


def step_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip: Callable[[], object],
    forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
    before_last: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Callable[[Sequence[Tensor]], Tensor]:
    """The training step of a contender that works like plain torch."""

    def step(micro_batches: Sequence[Tensor]) -> Tensor:
        losses = []
        for number, batch in enumerate(micro_batches, start=1):
            with nullcontext() if number == len(micro_batches) else before_last():
                with forward():
                    loss = loss_of(model, batch)
                (loss / len(micro_batches)).backward()
            losses.append(loss.detach())
        clip()
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean()

    return step


def clipping(case: Case, clip_to: Callable[[float], object]) -> Callable[[], object]:
    return partial(clip_to, case.clip) if case.clip else lambda: None


def torch_clipping(case: Case, model: nn.Module) -> Callable[[], object]:
    return clipping(case, partial(nn.utils.clip_grad_norm_, list(model.parameters())))


def autocast(case: Case) -> Callable[[], AbstractContextManager[Any]]:
    return partial(torch.autocast, case.device, torch.bfloat16) if case.precision == "bf16" else nullcontext
