"""Strategies of other libraries under our names, and changes that are added to them.

Only this file of the package knows a preset's name.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ..base.errors import ConfigurationError
from ..core.layout import layout_of
from .account import Block

# DeepSpeed's stages.
STAGES = ("ddp", "zero1", "zero2", "zero3")
# DeepSpeed's stage 3 with a second copy in each node (hpZ), and in groups of ranks (MiCS).
STAGE_3_WITH_A_COPY_PER_NODE = "hpz"
IN_GROUPS = "hsdp"

# torch's FSDP and Accelerate, by name and by number.
SHARDING_STRATEGIES = {
    "FULL_SHARD": "zero3",
    "SHARD_GRAD_OP": "shard_grad_op",
    "NO_SHARD": "ddp",
    "HYBRID_SHARD": "hsdp",
    "HYBRID_SHARD_ZERO2": "hybrid_shard_zero2",
}
NUMBERS = {str(number): name for number, name in enumerate(SHARDING_STRATEGIES, 1)}
# One process for each device, and nothing is sharded.
REPLICATED = "ddp"

# FSDP's strategies that shard parameters: are they released after the forward?
RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}
# The same in groups of ranks that hold equal copies.
HYBRID = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "HYBRID_SHARD_ZERO2"}


@dataclass(frozen=True, slots=True)
class Change:
    """Something that is offloaded or quantised, and the key that asks for it.

    `words` are added to a strategy, as in `zero3+params=host`. `fix` is added to the reason if they are refused.
    """

    block: Block
    key: str
    words: tuple[str, ...]
    becomes: str
    fix: str = ""


def with_changes(strategy: str, changes: Iterable[Change]) -> str:
    """Add every change that the layout allows; refuse the keys of the others with the layout's reason."""
    for change in changes:
        candidate = "+".join([strategy, *change.words])
        try:
            layout_of(candidate)
        except ConfigurationError as error:
            change.block.refused(change.key, str(error).removeprefix("layout: ") + change.fix)
        else:
            strategy = candidate
            change.block.used(change.key, change.becomes)
    return strategy


def strategy_name(word: str) -> str:
    """FSDP's name for a name in any capitals or a number; "" for anything else."""
    name = NUMBERS.get(word, word.upper())
    return name if name in SHARDING_STRATEGIES else ""
