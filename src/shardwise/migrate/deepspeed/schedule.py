"""`scheduler`: DeepSpeed's three schedules with a warm-up, which the trainer has under their own names.

They give the same learning rate in every step (train/learning_rate.py says how they differ from ours).
"""

from typing import Any

from ..account import Block
from .optimizer import LEARNING_RATE

TYPES = {"WarmupLR": "warmup-lr", "WarmupDecayLR": "warmup-decay-lr", "WarmupCosineLR": "warmup-cosine-lr"}
REFUSED = {
    "OneCycle": "it moves Adam's momentum with the learning rate, which the trainer does not",
    "LRRangeTest": "it looks for a learning rate, and does not train with one",
}
INSTEAD = "use a scheduler of your own in your loop, or one of the trainer's (--lr-scheduler-type)"
SAME = "the same learning rate in every step; one that is left out counts here, and not in DeepSpeed"
WARMUP_STEPS = 1000


def read_schedule(top: Block, optimizer: dict[str, Any]) -> dict[str, Any]:
    """`optimizer` has the learning rate that a schedule goes up to where it names none."""
    block = top.inner("scheduler")
    params = block.inner("params")
    if not block.has("type"):
        params.refused_whole("no type of schedule is named, so that DeepSpeed would make none; write scheduler.type")
        return {}
    asked = block.word("type", (*TYPES, *REFUSED), "")
    if asked not in TYPES:
        block.refused("type", f"{REFUSED.get(asked, 'it is unknown')}; {INSTEAD}")
        params.ignored_whole("belongs to a schedule that is refused")
        return {}
    block.used("type", f"lr_scheduler_type {TYPES[asked]}: {SAME}")
    found: dict[str, Any] = {"lr_scheduler_type": TYPES[asked]}
    _read_steps(params, found)
    if asked != "WarmupLR":
        _read_end(params, found)
    if asked == "WarmupCosineLR":
        _read_ratios(params, found)
    else:
        _read_rates(params, found, asked, optimizer)
    if params.whole("last_batch_iteration", -1) != -1:
        params.refused("last_batch_iteration", "a run that goes on finds its step in its checkpoint; leave it out")
    params.ignored("last_batch_iteration", "from the beginning")
    return found


def _read_steps(params: Block, found: dict[str, Any]) -> None:
    found["warmup_type"] = params.word("warmup_type", ("log", "linear"), "log")
    params.used("warmup_type", f"warmup_type {found['warmup_type']}")
    if not params.auto("warmup_num_steps", "--warmup-steps, as the trainer has it"):
        found["warmup_steps"] = params.whole("warmup_num_steps", WARMUP_STEPS, least=1)
        params.used("warmup_num_steps", f"warmup_steps {found['warmup_steps']}")


def _read_end(params: Block, found: dict[str, Any]) -> None:
    key = "total_num_steps"
    if params.auto(key, "all steps of the run") or not params.has(key):
        return
    found["schedule_steps"] = params.whole(key, 1, least=1)
    params.used(key, f"schedule_steps {found['schedule_steps']}; how long the run is, --max-steps says")


def _read_ratios(params: Block, found: dict[str, Any]) -> None:
    for key, setting, default in (
        ("warmup_min_ratio", "warmup_min_ratio", 0.0),
        ("cos_min_ratio", "min_lr_ratio", 1e-4),
    ):
        found[setting] = params.number(key, default, least=0, most=1)
        params.used(key, f"{setting} {found[setting]:g}")


def _read_rates(params: Block, found: dict[str, Any], asked: str, optimizer: dict[str, Any]) -> None:
    """Learning rates that the warm-up begins and ends with, the latter in place of the optimizer's."""
    high = optimizer.get("learning_rate") if asked == "WarmupLR" else LEARNING_RATE
    if params.auto("warmup_max_lr", "--learning-rate, as the trainer has it"):
        high = None
    elif params.has("warmup_max_lr"):
        high = params.number("warmup_max_lr", least=0)
        params.used("warmup_max_lr", f"learning_rate {high:g}")
    if high is not None:
        found["learning_rate"] = high
    if params.auto("warmup_min_lr", "warmup_min_ratio 0: Hugging Face begins at 0"):
        return
    low = params.number("warmup_min_lr", 0.0, least=0)
    if low and (high is None or low > high):
        params.refused(
            "warmup_min_lr", f"it must be at most warmup_max_lr, {'which is not said' if high is None else high}"
        )
    elif low and high:
        found["warmup_min_ratio"] = low / high
    params.used("warmup_min_lr", f"warmup_min_ratio {found.get('warmup_min_ratio', 0.0):g} of the learning rate")
