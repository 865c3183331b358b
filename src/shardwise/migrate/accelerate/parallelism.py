"""`parallelism_config`: how many ranks share one copy of the state (dp_shard_size), and how many such groups there are
(dp_replicate_size). Consecutive ranks are a group, as the ranks of a node are here."""

import math
from collections.abc import Mapping

from ..account import Block
from ..names import IN_COPIES, SHARDING_STRATEGIES
from ..rules import settle
from .fsdp import FULL, Fsdp
from .keys import PARALLELISM, prefixed

PREFIX = "parallelism_config_"


def read_parallelism(block: Block, asked: Fsdp | None, num_ranks: int | None) -> tuple[str | None, int | None]:
    """FSDP's name of the strategy, with groups where there are several, and the ranks of a group.

    `asked` is what fsdp_config says, or None where nothing is sharded.
    """
    settle(block, prefixed(PARALLELISM, PREFIX))
    name = None if asked is None else asked.name
    copies_key, group_key = _key(block, "dp_replicate_size"), _key(block, "dp_shard_size")
    copies, group = block.whole(copies_key, 1, least=1), block.whole(group_key, 1, least=1)
    if copies == 1 and group == 1:
        for key in (copies_key, group_key):
            block.used(key, "one group")
        return name, None
    key = group_key if group > 1 else copies_key
    if num_ranks is not None and copies * group * _others(block) != num_ranks:
        block.refused(key, f"{copies} x {group} ranks are {copies * group}, but num_processes is {num_ranks}")
    if asked is None:
        if group > 1:
            block.refused(group_key, "only distributed_type FSDP shards")
        block.used(copies_key, f"{copies} equal copies")
        return None, None
    if group == 1:
        block.refused(copies_key, f"{copies} copies of one rank each leave nothing to shard; write MULTI_GPU for that")
        return name, None
    if copies == 1:
        if asked.name in IN_COPIES.values() or asked.name not in IN_COPIES:
            block.refused(group_key, f"one group of {group} ranks contradicts {asked.name}; leave one of them")
        block.used(group_key, f"all {group} ranks share one copy")
        block.used(copies_key, "one group")
        return name, None
    return _in_groups(block, asked, {copies_key: copies, group_key: group}, group)


def _in_groups(block: Block, asked: Fsdp, sizes: Mapping[str, int], group: int) -> tuple[str, int]:
    grouped = asked.name if asked.name in IN_COPIES.values() else IN_COPIES.get(asked.name, FULL)
    if asked.key and grouped != asked.name:
        for key in sizes:
            block.refused(key, f"{asked.name} is no strategy of groups; name {grouped}, or leave the name out")
    becomes = f"strategy {SHARDING_STRATEGIES[grouped]}, node_size {group}"
    for key in sizes:
        block.used(key, becomes)
    return grouped, group


def _key(block: Block, name: str) -> str:
    with_prefix = f"{PREFIX}{name}"
    if block.has(with_prefix) and block.has(name):
        block.refused(name, f"{with_prefix} says it, too; leave one of them")
    return with_prefix if block.has(with_prefix) else name


def _others(block: Block) -> int:
    """Ranks that share something else than state, which is refused for itself."""
    return math.prod(max(block.whole(_key(block, name), 1), 1) for name in ("tp_size", "cp_size", "sp_size"))
