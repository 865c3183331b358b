"""Settings of the trainer in the files of Hugging Face programs: names, the schedule, the optimizer, and intervals.

Where a file has training keys, what it leaves out is what Hugging Face's Trainer does. TRL and LLaMA-Factory have
other defaults, which are not assumed.
"""

from dataclasses import fields
from typing import Any

from ..trainer.settings import Settings
from .account import Block
from .tables import table

# The Trainer's defaults, where ours are others.
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "min_lr_ratio": 0.0,
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "seed": 42,
    "eval_fraction": 0.0,
}
EPOCHS = 3.0
# A file with one of these says how to train, and not only how to shard.
TRAINING_KEYS = ("output_dir", "learning_rate", "max_steps", "num_train_epochs", "num_epochs")
# The data of a model has to be named by the user: the trainer's own default would train on something else.
YOUR_DATA = "YOUR-DATA.jsonl"
FIELDS = {entry.name: entry for entry in fields(Settings)}
# Schedules that are ours under another name. All of the Trainer's end at 0 unless they have a minimum.
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
}
OTHER_SCHEDULES = (
    "cosine_with_restarts", "polynomial", "inverse_sqrt", "reduce_lr_on_plateau", "cosine_warmup_with_min_lr", "greedy",
    "one_cycle", "rex", "log_sweep",
)  # fmt: skip
ADAMW, ADAMW_8BIT = "adamw", "adamw8bit"
PAGED, TORCHAO = "; the strategy decides where its state is", " (torchao's, in place of bitsandbytes')"
OPTIMIZERS = {
    "adamw": (ADAMW, ""),
    "adamw_hf": (ADAMW, ""),
    "adamw_torch": (ADAMW, ""),
    "adamw_torch_fused": (ADAMW, ""),
    "adamw_apex_fused": (ADAMW, ""),
    "paged_adamw": (ADAMW, PAGED),
    "paged_adamw_32bit": (ADAMW, PAGED),
    "adamw_8bit": (ADAMW_8BIT, TORCHAO),
    "adamw_bnb_8bit": (ADAMW_8BIT, TORCHAO),
    "paged_adamw_8bit": (ADAMW_8BIT, TORCHAO),
    "adamw_torch_8bit": (ADAMW_8BIT, " (torchao's)"),
    "sgd": ("sgd", " without momentum"),
}


def read_names(top: Block) -> dict[str, Any]:
    """Settings that have a key of their own."""
    settings: dict[str, Any] = {}
    for name, keys in table("hugging_face")["settings"].items():
        written = [key for key in keys if top.has(key)]
        for key in written[:1]:
            value = _value(top, key, name)
            if value is not None:
                settings[name] = value
                top.used(key, f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}")
        for key in written[1:]:
            top.refused(key, f"{written[0]} is written, too; leave one of them")
    if "model" in settings and "dataset" not in settings:
        settings["train_file"] = (YOUR_DATA,)
    settings |= _length(top)
    return DEFAULTS | settings if any(top.has(key) for key in TRAINING_KEYS) else settings


def _value(top: Block, key: str, name: str) -> Any:
    """The value with the setting's type, inside its limits; None, and refused, if it is not."""
    limits = FIELDS[name].metadata
    kind = str(FIELDS[name].type)
    least = -float("inf") if limits["least"] is None else limits["least"]
    most = 2**63 - 1 if limits["most"] is None else limits["most"]
    if "int" in kind and "str" not in kind:
        count = top.whole(key, -1, least=least, most=most)
        return None if count == -1 else count
    if "float" in kind:
        number = top.number(key, -1.0, least=least, most=most)
        if limits["below"] is not None and number >= limits["below"]:
            top.refused(key, f"it must be below {limits['below']:g}")
        return None if number < 0 else number
    top.ignored(key, "it is empty")
    return None if top.text(key).lower() in ("", "none", "null") else top.text(key)


def _length(top: Block) -> dict[str, Any]:
    """The length of the training: steps if they are above 0, else epochs."""
    steps = top.whole("max_steps", -1, least=-1)
    key = next((key for key in ("num_train_epochs", "num_epochs") if top.has(key)), "num_train_epochs")
    epochs = top.number(key, EPOCHS, least=0)
    if key == "num_train_epochs" and top.has("num_epochs"):
        top.refused("num_epochs", "num_train_epochs is written, too; leave one of them")
    if steps > 0:
        top.used("max_steps", f"max_steps {steps}")
        top.ignored(key, "max_steps decides when to stop")
        return {"max_steps": steps}
    top.ignored("max_steps", "epochs decide when to stop")
    if epochs == 0:
        top.refused(key, "it trains on nothing; it must be above 0")
    top.used(key, f"num_train_epochs {epochs:g}")
    is_written = top.has(key) or any(top.has(name) for name in TRAINING_KEYS)
    return {"num_train_epochs": epochs} if is_written and epochs else {}


def read_schedule(top: Block, settings: dict[str, Any]) -> None:
    """Add the schedule to the settings."""
    key = "lr_scheduler" if top.has("lr_scheduler") and not top.has("lr_scheduler_type") else "lr_scheduler_type"
    if key == "lr_scheduler_type":
        top.ignored("lr_scheduler", "lr_scheduler_type decides it")
    word = top.word(key, (*SCHEDULES, *OTHER_SCHEDULES), "linear")
    if word in OTHER_SCHEDULES:
        top.refused(key, f"there is no such schedule here; take one of {', '.join(SCHEDULES)}")
        word = "linear"
    if top.has(key):
        settings |= {"lr_scheduler_type": SCHEDULES[word], "min_lr_ratio": 0.0}
    end = "" if word.startswith("constant") or "min_lr" in word else ", down to 0"
    top.used(key, f"lr_scheduler_type {SCHEDULES[word]}{end}")
    _schedule_arguments(top, word, settings)
    _warmup(top, word, settings)


def _schedule_arguments(top: Block, word: str, settings: dict[str, Any]) -> None:
    block = top.inner("lr_scheduler_kwargs")
    least = top.number("cosine_min_lr_ratio", 0.0, least=0, most=1)
    if top.has("cosine_min_lr_ratio"):
        settings["min_lr_ratio"] = least
    top.used("cosine_min_lr_ratio", f"min_lr_ratio {least:g}")
    if word == "cosine_with_min_lr":
        ratio = block.number("min_lr_rate", 0.0, least=0, most=1)
        if block.has("min_lr"):
            rate = settings.get("learning_rate") or 0.0
            ratio = block.number("min_lr", 0.0, least=0, most=max(rate, 0.0)) / rate if rate else 0.0
        settings["min_lr_ratio"] = min(ratio, 1.0)
        for key in ("min_lr", "min_lr_rate"):
            block.used(key, f"min_lr_ratio {ratio:g}")
    elif word == "warmup_stable_decay":
        _stable_arguments(top, block, settings)


def _stable_arguments(top: Block, block: Block, settings: dict[str, Any]) -> None:
    """Warm-up, constant, then decay, which is linear here."""
    steps = block.whole("num_decay_steps", 0, least=1)
    if steps:
        settings["decay_steps"] = steps
    block.used("num_decay_steps", f"decay_steps {steps}")
    settings["min_lr_ratio"] = block.number("min_lr_ratio", 0.0, least=0, most=1)
    block.used("min_lr_ratio", f"min_lr_ratio {settings['min_lr_ratio']:g}")
    if block.word("decay_type", ("linear", "cosine", "1-sqrt"), "cosine") != "linear":
        block.refused("decay_type", "the decay is linear here; write linear")
        if not block.has("decay_type"):
            fix = "write lr_scheduler_kwargs: decay_type: linear"
            top.refused("lr_scheduler_type", f"the decay is linear here; {fix}")
    block.used("decay_type", "linear")
    block.word("warmup_type", ("linear",), "linear")
    block.used("warmup_type", "linear")


def _warmup(top: Block, word: str, settings: dict[str, Any]) -> None:
    """A number of steps; below 1 it is a fraction of all steps."""
    for key, most in (("warmup_ratio", 1.0), ("warmup_steps", 2.0**53)):
        asked = top.number(key, 0.0, least=0, most=most)
        if not top.has(key):
            continue
        is_fraction = 0 < asked < 1 or (key == "warmup_ratio" and asked > 0)
        if word == "constant":
            top.ignored(key, "constant has no warm-up; constant_with_warmup has one")
        elif is_fraction and asked == 1:
            top.refused(key, "nothing is left after a warm-up of all steps; write a fraction below 1")
        elif not is_fraction and asked != int(asked):
            top.refused(key, "it is not a whole number of steps")
        elif key == "warmup_ratio" and settings.get("warmup_steps"):
            top.ignored(key, "warmup_steps decides it")
        else:
            settings["warmup_steps"] = asked or settings.get("warmup_steps", 0)
            top.used(key, f"warmup_steps {asked:g}{' of all steps' if is_fraction else ''}")


def read_optimizer(top: Block, settings: dict[str, Any]) -> None:
    key = "optimizer" if top.has("optimizer") and not top.has("optim") else "optim"
    if key == "optim":
        top.ignored("optimizer", "optim decides it")
    word = top.text(key).lower()
    if not word:
        top.ignored(key, "it is empty")
    elif word not in OPTIMIZERS:
        top.refused(key, f"there is no such optimizer here; take one of {', '.join(OPTIMIZERS)}")
    else:
        settings["optimizer"], note = OPTIMIZERS[word]
        if settings["optimizer"] == "sgd":
            settings["momentum"] = 0.0
        top.used(key, f"optimizer {settings['optimizer']}{note}")


def read_intervals(top: Block, settings: dict[str, Any]) -> None:
    """Add when to evaluate and when to save."""
    strategy = "evaluation_strategy" if top.has("evaluation_strategy") else "eval_strategy"
    if strategy == "evaluation_strategy":
        top.refused("eval_strategy", "evaluation_strategy is written, too; leave one of them")
    _interval(top, settings, strategy, "eval_steps", "evals_per_epoch")
    is_evaluated = top.text(strategy, "no").lower() != "no" or top.has("eval_steps")
    if is_evaluated and not any(top.has(key) for key in ("val_size", "val_set_size")):
        settings.pop("eval_fraction", None)  # the trainer's own default keeps some of the data for it
    _interval(top, settings, "save_strategy", "save_steps", "saves_per_epoch")


def _interval(top: Block, settings: dict[str, Any], strategy: str, key: str, per_epoch: str) -> None:
    """Steps, a fraction of all steps, or N times per epoch (Axolotl's key), which is a fraction of all steps."""
    default = "steps" if key == "save_steps" or top.has(key) else "no"
    when = top.word(strategy, ("no", "steps", "epoch", "best"), default)
    if when == "best":
        top.refused(strategy, "no checkpoint is better than another here; write steps, epoch or no")
    elif when == "epoch":
        _times_per_epoch(top, settings, strategy, key, 1.0)
    else:
        top.used(strategy, f"every {key} steps" if when == "steps" else "at the end only")
    if top.has(per_epoch):
        for other in (strategy, key) if when != "steps" else (key,):
            top.refused(other, f"{per_epoch} is written, too; leave one of them")
        _times_per_epoch(top, settings, per_epoch, key, top.number(per_epoch, 0.0, least=0))
        return
    if not top.has(key):
        return
    steps = top.number(key, 0.0, least=0, most=2.0**53)
    is_fraction = 0 < steps < 1
    if when != "steps":
        top.ignored(key, f"{strategy} {when} does not read it")
    elif not is_fraction and steps != int(steps):
        top.refused(key, "it is not a whole number of steps")
    else:
        settings[key] = steps if is_fraction else int(steps)
        top.used(key, f"{key} {steps:g}{' of all steps' if is_fraction else ''}")


def _times_per_epoch(top: Block, settings: dict[str, Any], written: str, key: str, times: float) -> None:
    """With the number of epochs, N times per epoch is a fraction of all steps."""
    num_times = times * settings.get("num_train_epochs", 0.0)
    if "num_train_epochs" not in settings and times:
        why = "the steps of an epoch are unknown without a number of epochs (max_steps replaces it)"
        top.refused(written, f"{why}; write {key}, in steps")
    elif num_times <= 1:
        top.used(written, "at the end only")
    else:
        settings[key] = 1 / num_times
        top.used(written, f"{key} {settings[key]:g} of all steps, {times:g} times in each epoch")
