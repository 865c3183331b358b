"""`fsdp_config` of Accelerate and of Hugging Face's TrainingArguments, of version 1 and version 2 of torch's FSDP.

Both versions are one engine here, so the version decides nothing. What is split, and whether parameters are dropped
after a forward, is said by a sharding strategy's name or number, by `reshard_after_forward` (true, false or such a
name), or by both; where they contradict each other, neither is guessed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ...base.errors import ConfigurationError
from ...core.layout import layout_of
from ..account import FALSE, TRUE, Block
from ..migrated import Original
from ..names import NUMBERS, REPLICATED, RESHARDS, SHARDING_STRATEGIES
from ..rules import settle
from .fsdp_keys import UNREAD, spelled

FULL, KEPT = "FULL_SHARD", "SHARD_GRAD_OP"  # by default, and without resharding
POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_, SIZE, NONE = POLICIES
STATE_DICTS = {
    "FULL_STATE_DICT": (True, "the trained weights are written as one Hugging Face folder at the end (export)"),
    "SHARDED_STATE_DICT": (False, "checkpoints only, split as the ranks hold it (no export)"),
    "LOCAL_STATE_DICT": (False, "checkpoints only, split as the ranks hold it (no export)"),
}
VERSION = 2  # that has fully_shard
UNREAD_THERE = f", where Accelerate 1.15 runs {FULL} whatever stands here"
ON_HOST = ("params=host", "grads=host", "optimizer=host")
ACTIVATIONS_ON_HOST = ("activations=host",)


@dataclass(frozen=True, slots=True)
class Change:
    """Something that is moved or encoded, and the key that asks for it."""

    block: Block
    key: str
    words: tuple[str, ...]
    becomes: str


@dataclass(frozen=True, slots=True)
class Fsdp:
    """What is asked for: FSDP's name of the strategy, the key that says it ("" if none does), and the rest."""

    name: str
    key: str
    changes: tuple[Change, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


def read_fsdp(block: Block, least_params: int, told: str = "") -> Fsdp:
    """`least_params` is what SIZE_BASED_WRAP means where no number is given; `told` a strategy that was named before
    this block."""
    version = spelled(block, "version")
    number = block.whole(version, 1, least=1, most=2)
    block.used(version, "one engine for both versions")
    name, key = _strategy(block, told, number)
    settings: dict[str, Any] = {}
    changes = [*_offload(block), *_checkpointing(block, settings)]
    _state_dict(block, settings)
    _units(block, least_params, settings)
    settle(block, UNREAD)
    return Fsdp(name, key, tuple(changes), settings)


def sharded(
    settings: dict[str, Any], asked: Fsdp | None, name: str | None, group: int | None, more: Iterable[Change] = ()
) -> tuple[dict[str, Any], Original]:
    """With the strategy of this name (None: nothing is sharded), in groups of so many ranks, and what torch would run.

    `more` are changes that were asked for outside of `asked`, which is None without FSDP.
    """
    strategy = REPLICATED if name is None else SHARDING_STRATEGIES[name]
    settings["strategy"] = _changed(strategy, [*(() if asked is None else asked.changes), *more])
    if group is not None:
        settings["node_size"] = group
    own = {} if asked is None else asked.settings
    return settings | own, Original("ddp" if strategy == REPLICATED else "fsdp")


def _changed(strategy: str, changes: Iterable[Change]) -> str:
    """A strategy with all the changes that a layout allows; the key of another is refused with the layout's reason."""
    for change in changes:
        candidate = "+".join([strategy, *change.words])
        try:
            layout_of(candidate)
        except ConfigurationError as error:
            change.block.refused(change.key, str(error))
        else:
            strategy = candidate
            change.block.used(change.key, change.becomes)
    return strategy


def strategy_name(word: str) -> str:
    """FSDP's name for a name in any capitals or a number; "" for anything else."""
    found = NUMBERS.get(word, word.upper())
    return found if found in SHARDING_STRATEGIES else ""


def _strategy(block: Block, told: str, version: int) -> tuple[str, str]:
    key, reshard = spelled(block, "sharding_strategy"), spelled(block, "reshard_after_forward")
    word = block.word(key, [*SHARDING_STRATEGIES, *NUMBERS], "")
    name = strategy_name(word)
    if told and name and name != told:
        block.refused(key, f"{told} is asked for already; leave one of them")
    name = told or name
    if name:
        unread = UNREAD_THERE if version == VERSION and name != FULL and not told else ""
        block.used(key, f"strategy {SHARDING_STRATEGIES[name]}{unread}")
    return _with_reshard(block, reshard, name, key)


def _with_reshard(block: Block, reshard: str, name: str, key: str) -> tuple[str, str]:
    word = block.text(reshard).lower()
    if not word:
        block.ignored(reshard, "nothing is said")
        return (name, key) if name else (FULL, "")
    is_flag = word in TRUE + FALSE  # 1 is true and FULL_SHARD, which is the same
    other = (FULL if word in TRUE else KEPT) if is_flag else strategy_name(word)
    if not other:
        block.refused(reshard, f"it is neither true nor false, nor one of {', '.join(SHARDING_STRATEGIES)}")
    elif name and (RESHARDS.get(name) != (word in TRUE) if is_flag else other != name):
        block.refused(reshard, f"it contradicts {name}; leave one of them")
    found = name or other or FULL
    until = "dropped after each forward" if RESHARDS.get(found) else "kept until the backward is done"
    # A strategy's name is read in the other version's key alone; whoever wrote it meant it.
    unread = "" if found == FULL else UNREAD_THERE
    named = f"strategy {SHARDING_STRATEGIES[found]}{unread}"
    block.used(reshard, f"parameters are {until}" if is_flag else named)
    # True and false name no strategy: groups of ranks may be asked for elsewhere.
    return found, key if name else "" if is_flag else reshard


def _offload(block: Block) -> list[Change]:
    key = spelled(block, "offload_params")
    if not block.flag(key):
        block.used(key, "nothing rests on the host")
        return []
    becomes = "parameters, gradients and optimizer rest on the host, where updates run"
    return [Change(block, key, ON_HOST, becomes)]


def _checkpointing(block: Block, settings: dict[str, Any]) -> list[Change]:
    key, offload = spelled(block, "activation_checkpointing"), spelled(block, "activation_checkpointing_offload")
    is_on = block.flag(key)
    if is_on:
        settings["gradient_checkpointing"] = "full"
    block.used(key, f"gradient_checkpointing {'full' if is_on else 'none'}")
    if not block.flag(offload):
        block.used(offload, "activations stay on the device")
        return []
    if not is_on:
        block.refused(offload, "it goes with activation_checkpointing: true only")
    return [Change(block, offload, ACTIVATIONS_ON_HOST, "what a block leaves to its backward rests on the host")]


def _state_dict(block: Block, settings: dict[str, Any]) -> None:
    key = spelled(block, "state_dict_type")
    kind = block.word(key, STATE_DICTS, "")
    if kind:
        exports, becomes = STATE_DICTS[kind]
        settings["export"] = exports
        block.used(key, becomes)


def _units(block: Block, least_params: int, settings: dict[str, Any]) -> None:
    """What travels as one; the training is the same with any."""
    policy_key, classes_key = spelled(block, "auto_wrap_policy"), spelled(block, "transformer_layer_cls_to_wrap")
    least_key = spelled(block, "min_num_params")
    policy = block.word(policy_key, POLICIES, "")
    least = block.whole(least_key, least_params, least=0)
    classes = tuple(dict.fromkeys(block.texts(classes_key)))
    if not all(name.isidentifier() for name in classes):
        block.refused(classes_key, "it is no list of names of classes")
        classes = ()
    if policy == SIZE and least:
        settings["units"] = (str(least),)
        block.used(policy_key, "units of at least so many parameters")
    elif policy in (SIZE, NONE):
        block.ignored(policy_key, "units are the model's blocks: the same training, with less of it gathered at a time")
    else:
        settings |= {"units": classes} if classes else {}
        block.used(policy_key, "a unit for every block")
    if policy in (SIZE, NONE):
        block.ignored(classes_key, f"{policy} does not read it")
    else:
        block.used(classes_key, f"units are modules of {', '.join(classes) or 'classes that the model names'}")
    if policy == SIZE:
        block.used(least_key, f"units of at least {least:,} parameters" if least else "units are the model's blocks")
    else:
        block.ignored(least_key, f"only {SIZE} reads it")
