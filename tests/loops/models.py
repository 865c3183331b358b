"""Small models for the scenarios: width 8 in, 4 out, a stack of `layers`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.loops.loop import Loop


def sgd(model: nn.Module, lr: float = 0.05, **options: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def adam(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def start(
    loop: Loop,
    model: nn.Module | None = None,
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    **options: Any,
) -> tuple[Any, Any]:
    """Build a model and its optimizer, and shard both."""
    model = model or Net()
    return loop.shard(model, make(model), **options)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Five units: four layers, and the root with the first and the last projection."""

    def __init__(self, num_layers: int = 4, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(block() for _ in range(num_layers))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


class TokenNet(nn.Module):
    """A language model of 16 tokens; the embedding may be tied to the head."""

    def __init__(self, tied: bool = False, sparse: bool = False, num_layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8, sparse=sparse)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.head = nn.Linear(8, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class SkipNet(Net):
    """Runs only the layers that it is told to run, in that order."""

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
        x = self.embed(x)
        for index in order:
            x = self.layers[index](x)
        return self.head(x)
