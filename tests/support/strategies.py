"""THE list: every strategy that every promise is checked for. A new one is one line here and inherits every test."""

from shardwise.layout import PRESETS, Layout, Strategy

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
# For tests that multiply with models or precisions: each kind of gradient and parameter handling once.
SOME = ["ddp", "zero2", "zero3", "hsdp"]
