"""Loops that several themes share."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tests.loops.loop import Loop
from tests.loops.models import start


def train_model(loop: Loop, model: nn.Module, **options: Any) -> nn.Module:
    model, optimizer = start(loop, model, **options)
    loop.train(model, optimizer)
    return model


def train_tokens(loop: Loop, model: nn.Module, **options: Any) -> nn.Module:
    model, optimizer = start(loop, model, **options)
    for step in range(3):

        def loss_of(rank: int, step: int = step) -> Tensor:
            tokens = loop.tokens(step, rank)
            return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())

        loss = loop.mean_of(loss_of)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


def backward(loop: Loop, model: nn.Module, step: int) -> None:
    x, y = loop.batch(step)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    loop.log(loss)
