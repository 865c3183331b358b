"""DeepSpeed's JSON (of 0.19), in the order of its parts. Every key is used, ignored for a reason, or refused for one.

What a file does not say is what DeepSpeed does then, where that is one thing: gradients are clipped to 1, and an
optimizer that is named without a learning rate has 1e-3. What it leaves to others (an optimizer, a schedule, values
that are "auto") is what the trainer has.
"""

from typing import Any

from ..account import Block
from ..migrated import Original
from ..rules import settle
from .keys import IGNORED, ignore_blocks
from .precision import read_precision
from .sharding import read_sharding
from .switches import refuse_switches
from .training import read_training


def read_deepspeed(top: Block) -> tuple[dict[str, Any], Original]:
    """Settings of the trainer, and what DeepSpeed would run."""
    found = read_sharding(top)
    precision = read_precision(top, found)
    settle(top, IGNORED[""])
    ignore_blocks(top)
    refuse_switches(top)
    training = read_training(top)
    settings = {
        "strategy": found.strategy,
        **precision,
        **({} if found.node_size is None else {"node_size": found.node_size}),
        **({} if found.folder is None else {"offload": (f"disk:{found.folder}",)}),
        **({"export": True} if found.exports else {}),
        **training,
    }
    return settings, Original("deepspeed", found.bucket_elems)
