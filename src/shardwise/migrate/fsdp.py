"""`fsdp_config` of Accelerate and of Hugging Face's TrainingArguments, and `parallelism_config`, its groups of ranks.

Both versions of torch's FSDP are one engine here, so the version decides nothing. A sharding strategy's name or number,
`reshard_after_forward` (true, false or such a name), or both say what is sharded and whether parameters are released
after a forward; where they contradict each other, one of them is refused.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .account import FALSE, TRUE, Block
from .migrated import Original
from .strategies import HYBRID, NUMBERS, REPLICATED, RESHARDS, SHARDING_STRATEGIES, Change, strategy_name, with_changes
from .tables import Rule, apply_rules, rules, table, with_prefix

FULL, NO_RESHARD = "FULL_SHARD", "SHARD_GRAD_OP"  # the default, and the one without resharding
POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_, SIZE, NO_WRAP = POLICIES
STATE_DICTS = {
    "FULL_STATE_DICT": (True, "the trained weights are written as one Hugging Face folder at the end (export)"),
    "SHARDED_STATE_DICT": (False, "checkpoints only, in the shards of the ranks (no export)"),
    "LOCAL_STATE_DICT": (False, "checkpoints only, in the shards of the ranks (no export)"),
}
UNREAD_THERE = f", where Accelerate 1.15 runs {FULL} whatever is written"
ON_HOST = ("params=host", "grads=host", "optimizer=host")
PREFIX, GROUPS_PREFIX = "fsdp_", "parallelism_config_"


@dataclass(frozen=True, slots=True)
class Fsdp:
    """FSDP's name of the strategy, the key that names it ("" if none does), and the rest."""

    name: str
    key: str
    changes: tuple[Change, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


def fixed_keys() -> dict[str, Rule]:
    """The rules for keys that change nothing here, with and without the prefix."""
    return with_prefix(rules("accelerate", "fsdp_config"), PREFIX)


def known_keys() -> set[str]:
    """All keys of the block, in every spelling."""
    names = [name for names in table("accelerate")["fsdp_names"].values() for name in names]
    return {*fixed_keys(), *names, *(PREFIX + name for name in names)}


def written_key(block: Block, name: str) -> str:
    """The key of the block that stands for `name`. A second one is ignored if it says the same, else refused."""
    keys = [prefix + key for key in table("accelerate")["fsdp_names"][name] for prefix in (PREFIX, "")]
    written = [key for key in keys if block.has(key)]
    for key in written[1:]:
        if str(block.values[key]).lower() == str(block.values[written[0]]).lower():
            block.ignored(key, f"{written[0]} says the same")
        else:
            block.refused(key, f"{written[0]} is {block.values[written[0]]}; leave one of them")
    return written[0] if written else keys[0]


def read_fsdp(block: Block, min_params: int, given: str = "") -> Fsdp:
    """`min_params` is the default of SIZE_BASED_WRAP; `given` a strategy that was named outside this block."""
    key = written_key(block, "version")
    version = block.whole(key, 1, least=1, most=2)
    block.used(key, "one engine for both versions")
    name, key = _strategy(block, given, version)
    settings: dict[str, Any] = {}
    changes = [*_offload(block), *_checkpointing(block, settings)]
    kind_key = written_key(block, "state_dict_type")
    kind = block.word(kind_key, STATE_DICTS, "")
    if kind:
        settings["export"], becomes = STATE_DICTS[kind]
        block.used(kind_key, becomes)
    _units(block, min_params, settings)
    apply_rules(block, fixed_keys())
    return Fsdp(name, key, tuple(changes), settings)


def sharded(
    settings: dict[str, Any], fsdp: Fsdp | None, name: str | None, group: int | None, more: Iterable[Change] = ()
) -> tuple[dict[str, Any], Original]:
    """Add the strategy to the settings, and say what torch would run.

    `name` is FSDP's name of the strategy, or None if nothing is sharded; `group` the ranks of a group. `more` are
    changes that were asked for outside `fsdp`, which is None without FSDP.
    """
    strategy = REPLICATED if name is None else SHARDING_STRATEGIES[name]
    settings["strategy"] = with_changes(strategy, [*(() if fsdp is None else fsdp.changes), *more])
    if group is not None:
        settings["node_size"] = group
    own = {} if fsdp is None else fsdp.settings
    return settings | own, Original("ddp" if strategy == REPLICATED else "fsdp")


def _strategy(block: Block, given: str, version: int) -> tuple[str, str]:
    """FSDP's name of the strategy, and the key that names it."""
    key, reshard = written_key(block, "sharding_strategy"), written_key(block, "reshard_after_forward")
    name = strategy_name(block.word(key, [*SHARDING_STRATEGIES, *NUMBERS], ""))
    if given and name and name != given:
        block.refused(key, f"{given} is asked for already; leave one of them")
    name = given or name
    if name:
        unread = UNREAD_THERE if version == 2 and name != FULL and not given else ""
        block.used(key, f"strategy {SHARDING_STRATEGIES[name]}{unread}")
    return _with_reshard(block, reshard, name, key)


def _with_reshard(block: Block, reshard: str, name: str, key: str) -> tuple[str, str]:
    word = block.text(reshard).lower()
    if not word:
        block.ignored(reshard, "it is empty")
        return (name, key) if name else (FULL, "")
    is_flag = word in TRUE + FALSE  # 1 is true and FULL_SHARD, which is the same
    other = (FULL if word in TRUE else NO_RESHARD) if is_flag else strategy_name(word)
    if not other:
        block.refused(reshard, f"it is neither true nor false, nor one of {', '.join(SHARDING_STRATEGIES)}")
    elif name and (RESHARDS.get(name) != (word in TRUE) if is_flag else other != name):
        block.refused(reshard, f"it contradicts {name}; leave one of them")
    found = name or other or FULL
    until = "released after each forward" if RESHARDS.get(found) else "kept until the backward is done"
    # FSDP reads a strategy's name in the other version's key only; whoever wrote it meant it.
    unread = "" if found == FULL else UNREAD_THERE
    named = f"strategy {SHARDING_STRATEGIES[found]}{unread}"
    block.used(reshard, f"parameters are {until}" if is_flag else named)
    # True and false name no strategy: groups of ranks may be asked for elsewhere.
    return found, key if name else "" if is_flag else reshard


def _offload(block: Block) -> list[Change]:
    key = written_key(block, "offload_params")
    if not block.flag(key):
        block.used(key, "nothing is offloaded to the host")
        return []
    becomes = "parameters, gradients and optimizer are offloaded to the host, where updates run"
    return [Change(block, key, ON_HOST, becomes)]


def _checkpointing(block: Block, settings: dict[str, Any]) -> list[Change]:
    key = written_key(block, "activation_checkpointing")
    offload = written_key(block, "activation_checkpointing_offload")
    is_on = block.flag(key)
    if is_on:
        settings["gradient_checkpointing"] = "full"
    block.used(key, f"gradient_checkpointing {'full' if is_on else 'none'}")
    if not block.flag(offload):
        block.used(offload, "activations stay on the device")
        return []
    if not is_on:
        block.refused(offload, "it goes with activation_checkpointing: true only")
    return [Change(block, offload, ("activations=host",), "saved activations are offloaded to the host")]


def _units(block: Block, min_params: int, settings: dict[str, Any]) -> None:
    """Parameters that are communicated together; the training is the same with any units."""
    policy_key, least_key = written_key(block, "auto_wrap_policy"), written_key(block, "min_num_params")
    classes_key = written_key(block, "transformer_layer_cls_to_wrap")
    policy = block.word(policy_key, POLICIES, "")
    least = block.whole(least_key, min_params, least=0)
    classes = tuple(dict.fromkeys(block.texts(classes_key)))
    if not all(name.isidentifier() for name in classes):
        block.refused(classes_key, "it is not a list of class names")
        classes = ()
    if policy == SIZE and least:
        settings["units"] = (str(least),)
        block.used(policy_key, f"units of at least {least:,} parameters")
    elif policy in (SIZE, NO_WRAP):
        block.ignored(policy_key, "units are the model's blocks: the same training, with less memory")
    else:
        settings |= {"units": classes} if classes else {}
        block.used(policy_key, "a unit for every block")
    if policy in (SIZE, NO_WRAP):
        block.ignored(classes_key, f"{policy} does not read it")
    else:
        block.used(classes_key, f"units are modules of {', '.join(classes) or 'classes that the model names'}")
    if policy == SIZE:
        block.used(least_key, f"units of at least {least:,} parameters" if least else "units are the model's blocks")
    else:
        block.ignored(least_key, f"only {SIZE} reads it")


def read_parallelism(block: Block, fsdp: Fsdp | None, num_ranks: int | None) -> tuple[str | None, int | None]:
    """FSDP's name of the strategy, with groups where there are several, and the ranks of a group.

    `dp_shard_size` ranks share one copy of the state, and `dp_replicate_size` such groups hold equal copies. A group
    has consecutive ranks, as a node has here. `fsdp` is None where nothing is sharded.
    """
    apply_rules(block, with_prefix(rules("accelerate", "parallelism_config"), GROUPS_PREFIX))
    name = None if fsdp is None else fsdp.name
    copies_key, group_key = _group_key(block, "dp_replicate_size"), _group_key(block, "dp_shard_size")
    copies, group = block.whole(copies_key, 1, least=1), block.whole(group_key, 1, least=1)
    if copies == 1 and group == 1:
        for key in (copies_key, group_key):
            block.used(key, "one group")
        return name, None
    # Ranks that share something else than state: refused by their own keys.
    others = math.prod(max(block.whole(_group_key(block, key), 1), 1) for key in ("tp_size", "cp_size", "sp_size"))
    if num_ranks is not None and copies * group * others != num_ranks:
        key = group_key if group > 1 else copies_key
        block.refused(key, f"{copies} x {group} ranks are {copies * group}, but num_processes is {num_ranks}")
    if fsdp is None:
        if group > 1:
            block.refused(group_key, "only distributed_type FSDP shards")
        block.used(copies_key, f"{copies} equal copies")
        return None, None
    if group == 1:
        block.refused(copies_key, f"{copies} copies of one rank each leave nothing to shard; write MULTI_GPU for that")
        return name, None
    if copies == 1:
        if fsdp.name not in HYBRID:
            block.refused(group_key, f"one group of {group} ranks contradicts {fsdp.name}; leave one of them")
        block.used(group_key, f"all {group} ranks share one copy")
        block.used(copies_key, "one group")
        return name, None
    return _in_groups(block, fsdp, {copies_key: copies, group_key: group}, group)


def _in_groups(block: Block, fsdp: Fsdp, sizes: Mapping[str, int], group: int) -> tuple[str, int]:
    grouped = fsdp.name if fsdp.name in HYBRID.values() else HYBRID.get(fsdp.name, FULL)
    for key in sizes:
        if fsdp.key and grouped != fsdp.name:
            block.refused(key, f"{fsdp.name} has no groups; name {grouped}, or leave the name out")
        block.used(key, f"strategy {SHARDING_STRATEGIES[grouped]}, node_size {group}")
    return grouped, group


def _group_key(block: Block, name: str) -> str:
    with_prefix = f"{GROUPS_PREFIX}{name}"
    if block.has(with_prefix) and block.has(name):
        block.refused(name, f"{with_prefix} is written, too; leave one of them")
    return with_prefix if block.has(with_prefix) else name
