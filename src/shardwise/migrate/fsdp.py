"""`fsdp_config` of Accelerate and of Hugging Face's TrainingArguments, and `parallelism_config`, its groups of ranks.

We have one engine for both versions of torch's FSDP, so the version decides nothing. `sharding_strategy` (a name or a
number), `reshard_after_forward` (true, false or such a name), or both say what is sharded and whether parameters are
released after a forward. If they contradict each other, one of them is refused.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from .account import FALSE, TRUE, Block
from .migrated import Change, Original, with_changes
from .tables import apply_rules, rules, table

FULL, NO_RESHARD = "FULL_SHARD", "SHARD_GRAD_OP"  # the default, and the one without resharding
POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_, SIZE, NO_WRAP = POLICIES
UNREAD_THERE = f", where Accelerate 1.15 runs {FULL} whatever is written"
ON_HOST = "params=host+grads=host+optimizer=host"
REPLICATED = "ddp"  # the strategy of ranks that shard nothing
PREFIX, GROUPS_PREFIX = "fsdp_", "parallelism_config_"


@dataclass(frozen=True, slots=True)
class Fsdp:
    """FSDP's name of the strategy, the key that names it ("" if none does), and the changes to add to the strategy."""

    name: str
    key: str
    changes: list[Change] = field(default_factory=list)


def strategies() -> dict[str, str]:
    """Return our strategy for each strategy of FSDP, by FSDP's name."""
    return {name: row["ours"] for name, row in table("accelerate")["sharding_strategies"].items()}


def strategy_name(word: str) -> str:
    """Return FSDP's name for a number or for a name in upper or lower case; "" for anything else."""
    names = {str(number): name for number, name in enumerate(strategies(), 1)}
    name = names.get(word, word.upper())
    return name if name in names.values() else ""


def known_keys() -> set[str]:
    """All keys of the block, in every spelling."""
    names = [name for names in table("accelerate")["fsdp_names"].values() for name in names]
    return {*rules("accelerate", "fsdp_config", PREFIX), *names, *(PREFIX + name for name in names)}


def _written(block: Block, name: str) -> str:
    """Return the key by which the block has `name`. A second key is ignored if its value is the same, else refused."""
    keys = [prefix + key for key in table("accelerate")["fsdp_names"][name] for prefix in (PREFIX, "")]
    written = [key for key in keys if block.has(key)]
    for key in written[1:]:
        if str(block.values[key]).lower() == str(block.values[written[0]]).lower():
            block.ignored(key, f"{written[0]} says the same")
        else:
            block.refused(key, f"{written[0]} is {block.values[written[0]]}; leave one of them")
    return written[0] if written else keys[0]


def read_fsdp(block: Block, min_params: int, given: str = "") -> Fsdp:
    """Read the block. `min_params`: the default of SIZE_BASED_WRAP. `given`: a strategy named outside this block."""
    key = _written(block, "version")
    version = block.whole(key, 1, least=1, most=2)
    block.used(key, "one engine for both versions")
    name, key = _strategy(block, given, version)
    key_of_offload = _written(block, "offload_params")
    is_offloaded = block.flag(key_of_offload)
    block.used(key_of_offload, "nothing is offloaded to the host")
    becomes = "parameters, gradients and optimizer are offloaded to the host, where updates run"
    changes = [Change(block, key_of_offload, ON_HOST, becomes)] if is_offloaded else []
    changes += _checkpointing(block)
    kind_key, kinds = _written(block, "state_dict_type"), table("accelerate")["state_dicts"]
    kind = block.word(kind_key, kinds, "")
    if kind:
        block.settings["export"] = kind == "FULL_STATE_DICT"
        block.used(kind_key, kinds[kind])
    _units(block, min_params)
    apply_rules(block, "accelerate", "fsdp_config", PREFIX)
    return Fsdp(name, key, changes)


def set_strategy(
    top: Block,
    fsdp: Fsdp | None,
    groups: Block | None = None,
    num_ranks: int | None = None,
    more: Iterable[Change] = (),
) -> Original:
    """Set the strategy, and return the engine that torch would run.

    `fsdp` is None if nothing is sharded. `groups` is the block that may define groups of ranks; `num_ranks` counts the
    ranks of all groups. `more` are changes that other blocks ask for.
    """
    chosen = Fsdp("", "") if fsdp is None else fsdp
    name, group = (chosen.name, None) if groups is None else read_groups(groups, fsdp, num_ranks)
    strategy = strategies().get(name, REPLICATED)
    top.settings["strategy"] = with_changes(strategy, [*chosen.changes, *more])
    if group is not None:
        top.settings["node_size"] = group
    return Original("ddp" if strategy == REPLICATED else "fsdp")


def _strategy(block: Block, given: str, version: int) -> tuple[str, str]:
    """Return FSDP's name of the strategy, and the key that names it."""
    known = table("accelerate")["sharding_strategies"]
    key, reshard = _written(block, "sharding_strategy"), _written(block, "reshard_after_forward")
    numbers = map(str, range(1, len(known) + 1))
    name = strategy_name(block.word(key, [*known, *numbers], ""))
    if given and name and name != given:
        block.refused(key, f"{given} is asked for already; leave one of them")
    name = given or name
    if name:
        unread = UNREAD_THERE if version == 2 and name != FULL and not given else ""
        block.used(key, f"strategy {known[name]['ours']}{unread}")
    word = block.text(reshard).lower()
    if not word:
        block.ignored(reshard, "it is empty")
        return (name, key) if name else (FULL, "")
    is_flag = word in TRUE + FALSE  # 1 is both true and the number of FULL_SHARD; they mean the same
    other = (FULL if word in TRUE else NO_RESHARD) if is_flag else strategy_name(word)
    if not other:
        block.refused(reshard, f"it is neither true nor false, nor one of {', '.join(known)}")
    elif name and (known[name].get("reshards") != str(word in TRUE).lower() if is_flag else other != name):
        block.refused(reshard, f"it contradicts {name}; leave one of them")
    chosen = name or other or FULL
    is_released = known[chosen].get("reshards") == "true"
    until = "released after each forward" if is_released else "kept until the backward is done"
    # Accelerate does not read a strategy's name in this key. We do, because the user wrote it for a purpose.
    unread = "" if chosen == FULL else UNREAD_THERE
    block.used(reshard, f"parameters are {until}" if is_flag else f"strategy {known[chosen]['ours']}{unread}")
    # True and false name no strategy, so groups of ranks in another block do not contradict them.
    return chosen, key if name else "" if is_flag else reshard


def _checkpointing(block: Block) -> list[Change]:
    key, offload = _written(block, "activation_checkpointing"), _written(block, "activation_checkpointing_offload")
    is_on = block.flag(key)
    block.used(key, f"gradient_checkpointing {'full' if is_on else 'none'}")
    block.settings |= {"gradient_checkpointing": "full"} if is_on else {}
    if not block.flag(offload):
        block.used(offload, "activations stay on the device")
        return []
    if not is_on:
        block.refused(offload, "it goes with activation_checkpointing: true only")
    return [Change(block, offload, "activations=host", "saved activations are offloaded to the host")]


def _units(block: Block, min_params: int) -> None:
    """Read the wrapping policy, which becomes our units. Training gives the same numbers with any units."""
    policy_key, least_key = _written(block, "auto_wrap_policy"), _written(block, "min_num_params")
    classes_key = _written(block, "transformer_layer_cls_to_wrap")
    policy = block.word(policy_key, POLICIES, "")
    least = block.whole(least_key, min_params, least=0)
    classes = tuple(dict.fromkeys(block.texts(classes_key)))
    if not all(name.isidentifier() for name in classes):
        block.refused(classes_key, "it is not a list of class names")
        classes = ()
    if policy not in (SIZE, NO_WRAP):
        block.settings |= {"units": classes} if classes else {}
        block.used(policy_key, "a unit for every block")
        block.used(classes_key, f"units are modules of {', '.join(classes) or 'classes that the model names'}")
    else:
        block.ignored(classes_key, f"{policy} does not read it")
        block.ignored(policy_key, "units are the model's blocks: the same training, with less memory")
    block.ignored(least_key, f"only {SIZE} reads it")
    if policy == SIZE:
        block.used(least_key, f"units of at least {least:,} parameters" if least else "units are the model's blocks")
    if policy == SIZE and least:
        block.settings["units"] = (str(least),)
        block.used(policy_key, f"units of at least {least:,} parameters")


def read_groups(block: Block, fsdp: Fsdp | None, num_ranks: int | None) -> tuple[str, int | None]:
    """Return FSDP's name of the strategy (hybrid if there are several groups), and the ranks in a group, or None.

    `dp_shard_size` ranks share one copy of the state, and `dp_replicate_size` such groups hold equal copies. A group
    has consecutive ranks, like our nodes. If nothing is sharded, `fsdp` is None and the name is empty.
    """
    apply_rules(block, "accelerate", "parallelism_config", GROUPS_PREFIX)
    name = "" if fsdp is None else fsdp.name
    copies_key, group_key, *others = (
        block.first_of(f"{GROUPS_PREFIX}{key}", key, default=key)
        for key in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
    )
    copies, group = block.whole(copies_key, 1, least=1), block.whole(group_key, 1, least=1)
    if copies == 1 and group == 1:
        block.used((copies_key, group_key), "one group")
        return name, None
    # Tensor, context and sequence parallel ranks count, too. Their own keys refuse them.
    product = copies * group * math.prod(max(block.whole(key, 1), 1) for key in others)
    if num_ranks is not None and product != num_ranks:
        key = group_key if group > 1 else copies_key
        block.refused(key, f"{copies} x {group} ranks are {copies * group}, but num_processes is {num_ranks}")
    if fsdp is None:
        if group > 1:
            block.refused(group_key, "only distributed_type FSDP shards")
        block.used(copies_key, f"{copies} equal copies")
        return name, None
    if group == 1:
        block.refused(copies_key, f"{copies} copies of one rank each leave nothing to shard; write MULTI_GPU for that")
        return name, None
    hybrids = {key: row["hybrid"] for key, row in table("accelerate")["sharding_strategies"].items() if "hybrid" in row}
    if copies == 1:
        if name not in hybrids:
            block.refused(group_key, f"one group of {group} ranks contradicts {name}; leave one of them")
        block.used(group_key, f"all {group} ranks share one copy")
        block.used(copies_key, "one group")
        return name, None
    grouped = name if name in hybrids.values() else hybrids.get(name, FULL)
    if fsdp.key and grouped != name:
        block.refused((copies_key, group_key), f"{name} has no groups; name {grouped}, or leave the name out")
    block.used((copies_key, group_key), f"strategy {strategies()[grouped]}, node_size {group}")
    return grouped, group
