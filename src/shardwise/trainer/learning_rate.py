"""The learning rate of a step, as a pure function: nothing about it is state, so a resumed run needs no scheduler's.

DeepSpeed's schedules are beside ours because they are not the same: they are one step late (the first two steps have
the same rate), a linear warm-up starts at its lowest value and not one step above it, and what decays linearly would
reach its end two steps after the last one.
"""

import math

from .settings import DEEPSPEED_SCHEDULES, Settings


def learning_rate(settings: Settings, step: int, num_steps: int) -> float:
    """Of step `step` (from 0) of `num_steps`: warm-up, then the schedule down to `min_lr_ratio` at the last step."""
    warmup = num_warmup_steps(settings, num_steps)
    if settings.lr_scheduler_type in DEEPSPEED_SCHEDULES:
        return settings.learning_rate * _as_deepspeed(settings, step, warmup, settings.schedule_steps or num_steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    least = settings.min_lr_ratio
    first = warmup
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


def rise(settings: Settings, before: float | None, step: int, num_steps: int) -> str:
    """A sentence where a run that goes on after `step` steps, the last at the rate `before`, has another schedule now
    and a higher rate; None: not known."""
    if before is None or not 0 < step < num_steps:
        return ""
    same, after = (learning_rate(settings, at, num_steps) for at in (step - 1, step))
    if math.isclose(before, same, rel_tol=1e-6) or after <= before:
        return ""
    return (
        f"the learning rate goes up, from {before:.2e} at step {step} to {after:.2e} at step {step + 1}: now the "
        f"schedule is {settings.lr_scheduler_type} to {settings.learning_rate:g} over {num_steps} steps; to go on "
        f"as it ended: --lr-scheduler-type constant --learning-rate {before:.3g}"
    )


def num_warmup_steps(settings: Settings, num_steps: int) -> int:
    part = settings.warmup_steps
    return math.ceil(part * num_steps) if part < 1 else int(part)


def _as_deepspeed(settings: Settings, step: int, warmup: int, end: int) -> float:
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
        way = min((done - warmup + 1) / max(end - warmup, 1), 1.0)
        return settings.min_lr_ratio + (1 - settings.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * way))
    if settings.lr_scheduler_type == "warmup-decay-lr":
        return least + (1 - least) * max((end - done) / max(end - warmup, 1), 0.0)
    return 1.0
