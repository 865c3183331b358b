"""The learning rate of a step, as a pure function: nothing about it is state, so a resumed run needs no scheduler's."""

import math

from .settings import Settings


def learning_rate(settings: Settings, step: int, num_steps: int) -> float:
    """Of step `step` (from 0) of `num_steps`: warm-up, then the schedule down to `min_lr_ratio` at the last step."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    least = settings.min_lr_ratio
    first = settings.warmup_steps
    if settings.lr_scheduler_type == "wsd":
        first = max(first, num_steps - (settings.decay_steps or max(num_steps // 5, 1)))
    # From 0 at the first step that decays to 1 at the last one.
    way = min(max((step - first) / max(num_steps - 1 - first, 1), 0.0), 1.0)
    factor = {
        "cosine": least + (1 - least) * 0.5 * (1 + math.cos(math.pi * way)),
        "linear": 1 - (1 - least) * way,
        "wsd": 1 - (1 - least) * way,
        "constant": 1.0,
    }[settings.lr_scheduler_type]
    return settings.learning_rate * factor
