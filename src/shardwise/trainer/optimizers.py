"""The optimizer of a run and its learning rate.

Matrices have weight decay; norms and biases do not. The learning rate of a step is a pure function of the settings, so
a resumed run needs no scheduler state. DeepSpeed's schedules differ from ours. They are one step late: the first two
steps have the same rate. Their linear warm-up starts at its lowest value, ours one step above it. Their linear decay
would reach its end only two steps after the last step.
"""

import math
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from .settings import DEEPSPEED_SCHEDULES, Settings


def optimizer_for(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Make the optimizer for a model that is not sharded yet."""
    params = [param for param in model.parameters() if param.requires_grad]
    decayed = {"params": [param for param in params if param.ndim > 1], "weight_decay": settings.weight_decay}
    others = {"params": [param for param in params if param.ndim <= 1], "weight_decay": 0.0}
    groups: list[dict[str, Any]] = [group for group in (decayed, others) if group["params"]]
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=settings.momentum, fused=True)
    betas = (settings.adam_beta1, settings.adam_beta2)
    adam: dict[str, Any] = {"lr": settings.learning_rate, "betas": betas, "eps": settings.adam_epsilon}
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, **adam, fused=True)
    made: torch.optim.Optimizer = import_module("torchao.optim").AdamW8bit(groups, **adam)
    return made


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # a compiled update reads this tensor
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def learning_rate(settings: Settings, step: int, num_steps: int) -> float:
    """Return the rate of step `step` (from 0): warm-up, then the schedule down to `min_lr_ratio` at the last step."""
    warmup = num_warmup_steps(settings, num_steps)
    if settings.lr_scheduler_type in DEEPSPEED_SCHEDULES:
        return settings.learning_rate * _deepspeed_factor(settings, step, warmup, settings.schedule_steps or num_steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    least = settings.min_lr_ratio
    first = warmup
    if settings.lr_scheduler_type == "wsd":
        first = max(first, num_steps - (settings.decay_steps or max(num_steps // 5, 1)))
    # 0 at step `first`, where the decay begins, and 1 at the last step.
    progress = min(max((step - first) / max(num_steps - 1 - first, 1), 0.0), 1.0)
    factor = {
        "cosine": least + (1 - least) * 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - (1 - least) * progress,
        "wsd": 1 - (1 - least) * progress,
        "constant": 1.0,
    }[settings.lr_scheduler_type]
    return settings.learning_rate * factor


def num_warmup_steps(settings: Settings, num_steps: int) -> int:
    part = settings.warmup_steps  # below 1: a fraction of all steps
    return math.ceil(part * num_steps) if part < 1 else int(part)


def learning_rate_warning(settings: Settings, before: float | None, step: int, num_steps: int) -> str:
    """Return a warning if a run that resumes after `step` steps has a new schedule that raises the rate, else "".

    `before` is the rate of the last step before the resume; None: unknown.
    """
    if before is None or not 0 < step < num_steps:
        return ""
    same, after = (learning_rate(settings, at, num_steps) for at in (step - 1, step))
    if math.isclose(before, same, rel_tol=1e-6) or after <= before:
        return ""
    return (
        f"the learning rate goes up, from {before:.2e} at step {step} to {after:.2e} at step {step + 1}: now the "
        f"schedule is {settings.lr_scheduler_type} to {settings.learning_rate:g} over {num_steps} steps; to continue "
        f"as it ended: --lr-scheduler-type constant --learning-rate {before:.3g}"
    )


def _deepspeed_factor(settings: Settings, step: int, warmup: int, end: int) -> float:
    is_cosine = settings.lr_scheduler_type == "warmup-cosine-lr"
    if step == 0 and is_cosine:
        return 0.0
    done = max(step - 1, 0)
    warmup = max(warmup, 2)
    least = settings.warmup_min_ratio
    if done < warmup:
        grown = math.log(done + 1) / math.log(warmup) if settings.warmup_type == "log" else done / warmup
        return least + (1 - least) * grown
    if is_cosine:
        progress = min((done - warmup + 1) / max(end - warmup, 1), 1.0)
        return settings.min_lr_ratio + (1 - settings.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
    if settings.lr_scheduler_type == "warmup-decay-lr":
        return least + (1 - least) * max((end - done) / max(end - warmup, 1), 0.0)
    return 1.0
