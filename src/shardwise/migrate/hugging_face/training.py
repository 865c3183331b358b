"""Names of TrainingArguments, TRL, LLaMA-Factory and Axolotl that are settings of our trainer under the same or another
name, and what the Trainer does where a file says nothing."""

from dataclasses import fields
from typing import Any

from ...trainer.settings import Settings
from ..account import Block

# Our setting, and who else calls it what; the first that is written counts.
NAMES: dict[str, tuple[str, ...]] = {
    "model": ("model_name_or_path", "base_model"),
    "tokenizer": ("tokenizer_name_or_path", "tokenizer_name", "tokenizer_config"),
    "dataset": ("dataset_name",),
    "dataset_split": ("dataset_train_split",),
    "seq_length": ("max_length", "max_seq_length", "sequence_len", "cutoff_len"),
    "per_device_train_batch_size": ("per_device_train_batch_size", "micro_batch_size"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "per_device_eval_batch_size": ("per_device_eval_batch_size", "eval_batch_size"),
    "learning_rate": ("learning_rate",),
    "weight_decay": ("weight_decay",),
    "adam_beta1": ("adam_beta1",),
    "adam_beta2": ("adam_beta2",),
    "adam_epsilon": ("adam_epsilon",),
    "max_grad_norm": ("max_grad_norm",),
    "seed": ("seed",),
    "output_dir": ("output_dir",),
    "save_total_limit": ("save_total_limit",),
    "logging_steps": ("logging_steps",),
    "timeout": ("ddp_timeout",),
    "eval_fraction": ("val_size", "val_set_size"),
}
# What a Trainer does unless it is told, where ours would do otherwise. TRL and LLaMA-Factory have other defaults, which
# are not assumed.
UNSAID: dict[str, Any] = {
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
# Whoever says one of these says how to train, and not only how to shard.
TELLS_OF_TRAINING = ("output_dir", "learning_rate", "max_steps", "num_train_epochs", "num_epochs")
EPOCHS = 3.0
# Data that is said where it is not read here has to be named: nobody shall train a model on Python's manual instead.
YOUR_DATA = "YOUR-DATA.jsonl"
FIELDS = {entry.name: entry for entry in fields(Settings)}


def read_names(top: Block) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, keys in NAMES.items():
        written = [key for key in keys if top.has(key)]
        for key in written[:1]:
            value = _value(top, key, name)
            if value is not None:
                settings[name] = value
                top.used(key, f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}")
        for key in written[1:]:
            top.refused(key, f"{written[0]} says it, too; leave one of them")
    if "model" in settings and "dataset" not in settings:
        settings["train_file"] = (YOUR_DATA,)
    settings |= _length(top)
    if any(top.has(key) for key in TELLS_OF_TRAINING):
        settings = UNSAID | settings
    return settings


def _value(top: Block, key: str, name: str) -> Any:
    """As the setting's type, inside its limits; None, and refused, where it is neither."""
    limits = FIELDS[name].metadata
    kind = str(FIELDS[name].type)
    least = -float("inf") if limits["least"] is None else limits["least"]
    most = 2**63 - 1 if limits["most"] is None else limits["most"]
    if "int" in kind and "str" not in kind:
        found: Any = top.whole(key, -1, least=least, most=most)
        return None if found == -1 else found
    if "float" in kind:
        found = top.number(key, -1.0, least=least, most=most)
        if limits["below"] is not None and found >= limits["below"]:
            top.refused(key, f"it must be below {limits['below']:g}")
        return None if found < 0 else found
    top.ignored(key, "nothing is said")
    return None if top.text(key).lower() in ("", "none", "null") else top.text(key)


def _length(top: Block) -> dict[str, Any]:
    """How long to train: steps, where they are above 0, else epochs."""
    steps = top.whole("max_steps", -1, least=-1)
    written = next((key for key in ("num_train_epochs", "num_epochs") if top.has(key)), "num_train_epochs")
    epochs = top.number(written, EPOCHS, least=0)
    if written == "num_train_epochs" and top.has("num_epochs"):
        top.refused("num_epochs", "num_train_epochs says it, too; leave one of them")
    if steps > 0:
        top.used("max_steps", f"max_steps {steps}")
        top.ignored(written, "max_steps says when to stop")
        return {"max_steps": steps}
    top.ignored("max_steps", "epochs say when to stop")
    if epochs == 0:
        top.refused(written, "it trains on nothing; it must be above 0")
    top.used(written, f"num_train_epochs {epochs:g}")
    is_said = top.has(written) or any(top.has(key) for key in TELLS_OF_TRAINING)
    return {"num_train_epochs": epochs} if is_said and epochs else {}
