"""`sw.from_deepspeed` and `sw.from_accelerate`: a file, or a mapping of the same, as a strategy and a precision.

Whatever is wrong with it is one error that names every key that is refused.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..documents import Tree, texts_of
from ..errors import ConfigurationError, did_you_mean
from .accelerate.reader import read_accelerate
from .account import Account
from .deepspeed.reader import read_deepspeed
from .files import tree_of
from .hugging_face.reader import read_hugging_face
from .migrated import TITLES, Kind, Migrated

Source = str | os.PathLike[str] | Mapping[str, Any]

READERS = {
    "deepspeed": lambda top, folder: read_deepspeed(top),
    "accelerate": read_accelerate,
    "hugging-face": read_hugging_face,
}
CLEARLY = 3  # keys that tell
# Keys at the top that only one kind of file has.
TELLING: dict[Kind, set[str]] = {
    "deepspeed": {
        "zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "fp16", "bf16", "optimizer",
        "scheduler", "gradient_clipping", "steps_per_print", "zero_allow_untested_optimizer",
    },
    "accelerate": {
        "distributed_type", "compute_environment", "num_machines", "num_processes", "machine_rank",
        "main_training_function", "deepspeed_config", "parallelism_config",
    },
    "hugging-face": {
        "fsdp", "output_dir", "per_device_train_batch_size", "learning_rate", "num_train_epochs", "max_steps",
        "model_name_or_path", "base_model", "deepspeed", "micro_batch_size",
        # `fsdp_config` alone.
        "reshard_after_forward", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "cpu_offload", "min_num_params",
        "state_dict_type", "backward_prefetch", "activation_checkpointing", "cpu_ram_efficient_loading",
    },
}  # fmt: skip


def from_deepspeed(source: Source) -> Migrated:
    """What a DeepSpeed configuration (a file, or the mapping itself) asks for, for `sw.shard` and the trainer.

    migrated = sw.from_deepspeed("ds.json")
    model, optimizer = sw.shard(model, optimizer, **migrated.words)
    """
    return _accepted(source, "deepspeed")


def from_accelerate(source: Source) -> Migrated:
    """The same of an Accelerate configuration (`accelerate config` writes one)."""
    return _accepted(source, "accelerate")


def read(source: Source, kind: Kind | None = None) -> Migrated:
    """What became of every key, refused ones and all. `kind` is found out unless it is given."""
    if not isinstance(source, Mapping | str | os.PathLike):
        raise ConfigurationError(f"a configuration is a file or a mapping, not {type(source).__name__} {source!r}")
    name = "the configuration" if isinstance(source, Mapping) else os.fspath(source)
    try:
        tree = texts_of(dict(source)) if isinstance(source, Mapping) else tree_of(Path(name))
    except RecursionError:
        raise ConfigurationError(f"{name} is nested too deep") from None
    if not isinstance(tree, dict):
        raise ConfigurationError(f"{name} holds no mapping of keys to values")
    folder = Path() if isinstance(source, Mapping) else Path(name).parent
    chosen = kind or kind_of(tree, name)
    if kind is not None and not TELLING[kind] & set(tree):
        _refuse_another_kind(tree, name, kind)
    account = Account(name)
    settings, original = READERS[chosen](account.block("", tree), folder)
    return Migrated(name, chosen, settings, original, account.entries)


def kind_of(tree: Mapping[str, Tree], name: str) -> Kind:
    """By the keys at its top; who shares as many with another is asked to say it."""
    shared = {kind: len(keys & set(tree)) for kind, keys in TELLING.items()}
    best = max(shared.values())
    found = [kind for kind, count in shared.items() if count == best]
    if best == 0 or len(found) > 1:
        keys = ", ".join(list(tree)[:5]) or "none"
        raise ConfigurationError(
            f"{name} is neither clearly a DeepSpeed nor an Accelerate nor a Hugging Face configuration (its keys: "
            f"{keys}); say it with --kind {', '.join(TELLING)}"
        )
    return found[0]


def _refuse_another_kind(tree: Mapping[str, Tree], name: str, asked: Kind) -> None:
    found = max(TELLING, key=lambda kind: len(TELLING[kind] & set(tree)))
    if found != asked and len(TELLING[found] & set(tree)) >= CLEARLY:
        raise ConfigurationError(f"{name} is a configuration of {TITLES[found]}, and not of {TITLES[asked]}")


def known_kind(word: str) -> Kind:
    for kind in TELLING:
        if word.lower().replace("_", "-") == kind:
            return kind
    raise ConfigurationError(f"--kind: unknown {word!r}; {did_you_mean(word, TELLING)}")


def _accepted(source: Source, kind: Kind) -> Migrated:
    migrated = read(source, kind)
    migrated.require_accepted()
    return migrated
