"""What `accelerate launch` says to the ranks that it starts: its configuration again, in environment variables.

They are turned back into the file that they came from, and that is read as any other; what becomes of a key is told
under the variable's name. The launcher also writes its defaults: where one of them contradicts something that only a
user can have said, it is left aside.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ...base.documents import Tree
from ...core.layout import AUTO
from ..account import FALSE, TRUE, Account, Entry, shown
from ..migrated import Migrated
from .fsdp import FULL, strategy_name
from .fsdp_keys import KNOWN as FSDP_KEYS
from .reader import read_accelerate

SOURCE = "the environment of accelerate launch"
# What shards, by the variable that turns it on.
KINDS = {
    "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "MEGATRON_LM",
}
# Variables whose keys have another name, and where their keys stand.
NAMED: dict[str, tuple[str, ...]] = {
    "ACCELERATE_MIXED_PRECISION": ("mixed_precision",),
    "ACCELERATE_USE_CPU": ("use_cpu",),
    "ACCELERATE_DEBUG_MODE": ("debug",),
    "ACCELERATE_CPU_AFFINITY": ("enable_cpu_affinity",),
    "ACCELERATE_DOWNCAST_BF16": ("downcast_bf16",),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("deepspeed_config", "gradient_accumulation_steps"),
    "ACCELERATE_GRADIENT_CLIPPING": ("deepspeed_config", "gradient_clipping"),
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": ("deepspeed_config", "zero3_init_flag"),
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": ("deepspeed_config", "deepspeed_config_file"),
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": ("deepspeed_config", "deepspeed_moe_layer_cls_names"),
}
# Others: what they begin with, the block that their keys stand in, and what these begin with.
PREFIXES = (
    ("FSDP_", "fsdp_config", "fsdp_"),
    ("PARALLELISM_CONFIG_", "parallelism_config", "parallelism_config_"),
    ("ACCELERATE_DEEPSPEED_", "deepspeed_config", ""),
    ("ACCELERATE_DYNAMO_", "dynamo_config", "dynamo_"),
    ("ACCELERATE_FP8_", "fp8_config", ""),
    ("MEGATRON_LM_", "megatron_lm_config", ""),
)
RESHARD, STRATEGY, PRECISION = "FSDP_RESHARD_AFTER_FORWARD", "FSDP_SHARDING_STRATEGY", "ACCELERATE_MIXED_PRECISION"


def read_environment(environ: Mapping[str, str]) -> Migrated | None:
    """What became of every variable; None where they say nothing about sharding and precision.

    A launch without a plugin is one of plain ranks, which the trainer shards as it likes.
    """
    switch = next((name for name in KINDS if environ.get(name, "").lower() in TRUE), None)
    if switch is None:
        return _plain_ranks(environ)
    unread = _unread(environ)
    tree: dict[str, Tree] = {"distributed_type": KINDS[switch]}
    names = {"distributed_type": switch}
    for name, value in environ.items():
        place = _place(name)
        if place is None or name in unread:
            continue
        names[".".join(place)] = name
        inner = tree if len(place) == 1 else tree.setdefault(place[0], {})
        inner[place[-1]] = value
    account = Account(SOURCE)
    settings, original = read_accelerate(account.block("", tree), Path())
    told = [row for entry in account.entries for row in _rows(entry, names, environ)]
    told += [Entry(name, environ[name], "ignored", why) for name, why in unread.items()]
    return Migrated(SOURCE, "accelerate", settings, original, tuple(told))


def _plain_ranks(environ: Mapping[str, str]) -> Migrated | None:
    word = environ.get(PRECISION, "no")
    if word.lower() == "no":
        return None
    account = Account(SOURCE)
    settings, original = read_accelerate(
        account.block("", {"distributed_type": "MULTI_GPU", "mixed_precision": word}), Path()
    )
    told = [replace(entry, key=PRECISION) for entry in account.entries if entry.key == "mixed_precision"]
    return Migrated(SOURCE, "accelerate", settings | {"strategy": AUTO}, original, tuple(told))


def _place(name: str) -> tuple[str, ...] | None:
    """Where a variable's key stands in Accelerate's file; None if it is not the launcher's."""
    if name in NAMED:
        return NAMED[name]
    for prefix, block, beginning in PREFIXES:
        if name.startswith(prefix):
            key = beginning + name.removeprefix(prefix).lower()
            return None if block == "fsdp_config" and key not in FSDP_KEYS else (block, key)
    return None


def _unread(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that are left aside, and why."""
    found = {
        name: "it says nothing about sharding"
        for name in environ
        if name.startswith(("ACCELERATE_", "FSDP_")) and _place(name) is None and name not in KINDS
    }
    found |= {name: "it is off" for name in KINDS if name in environ and environ[name].lower() not in TRUE}
    found |= {name: "nothing is said" for name in environ if _place(name) and environ[name] in ("", "None")}
    reshard, strategy = environ.get(RESHARD, "").lower(), strategy_name(environ.get(STRATEGY, ""))
    if environ.get("FSDP_VERSION", "1") == "1" and reshard in TRUE + FALSE:
        found[RESHARD] = f"version 1 reads {STRATEGY}"
    elif strategy == FULL and reshard:
        found[STRATEGY] = f"{RESHARD} says it, and this is the launcher's default"
    elif strategy and reshard in TRUE:
        found[RESHARD] = f"{STRATEGY} says it, and this is the launcher's default"
    if environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE") and environ.get(PRECISION, "").lower() == "no":
        found[PRECISION] = "DeepSpeed's file says it, and this is the launcher's default"
    return found


def _rows(entry: Entry, names: Mapping[str, str], environ: Mapping[str, str]) -> list[Entry]:
    """For the variable that a key was, or that named the file it stands in; for all of a block that is told as one."""
    found = []
    for path, name in names.items():
        if entry.key == path or path.startswith(f"{entry.key}."):
            found.append(replace(entry, key=name, value=shown(environ[name])))
        elif entry.key.startswith(f"{path}."):
            found.append(replace(entry, key=name + entry.key.removeprefix(path)))
    return found
