"""What the scripts beside this file share: a small transformer, synthetic data, and how losses are told.

Nothing here knows how the model is trained. Every run gives the same numbers, and a rank its own part of each batch.
"""

import argparse
import atexit
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

NUM_STEPS, NUM_MICRO, BATCH, LENGTH, VOCAB, WIDTH = 20, 2, 4, 16, 32, 32
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")

# A thread of gloo's that lets go of its last tensors after the interpreter has gone aborts the process.
atexit.register(time.sleep, 0.1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, required=True, help="written every ten steps, and gone on from")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="stop after so many")
    parser.add_argument("--precision", choices=DTYPES, default="bf16", help="what forward and backward compute in")
    return parser.parse_args()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights on every rank
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embed(tokens)))
        return logits


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of the next token, in fp32."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def batch_of(number: int) -> Tensor:
    """Sequences in which the token that follows can be computed."""
    generator = torch.Generator().manual_seed(number)
    first = torch.randint(VOCAB, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
    return ((first + stride * torch.arange(LENGTH)) % VOCAB).to(DEVICE)


def train_data(step: int) -> list[Tensor]:
    """This rank's micro-batches of a step."""
    first = (step * dist.get_world_size() + dist.get_rank()) * NUM_MICRO
    return [batch_of(first + micro) for micro in range(NUM_MICRO)]


def eval_data() -> list[Tensor]:
    return [batch_of(10_000 + 2 * dist.get_rank() + number) for number in range(2)]


def report(what: str, loss: Tensor) -> None:
    """Print the mean over ranks, on rank 0."""
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"{what} {mean.item() / dist.get_world_size():.9g}", flush=True)
