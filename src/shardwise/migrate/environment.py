"""The environment variables that `accelerate launch` sets for its ranks: its configuration once more.

They are turned back into the file that they came from, which is read like any other; entries have the variables'
names. The launcher also sets its defaults: a default that contradicts what only a user can have set is ignored.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..base.documents import Tree
from ..core.layout import AUTO
from .accelerate import read_accelerate
from .account import FALSE, TRUE, Account, Entry, shown
from .fsdp import FULL, known_keys
from .migrated import Migrated
from .strategies import strategy_name
from .tables import table

SOURCE = "the environment of accelerate launch"
# The variable that turns a kind of sharding on.
KINDS = {
    "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "MEGATRON_LM",
}
RESHARD, STRATEGY, PRECISION = "FSDP_RESHARD_AFTER_FORWARD", "FSDP_SHARDING_STRATEGY", "ACCELERATE_MIXED_PRECISION"


def read_environment(environ: Mapping[str, str]) -> Migrated | None:
    """Read the launcher's variables; None if they say nothing about sharding and precision.

    A launch without a plugin is one of plain ranks, for which the trainer chooses the strategy.
    """
    switch = next((name for name in KINDS if environ.get(name, "").lower() in TRUE), None)
    if switch is None:
        return _plain_ranks(environ)
    ignored = _ignored(environ)
    tree: dict[str, Tree] = {"distributed_type": KINDS[switch]}
    names = {"distributed_type": switch}
    for name, value in environ.items():
        path = _path(name)
        if path is None or name in ignored:
            continue
        names[path] = name
        block, _, key = path.partition(".")
        inner = tree.setdefault(block, {}) if key else tree
        inner[key or block] = value
    account = Account(SOURCE)
    settings, original = read_accelerate(account.block("", tree), Path())
    entries = [row for entry in account.entries for row in _renamed(entry, names, environ)]
    entries += [Entry(name, environ[name], "ignored", why) for name, why in ignored.items()]
    return Migrated(SOURCE, "accelerate", settings, original, tuple(entries))


def _plain_ranks(environ: Mapping[str, str]) -> Migrated | None:
    word = environ.get(PRECISION, "no")
    if word.lower() == "no":
        return None
    account = Account(SOURCE)
    tree = {"distributed_type": "MULTI_GPU", "mixed_precision": word}
    settings, original = read_accelerate(account.block("", tree), Path())
    entries = [replace(entry, key=PRECISION) for entry in account.entries if entry.key == "mixed_precision"]
    return Migrated(SOURCE, "accelerate", settings | {"strategy": AUTO}, original, tuple(entries))


def _path(name: str) -> str | None:
    """The key of Accelerate's file that a variable stands for; None if the variable is not the launcher's."""
    known = table("accelerate")
    if name in known["variables"]:
        return str(known["variables"][name])
    for prefix, beginning in known["variable_prefixes"].items():
        if name.startswith(prefix):
            path = beginning + name.removeprefix(prefix).lower()
            block, _, key = path.partition(".")
            return None if block == "fsdp_config" and key not in known_keys() else path
    return None


def _ignored(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that are not read, and why."""
    found = {
        name: "it says nothing about sharding"
        for name in environ
        if name.startswith(("ACCELERATE_", "FSDP_")) and _path(name) is None and name not in KINDS
    }
    found |= {name: "it is off" for name in KINDS if name in environ and environ[name].lower() not in TRUE}
    found |= {name: "it is empty" for name in environ if _path(name) and environ[name] in ("", "None")}
    reshard, strategy = environ.get(RESHARD, "").lower(), strategy_name(environ.get(STRATEGY, ""))
    if environ.get("FSDP_VERSION", "1") == "1" and reshard in TRUE + FALSE:
        found[RESHARD] = f"version 1 reads {STRATEGY}"
    elif strategy == FULL and reshard:
        found[STRATEGY] = f"{RESHARD} decides it, and this is the launcher's default"
    elif strategy and reshard in TRUE:
        found[RESHARD] = f"{STRATEGY} decides it, and this is the launcher's default"
    if environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE") and environ.get(PRECISION, "").lower() == "no":
        found[PRECISION] = "DeepSpeed's file decides it, and this is the launcher's default"
    return found


def _renamed(entry: Entry, names: Mapping[str, str], environ: Mapping[str, str]) -> list[Entry]:
    """The entry under the variable's name. An entry about a whole block belongs to all of its variables, one of a file
    to the variable that names the file."""
    found = []
    for path, name in names.items():
        if entry.key == path or path.startswith(f"{entry.key}."):
            found.append(replace(entry, key=name, value=shown(environ[name])))
        elif entry.key.startswith(f"{path}."):
            found.append(replace(entry, key=name + entry.key.removeprefix(path)))
    return found
