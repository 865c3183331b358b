"""THE list: every strategy that every promise is checked for. A new one is one line here and inherits every test."""

import random
from collections.abc import Collection, Iterable, Mapping
from itertools import product
from tempfile import gettempdir
from typing import Any, get_args

import pytest

from shardwise.base.errors import ConfigurationError
from shardwise.core.layout import PRESETS, SPLITS, Layout, Strategy, Until, layout_of

STRATEGIES: dict[str, Strategy] = {
    **{name: name for name, layout in PRESETS.items() if layout.is_exact},
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
NAMED = [name for name in STRATEGIES if name in PRESETS]
# For tests that multiply with models or precisions: each kind of gradient and parameter handling once.
SOME = ["ddp", "zero2", "zero3", "hsdp"]
# With every change: the ends of each axis (whole and split, one level and two, on the device, the host and disk,
# several in one model). The slow tests run all of them.
CORNERS = (
    "ddp",
    "zero2",
    "zero3",
    "hpz",
    "zero3_nvme",
    "world-node-world",
    "zero3, parameters on disk, a part of the optimizer on host",
    "mapping",
)


# What travels as something else, so that training is not the same to the last bit; all other promises hold.
ENCODED: dict[str, Strategy] = {
    **{name: name for name, layout in PRESETS.items() if not layout.is_exact},
    **{f"zero3, gradients as {codec}": f"zero3+grads_as={codec}" for codec in ("bf16", "fp16", "e5m2", "int8:2048")},
    **{f"zero3, parameters as {codec}": f"zero3+params_as={codec}" for codec in ("e4m3:64", "int8:asymmetric")},
    "zero3, both": "zero3+params_as=int8+grads_as=int4:feedback",
    "zero3, forwards as int8": "zero3+params_as=int8:forward",
    "hsdp, forwards as e4m3, gradients as int8": "hsdp+params_as=e4m3:forward+grads_as=int8",
    "zero3_offload, forwards as int8": "zero3_offload+params_as=int8:64:asymmetric:forward",
    "zero3_nvme, forwards as int8": "zero3_nvme+params_as=int8:forward",
    "ddp, gradients as int8": "ddp+grads_as=int8",
    "ddp, gradients as int4 with feedback": "ddp+grads_as=int4:128:stochastic:feedback",
    "zero1, both": "zero1+params_as=int8+grads_as=int8:asymmetric",
    "zero2, both": "zero2+params_as=int8+grads_as=int4:64:asymmetric",
    "shard_grad_op, parameters as int8": "shard_grad_op+params_as=int8",
    "hsdp, both": "hsdp+params_as=int8+grads_as=int8:stochastic",
    "hfsdp, both": "hfsdp+params_as=int8+grads_as=int8",
    "hpz, the copy as int8": "hpz+params_as=int8",
    "zeropp with feedback": "hpz+params_as=int8+grads_as=int4:feedback",
    "zeropp, optimizer on host": "zeropp+optimizer=host",
    "zero3_offload, both": "zero3_offload+params_as=int8+grads_as=int8",
    "zero3_nvme, both": "zero3_nvme+params_as=int8+grads_as=int8",
    "several in one model": {"blocks.0": "ddp+grads_as=int8", "blocks.1": "zeropp", "blocks.*": "zero3", "*": "zero2"},
    "forwards in some of one model": {
        "blocks.0": "zero3+params_as=int8:forward",
        "blocks.1": "zero3+params_as=int8",
        "*": "hsdp+params_as=int8:forward",
    },
}

# Of these, enough for every change; the others are asked by the slow tests.
ENCODED_ALWAYS = (
    "zeropp",
    "zero3, both",
    "zero3, forwards as int8",
    "ddp, gradients as int8",
    "hsdp, both",
    "several in one model",
)


def slow_but(always: Collection[Any], rows: Iterable[Any]) -> list[Any]:
    """Parameters of a test: the rows in `always` run with every change, the others are marked slow.

    A row is one value, or a tuple with a value for each of several names.
    """
    rows = list(rows)
    unknown = [row for row in always if row not in rows]
    assert not unknown, f"no such rows: {unknown}"

    def slow(row: Any) -> Any:
        return pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.slow)

    return [row if row in always else slow(row) for row in rows]


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
