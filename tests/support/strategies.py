"""THE list: every strategy that every promise is checked for. A new one is one line here and inherits every test."""

import random
from collections.abc import Mapping
from itertools import product
from tempfile import gettempdir
from typing import get_args

from shardwise.errors import ConfigurationError
from shardwise.layout import PRESETS, SPLITS, Layout, Strategy, Until, layout_of

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
    # What rests elsewhere than presets say.
    "ddp, optimizer on host": "ddp+optimizer=host",
    "ddp, half of the optimizer on host": "ddp+optimizer=host:0.5",
    "zero1, gradients and optimizer on host": "zero1+grads=host+optimizer=host",
    "zero2, optimizer on disk": "zero2+optimizer=disk",
    "shard_grad_op, all on host": "shard_grad_op+params=host+grads=host+optimizer=host",
    "zero3, optimizer on host": "zero3+optimizer=host",
    "zero3, parameters on disk, a part of the optimizer on host": "zero3+params=disk+grads=host+optimizer=host:0.6",
    "zero3, activations on host": "zero3+activations=host",
    "hsdp, all on host": "hsdp+params=host+grads=host+optimizer=host",
    "hfsdp, all on disk": "hfsdp+params=disk+optimizer=disk",
    "hpz, all on host": "hpz+params=host+grads=host+optimizer=host",
    # Several in one model; the names are those of the in-tree models' units.
    "mapping": {"blocks.0": "ddp", "blocks.1": "hpz", "blocks.*": "zero3", "*": "zero2"},
}

ALL = list(STRATEGIES)
NAMED = list(PRESETS)
# For tests that multiply with models or precisions: each kind of gradient and parameter handling once.
SOME = ["ddp", "zero2", "zero3", "hsdp"]


OFFLOADED = [
    name for name, strategy in STRATEGIES.items() if any(word in str(strategy) for word in ("=", "_off", "nvme"))
]


def disk_for(strategy: Strategy) -> dict[str, str]:
    """The folder that `sw.shard` is given, if something rests on disk."""
    layouts = (
        [layout_of(entry) for entry in strategy.values()] if isinstance(strategy, Mapping) else [layout_of(strategy)]
    )
    on_disk = any("disk" in (layout.params_on, layout.optimizer_on) for layout in layouts)
    return {"disk_path": gettempdir()} if on_disk else {}


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
