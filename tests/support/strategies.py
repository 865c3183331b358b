"""THE list: every strategy that every promise is checked for. A new one is one line here and inherits every test."""

import random
from itertools import product
from typing import get_args

from shardwise.errors import ConfigurationError
from shardwise.layout import PRESETS, SPLITS, Layout, Strategy, Until

STRATEGIES: dict[str, Strategy] = {
    **{name: name for name in PRESETS},
    # Combinations that have no name.
    #                                 params   grads    optimizer  gathered until
    "whole-whole-node": Layout("whole", "whole", "node", "always"),
    "whole-node-node": Layout("whole", "node", "node", "always"),
    "whole-node-world": Layout("whole", "node", "world", "always"),
    "world-whole-world": Layout("world", "whole", "world", "forward"),
    "world-node-world": Layout("world", "node", "world", "backward"),
    "node-whole-node": Layout("node", "whole", "node", "forward"),
    "node-whole-world": Layout("node", "whole", "world", "backward"),
    "node-world-world": Layout("node", "world", "world", "backward"),
    # Several in one model; the names are those of the in-tree models' units.
    "mapping": {"blocks.0": "ddp", "blocks.1": "hpz", "blocks.*": "zero3", "*": "zero2"},
}

ALL = list(STRATEGIES)
NAMED = list(PRESETS)
# For tests that multiply with models or precisions: each kind of gradient and parameter handling once.
SOME = ["ddp", "zero2", "zero3", "hsdp"]


def every_layout() -> list[Layout]:
    """All combinations of answers that make sense."""
    found = []
    for answers in product(SPLITS, SPLITS, SPLITS, get_args(Until)):
        try:
            found.append(Layout(*answers))
        except ConfigurationError:
            continue
    return found


def mixture(seed: int) -> dict[str, Layout]:
    """Another layout for every unit of an in-tree model, by lot."""
    lots = random.Random(seed)
    return {pattern: lots.choice(every_layout()) for pattern in (*(f"blocks.{i}" for i in range(5)), "*")}
