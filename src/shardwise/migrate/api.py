"""`sw.from_deepspeed` and `sw.from_accelerate`: read a configuration file, or a mapping with the same keys.

One error names every key that is refused.
"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..base.documents import Tree, texts_of
from ..base.errors import ConfigurationError, did_you_mean
from .accelerate import read_accelerate
from .account import Account
from .deepspeed import read_deepspeed
from .files import tree_of
from .hugging_face import read_hugging_face
from .migrated import TITLES, Kind, Migrated

Source = str | os.PathLike[str] | Mapping[str, Any]

READERS = {
    "deepspeed": lambda top, folder: read_deepspeed(top),
    "accelerate": read_accelerate,
    "hugging-face": read_hugging_face,
}
MIN_CLEAR = 3  # typical keys that make a file's kind clear
# Keys at the top that only one kind of file has.
TYPICAL: dict[Kind, set[str]] = {
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
        "model_name_or_path", "base_model", "deepspeed", "micro_batch_size", "num_epochs", "sequence_len", "cutoff_len",
        "finetuning_type", "save_strategy", "eval_strategy", "warmup_ratio", "lr_scheduler_type", "optim", "bf16",
        "fp16",
        # A file with `fsdp_config` alone.
        "reshard_after_forward", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "cpu_offload", "min_num_params",
        "state_dict_type", "backward_prefetch", "activation_checkpointing", "cpu_ram_efficient_loading",
    },
}  # fmt: skip
# These are mappings in DeepSpeed's files, and single values in others.
BLOCKS = {"fp16", "bf16", "optimizer", "scheduler"}
# Programs on top of Hugging Face's Trainer, and keys that only they have.
PROGRAMS = {
    "Axolotl": {"base_model", "sequence_len", "micro_batch_size", "num_epochs"},
    "LLaMA-Factory": {"finetuning_type", "cutoff_len"},
}


def from_deepspeed(source: Source) -> Migrated:
    """Read a DeepSpeed configuration (a file, or the mapping itself), for `sw.shard` and the trainer.

    migrated = sw.from_deepspeed("ds.json")
    model, optimizer = sw.shard(model, optimizer, **migrated.words)
    """
    return _accepted(source, "deepspeed")


def from_accelerate(source: Source) -> Migrated:
    """Read an Accelerate configuration (`accelerate config` writes one)."""
    return _accepted(source, "accelerate")


def read(source: Source, kind: Kind | None = None) -> Migrated:
    """Read a configuration without raising for refused keys. `kind` follows from the keys unless it is given."""
    if not isinstance(source, Mapping | str | os.PathLike):
        raise ConfigurationError(f"a configuration is a file or a mapping, not {type(source).__name__} {source!r}")
    name = "the configuration" if isinstance(source, Mapping) else os.fspath(source)
    try:
        tree = texts_of(dict(source)) if isinstance(source, Mapping) else tree_of(Path(name))
    except RecursionError:
        raise ConfigurationError(f"{name} is nested too deep") from None
    if not isinstance(tree, dict):
        raise ConfigurationError(f"{name} is not a mapping of keys to values")
    folder = Path() if isinstance(source, Mapping) else Path(name).parent
    chosen = kind or kind_of(tree, name)
    if kind is not None and not _typical(tree, kind):
        _refuse_another_kind(tree, name, kind)
    account = Account(name)
    settings, original = READERS[chosen](account.block("", tree), folder)
    return Migrated(name, chosen, settings, original, account.entries)


def kind_of(tree: Mapping[str, Tree], name: str) -> Kind:
    """The kind that has most of the keys at the top; an error if two kinds have equally many."""
    shared = {kind: len(_typical(tree, kind)) for kind in TYPICAL}
    best = max(shared.values())
    found = [kind for kind, count in shared.items() if count == best]
    if best == 0 or len(found) > 1:
        keys = ", ".join(list(tree)[:5]) or "none"
        raise ConfigurationError(
            f"{name} is neither clearly a DeepSpeed nor an Accelerate nor a Hugging Face configuration (its keys: "
            f"{keys}); name it with --kind {', '.join(TYPICAL)}"
        )
    return found[0]


def refuse_as_ours(path: Path, own: Collection[str]) -> None:
    """Refuse another library's file where one of ours is expected: it has typical keys of that library."""
    try:
        tree = tree_of(path)
    except ConfigurationError:
        return
    keys = {} if not isinstance(tree, dict) else {key: value for key, value in tree.items() if key not in own}
    kind = max(TYPICAL, key=lambda each: len(_typical(keys, each)))
    marks = [key for key in keys if key in _typical(keys, kind)]
    if not marks:
        return
    owner = next(
        (name for name, words in PROGRAMS.items() if kind == "hugging-face" and words & set(tree)), TITLES[kind]
    )
    also = {"deepspeed": "; or pass it with --deepspeed", "accelerate": "; or pass it with --accelerate-config"}
    raise ConfigurationError(
        f"{path} is a configuration of {owner} ({', '.join(marks[:3])}), not of shardwise: run "
        f"`shardwise convert {path} -o run.yaml` first, and train with run.yaml{also.get(kind, '')}"
    )


def _typical(tree: Mapping[str, Tree], kind: Kind) -> set[str]:
    """Keys of the tree that only this kind of file has."""
    is_block = kind == "deepspeed"
    written = {key for key in TYPICAL[kind] & set(tree) if tree[key] is not None}
    return {key for key in written if key not in BLOCKS or isinstance(tree[key], dict) == is_block}


def _refuse_another_kind(tree: Mapping[str, Tree], name: str, asked: Kind) -> None:
    found = max(TYPICAL, key=lambda kind: len(_typical(tree, kind)))
    if found != asked and len(_typical(tree, found)) >= MIN_CLEAR:
        raise ConfigurationError(f"{name} is a configuration of {TITLES[found]}, and not of {TITLES[asked]}")


def known_kind(word: str) -> Kind:
    """The kind for a word of the command line."""
    for kind in TYPICAL:
        if word.lower().replace("_", "-") == kind:
            return kind
    raise ConfigurationError(f"--kind: unknown {word!r}; {did_you_mean(word, TYPICAL)}")


def _accepted(source: Source, kind: Kind) -> Migrated:
    migrated = read(source, kind)
    migrated.require_accepted()
    return migrated
