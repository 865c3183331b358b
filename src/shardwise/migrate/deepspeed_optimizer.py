"""`optimizer` and `scheduler` of DeepSpeed, as settings of the trainer.

In a loop of your own the optimizer is the one that you give to `sw.shard`. Adam is AdamW, as DeepSpeed runs it unless
`adam_w_mode` is false. Defaults are those of the class that DeepSpeed takes: its own Adam has no weight decay, torch's
AdamW 0.01. DeepSpeed's three schedules with a warm-up exist in the trainer under their own names, and give the same
learning rate in every step.
"""

from typing import Any

from .account import Block
from .tables import apply_rules, rules

OPTIMIZERS = {"Adam": "adamw", "AdamW": "adamw", "SGD": "sgd"}
OTHER_OPTIMIZERS = (
    "Adagrad", "Lamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD", "OneBitAdam", "OneBitLamb", "ZeroOneAdam",
    "FusedAdam", "Adafactor", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop", "LBFGS", "SparseAdam",
)  # fmt: skip
LEARNING_RATE = 1e-3
DECAYED = (
    "DeepSpeed decays every parameter that it is given in one group; the trainer, and Hugging Face's with DeepSpeed, "
    "leave out norms and biases"
)
SCHEDULES = {"WarmupLR": "warmup-lr", "WarmupDecayLR": "warmup-decay-lr", "WarmupCosineLR": "warmup-cosine-lr"}
REFUSED_SCHEDULES = {
    "OneCycle": "it changes Adam's momentum with the learning rate, which the trainer does not",
    "LRRangeTest": "it searches for a learning rate, and does not train with one",
}
WARMUP_STEPS = 1000


def read_optimizer(block: Block, params: Block) -> dict[str, Any]:
    apply_rules(block, rules("deepspeed", "optimizer"))
    if not block.has("type"):
        params.refused_whole("DeepSpeed makes no optimizer without a type; write optimizer.type")
        return {}
    asked = block.word("type", (*OPTIMIZERS, *OTHER_OPTIMIZERS), "")
    if asked not in OPTIMIZERS:
        known = ", ".join(dict.fromkeys(OPTIMIZERS.values()))
        block.refused("type", f"the trainer has {known}; leave the block out and give sw.shard your own optimizer")
        params.ignored_whole("belongs to an optimizer that is refused")
        return {}
    name = OPTIMIZERS[asked]
    settings: dict[str, Any] = {"optimizer": name}
    apply_rules(params, rules("deepspeed", "optimizer.params"))
    if not params.auto("lr", "--learning-rate of the trainer"):
        settings["learning_rate"] = params.number("lr", LEARNING_RATE, least=0)
        params.used("lr", f"learning_rate {settings['learning_rate']:g}")
    decay = _read_adam(params, settings, asked) if name == "adamw" else _read_sgd(params, settings)
    if not params.auto("weight_decay", f"--weight-decay of the trainer; {DECAYED}"):
        settings["weight_decay"] = params.number("weight_decay", decay, least=0)
        note = f"; {DECAYED}" if settings["weight_decay"] else ""
        params.used("weight_decay", f"weight_decay {settings['weight_decay']:g}{note}")
    block.used("type", f"optimizer {name}" + (", which DeepSpeed runs for Adam as well" if asked == "Adam" else ""))
    return settings


def _read_adam(params: Block, settings: dict[str, Any], asked: str) -> float:
    """Return the default weight decay."""
    if not params.auto("betas", "--adam-beta1 and --adam-beta2 of the trainer"):
        betas = params.numbers("betas", (0.9, 0.999))
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            params.refused("betas", "it must be two numbers, each at least 0 and below 1")
        else:
            settings |= {"adam_beta1": betas[0], "adam_beta2": betas[1]}
            params.used("betas", f"adam_beta1 {betas[0]:g} and adam_beta2 {betas[1]:g}")
    if not params.auto("eps", "--adam-epsilon of the trainer"):
        settings["adam_epsilon"] = params.number("eps", 1e-8, least=0)
        params.used("eps", f"adam_epsilon {settings['adam_epsilon']:g}")
    is_decoupled = params.flag("adam_w_mode", True) or asked == "AdamW"
    is_torch = params.flag("torch_adam")
    params.ignored("torch_adam", "torch's fused AdamW is the optimizer here")
    params.ignored("adam_w_mode", "weight decay is decoupled from the gradient, as in AdamW")
    decay = 0.01 if is_torch and is_decoupled else 0.0
    is_decayed = params.auto("weight_decay", "") or params.number("weight_decay", decay, least=0) > 0
    if not is_decoupled and is_decayed:
        params.refused("adam_w_mode", "decay inside the gradient is not AdamW; write true, or weight_decay 0")
    return decay


def _read_sgd(params: Block, settings: dict[str, Any]) -> float:
    """Return the default weight decay."""
    settings["momentum"] = params.number("momentum", 0.0, least=0)
    params.used("momentum", f"momentum {settings['momentum']:g}")
    if params.number("dampening"):
        params.refused("dampening", "the trainer's SGD has none; write 0")
    params.ignored("dampening", "none, as here")
    return 0.0


def read_schedule(top: Block, optimizer: dict[str, Any]) -> dict[str, Any]:
    """`optimizer` has the learning rate that is the peak where the schedule names none."""
    block = top.inner("scheduler")
    params = block.inner("params")
    if not block.has("type"):
        params.refused_whole("DeepSpeed makes no schedule without a type; write scheduler.type")
        return {}
    asked = block.word("type", (*SCHEDULES, *REFUSED_SCHEDULES), "")
    if asked not in SCHEDULES:
        instead = "use a scheduler of your own in your loop, or one of the trainer's (--lr-scheduler-type)"
        block.refused("type", f"{REFUSED_SCHEDULES.get(asked, 'it is unknown')}; {instead}")
        params.ignored_whole("belongs to a schedule that is refused")
        return {}
    same = "the same learning rate in every step; a skipped step counts here, and not in DeepSpeed"
    block.used("type", f"lr_scheduler_type {SCHEDULES[asked]}: {same}")
    settings: dict[str, Any] = {"lr_scheduler_type": SCHEDULES[asked]}
    _read_steps(params, settings, asked)
    if asked == "WarmupCosineLR":
        for key, setting, default in (
            ("warmup_min_ratio", "warmup_min_ratio", 0.0),
            ("cos_min_ratio", "min_lr_ratio", 1e-4),
        ):
            settings[setting] = params.number(key, default, least=0, most=1)
            params.used(key, f"{setting} {settings[setting]:g}")
    else:
        _read_rates(params, settings, optimizer.get("learning_rate") if asked == "WarmupLR" else LEARNING_RATE)
    apply_rules(params, rules("deepspeed", "scheduler.params"))
    return settings


def _read_steps(params: Block, settings: dict[str, Any], asked: str) -> None:
    settings["warmup_type"] = params.word("warmup_type", ("log", "linear"), "log")
    params.used("warmup_type", f"warmup_type {settings['warmup_type']}")
    if not params.auto("warmup_num_steps", "--warmup-steps of the trainer"):
        settings["warmup_steps"] = params.whole("warmup_num_steps", WARMUP_STEPS, least=1)
        params.used("warmup_num_steps", f"warmup_steps {settings['warmup_steps']}")
    key = "total_num_steps"
    if asked != "WarmupLR" and not params.auto(key, "all steps of the run") and params.has(key):
        settings["schedule_steps"] = params.whole(key, 1, least=1)
        params.used(key, f"schedule_steps {settings['schedule_steps']}; --max-steps is the length of the run")


def _read_rates(params: Block, settings: dict[str, Any], peak: float | None) -> None:
    """Learning rates at the begin and at the end of the warm-up; the latter replaces the optimizer's."""
    if params.auto("warmup_max_lr", "--learning-rate of the trainer"):
        peak = None
    elif params.has("warmup_max_lr"):
        peak = params.number("warmup_max_lr", least=0)
        params.used("warmup_max_lr", f"learning_rate {peak:g}")
    if peak is not None:
        settings["learning_rate"] = peak
    if params.auto("warmup_min_lr", "warmup_min_ratio 0: Hugging Face begins at 0"):
        return
    low = params.number("warmup_min_lr", 0.0, least=0)
    if low and (peak is None or low > peak):
        limit = "which is not given" if peak is None else peak
        params.refused("warmup_min_lr", f"it must be at most warmup_max_lr, {limit}")
    elif low and peak:
        settings["warmup_min_ratio"] = low / peak
    params.used("warmup_min_lr", f"warmup_min_ratio {settings.get('warmup_min_ratio', 0.0):g} of the learning rate")
