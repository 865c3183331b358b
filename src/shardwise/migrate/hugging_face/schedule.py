"""The learning rate over a run, the optimizer, and when something is evaluated, saved or logged."""

from typing import Any

from ..account import Block

# Schedules that are ours under another name. All of the Trainer's end at 0 unless they say where.
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
ADAMW = "adamw"
OPTIMIZERS = {
    "adamw": (ADAMW, ""),
    "adamw_hf": (ADAMW, ""),
    "adamw_torch": (ADAMW, ""),
    "adamw_torch_fused": (ADAMW, ""),
    "adamw_apex_fused": (ADAMW, ""),
    "paged_adamw": (ADAMW, "; its state rests where the strategy says"),
    "paged_adamw_32bit": (ADAMW, "; its state rests where the strategy says"),
    "adamw_8bit": ("adamw8bit", " (torchao's, in place of bitsandbytes')"),
    "adamw_bnb_8bit": ("adamw8bit", " (torchao's, in place of bitsandbytes')"),
    "paged_adamw_8bit": ("adamw8bit", " (torchao's, in place of bitsandbytes')"),
    "adamw_torch_8bit": ("adamw8bit", " (torchao's)"),
    "sgd": ("sgd", " without momentum"),
}


def read_schedule(top: Block, settings: dict[str, Any]) -> None:
    """Adds to what the names have made of the file."""
    key = "lr_scheduler" if top.has("lr_scheduler") and not top.has("lr_scheduler_type") else "lr_scheduler_type"
    if key == "lr_scheduler_type":
        top.ignored("lr_scheduler", "lr_scheduler_type says it")
    word = top.word(key, (*SCHEDULES, *OTHER_SCHEDULES), "linear")
    if word in OTHER_SCHEDULES:
        top.refused(key, f"there is no such schedule here; take one of {', '.join(SCHEDULES)}")
        word = "linear"
    if top.has(key):
        settings |= {"lr_scheduler_type": SCHEDULES[word], "min_lr_ratio": 0.0}
    end = "" if word.startswith("constant") or "min_lr" in word else ", down to 0"
    top.used(key, f"lr_scheduler_type {SCHEDULES[word]}{end}")
    _schedule_words(top, word, settings)
    _warmup(top, word, settings)


def _schedule_words(top: Block, word: str, settings: dict[str, Any]) -> None:
    words = top.inner("lr_scheduler_kwargs")
    least = top.number("cosine_min_lr_ratio", 0.0, least=0, most=1)
    if top.has("cosine_min_lr_ratio"):
        settings["min_lr_ratio"] = least
    top.used("cosine_min_lr_ratio", f"min_lr_ratio {least:g}")
    if word == "cosine_with_min_lr":
        ratio = words.number("min_lr_rate", 0.0, least=0, most=1)
        if words.has("min_lr"):
            rate = settings.get("learning_rate") or 0.0
            ratio = words.number("min_lr", 0.0, least=0, most=max(rate, 0.0)) / rate if rate else 0.0
        settings["min_lr_ratio"] = min(ratio, 1.0)
        for key in ("min_lr", "min_lr_rate"):
            words.used(key, f"min_lr_ratio {ratio:g}")
    elif word == "warmup_stable_decay":
        _stable_words(top, words, settings)


def _stable_words(top: Block, words: Block, settings: dict[str, Any]) -> None:
    """Warm-up, a stretch that is constant, and down again: here in a line."""
    steps = words.whole("num_decay_steps", 0, least=1)
    if steps:
        settings["decay_steps"] = steps
    words.used("num_decay_steps", f"decay_steps {steps}")
    settings["min_lr_ratio"] = words.number("min_lr_ratio", 0.0, least=0, most=1)
    words.used("min_lr_ratio", f"min_lr_ratio {settings['min_lr_ratio']:g}")
    if words.word("decay_type", ("linear", "cosine", "1-sqrt"), "cosine") != "linear":
        words.refused("decay_type", "it goes down in a line here; write linear")
        if not words.has("decay_type"):
            top.refused("lr_scheduler_type", "it goes down in a line here; say so with lr_scheduler_kwargs: decay_type")
    words.used("decay_type", "down in a line")
    words.word("warmup_type", ("linear",), "linear")
    words.used("warmup_type", "up in a line")


def _warmup(top: Block, word: str, settings: dict[str, Any]) -> None:
    """A number of steps; below 1 it is a part of all steps."""
    for key, most in (("warmup_ratio", 1.0), ("warmup_steps", 2.0**53)):
        asked = top.number(key, 0.0, least=0, most=most)
        if not top.has(key):
            continue
        is_part = 0 < asked < 1 or (key == "warmup_ratio" and asked > 0)
        if word == "constant":
            top.ignored(key, "constant has no warm-up; constant_with_warmup has one")
        elif is_part and asked == 1:
            top.refused(key, "nothing is left after a warm-up of all steps; write a part below 1")
        elif not is_part and asked != int(asked):
            top.refused(key, "it is not a whole number of steps")
        elif key == "warmup_ratio" and settings.get("warmup_steps"):
            top.ignored(key, "warmup_steps says it")
        else:
            settings["warmup_steps"] = asked or settings.get("warmup_steps", 0)
            top.used(key, f"warmup_steps {asked:g}{': that part of all steps' if is_part else ''}")


def read_optimizer(top: Block, settings: dict[str, Any]) -> None:
    key = "optimizer" if top.has("optimizer") and not top.has("optim") else "optim"
    if key == "optim":
        top.ignored("optimizer", "optim says it")
    word = top.text(key).lower()
    if not word:
        top.ignored(key, "nothing is said")
    elif word not in OPTIMIZERS:
        top.refused(key, f"there is no such optimizer here; take one of {', '.join(OPTIMIZERS)}")
    else:
        settings["optimizer"], more = OPTIMIZERS[word]
        if settings["optimizer"] == "sgd":
            settings["momentum"] = 0.0
        top.used(key, f"optimizer {settings['optimizer']}{more}")


def read_intervals(top: Block, settings: dict[str, Any]) -> None:
    """Of evaluations and saves."""
    strategy = "evaluation_strategy" if top.has("evaluation_strategy") else "eval_strategy"
    if strategy == "evaluation_strategy":
        top.refused("eval_strategy", "evaluation_strategy says it, too; leave one of them")
    _every(top, settings, strategy, "eval_steps", "evals_per_epoch", "evaluated")
    is_evaluated = top.text(strategy, "no").lower() != "no" or top.has("eval_steps")
    if is_evaluated and not any(top.has(key) for key in ("val_size", "val_set_size")):
        settings.pop("eval_fraction", None)  # some part of the data is kept for it
    _every(top, settings, "save_strategy", "save_steps", "saves_per_epoch", "saved")
    top.word("logging_strategy", ("no", "steps", "epoch"), "steps")
    top.ignored("logging_strategy", "a line is written every logging_steps steps")


def _every(top: Block, settings: dict[str, Any], strategy: str, key: str, per_epoch: str, what: str) -> None:
    """In steps, in parts of all steps, or so many times in an epoch (Axolotl's key), which is a part of all steps."""
    default = "steps" if key == "save_steps" else "no"
    when = top.word(strategy, ("no", "steps", "epoch", "best"), "steps" if top.has(key) else default)
    if when == "best":
        top.refused(strategy, "no checkpoint is better than another here; write steps, epoch or no")
    elif when == "epoch":
        _in_epochs(top, settings, strategy, key, 1.0, what)
    else:
        top.used(strategy, f"{what} every {key} steps" if when == "steps" else f"{what} at the end only")
    if top.has(per_epoch):
        for other in (strategy, key) if when != "steps" else (key,):
            top.refused(other, f"{per_epoch} says it, too; leave one of them")
        _in_epochs(top, settings, per_epoch, key, top.number(per_epoch, 0.0, least=0), what)
        return
    if not top.has(key):
        return
    steps = top.number(key, 0.0, least=0, most=2.0**53)
    if when != "steps":
        top.ignored(key, f"{strategy} {when} does not read it")
    elif steps >= 1 and steps != int(steps):
        top.refused(key, "it is not a whole number of steps")
    else:
        settings[key] = steps if 0 < steps < 1 else int(steps)
        top.used(key, f"{key} {steps:g}{': that part of all steps' if 0 < steps < 1 else ''}")


def _in_epochs(top: Block, settings: dict[str, Any], said: str, key: str, times: float, what: str) -> None:
    """So many times in an epoch: with all epochs known that is a part of all steps."""
    num_times = times * settings.get("num_train_epochs", 0.0)
    if "num_train_epochs" not in settings and times:
        top.refused(
            said,
            f"without a number of epochs that counts (max_steps goes before it) nobody knows how many "
            f"steps an epoch has; write {key}, in steps",
        )
    elif num_times <= 1:
        top.used(said, f"{what} at the end only")
    else:
        settings[key] = 1 / num_times
        top.used(said, f"{key} {settings[key]:g}: that part of all steps, {times:g} times in each epoch")
