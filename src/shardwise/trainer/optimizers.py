"""The optimizer that a run asks for, on a model that is not sharded yet. Matrices decay; norms and biases do not."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import ConfigurationError
from .settings import Settings


def optimizer_for(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [param for param in params if param.ndim <= 1], "weight_decay": 0.0},
    ]
    return _MAKERS[settings.optimizer]([group for group in groups if group["params"]], settings)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # compiled updates read it from there
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def check_optimizer(settings: Settings) -> None:
    """Refuse what is not installed."""
    if settings.optimizer == "adamw8bit" and find_spec("torchao") is None:
        raise ConfigurationError(
            "optimizer adamw8bit needs torchao, which is not installed: pip install 'shardwise[eight-bit]'"
        )


def _adam_words(settings: Settings) -> dict[str, Any]:
    return {
        "lr": settings.learning_rate,
        "betas": (settings.adam_beta1, settings.adam_beta2),
        "eps": settings.adam_epsilon,
    }


def _adamw(groups: list[dict[str, Any]], settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, **_adam_words(settings), fused=True)


def _adamw8bit(groups: list[dict[str, Any]], settings: Settings) -> torch.optim.Optimizer:
    check_optimizer(settings)
    made: torch.optim.Optimizer = import_module("torchao.optim").AdamW8bit(groups, **_adam_words(settings))
    return made


def _sgd(groups: list[dict[str, Any]], settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=settings.momentum, fused=True)


_MAKERS: dict[str, Callable[[list[dict[str, Any]], Settings], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw8bit": _adamw8bit,
    "sgd": _sgd,
}
