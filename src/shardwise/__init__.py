"""shardwise: one engine for every way of sharding data-parallel training. This file is the API.

A name is imported when it is first used, so that commands which need no tensors do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import VERSION

if TYPE_CHECKING:
    from .checkpoint.load import load
    from .checkpoint.save import save, start_save
    from .engine.api import accumulate, describe, shard, traffic
    from .engine.buffers import sync_buffers
    from .engine.capture import capture
    from .engine.held import Memory, memory
    from .engine.hooks import register_forward
    from .engine.whole import full_state_dict, load_full_state_dict, whole
    from .engine.whole_gradients import grad_norms
    from .errors import CheckpointError, ConfigurationError, ShardwiseError, StateError, WireError
    from .layout import Layout
    from .mesh import init
    from .migrate.api import from_accelerate, from_deepspeed
    from .migrate.migrated import Migrated
    from .plan.hardware.cluster import make_cluster
    from .plan.plan import Plan, plan
    from .plan.training import Training
    from .precision import Precision
    from .wire.ledger import Traffic

__version__ = VERSION

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "Layout",
    "Memory",
    "Migrated",
    "Plan",
    "Precision",
    "ShardwiseError",
    "StateError",
    "Traffic",
    "Training",
    "WireError",
    "__version__",
    "accumulate",
    "capture",
    "describe",
    "from_accelerate",
    "from_deepspeed",
    "full_state_dict",
    "grad_norms",
    "init",
    "load",
    "load_full_state_dict",
    "make_cluster",
    "memory",
    "plan",
    "register_forward",
    "save",
    "shard",
    "start_save",
    "sync_buffers",
    "traffic",
    "whole",
]

# The same names as above, and the modules they come from.
_HOMES = {
    "load": ".checkpoint.load",
    "save": ".checkpoint.save",
    "start_save": ".checkpoint.save",
    "accumulate": ".engine.api",
    "describe": ".engine.api",
    "shard": ".engine.api",
    "traffic": ".engine.api",
    "sync_buffers": ".engine.buffers",
    "capture": ".engine.capture",
    "Memory": ".engine.held",
    "memory": ".engine.held",
    "register_forward": ".engine.hooks",
    "full_state_dict": ".engine.whole",
    "load_full_state_dict": ".engine.whole",
    "whole": ".engine.whole",
    "grad_norms": ".engine.whole_gradients",
    "CheckpointError": ".errors",
    "ConfigurationError": ".errors",
    "ShardwiseError": ".errors",
    "StateError": ".errors",
    "WireError": ".errors",
    "Layout": ".layout",
    "init": ".mesh",
    "from_accelerate": ".migrate.api",
    "from_deepspeed": ".migrate.api",
    "Migrated": ".migrate.migrated",
    "make_cluster": ".plan.hardware.cluster",
    "Plan": ".plan.plan",
    "plan": ".plan.plan",
    "Training": ".plan.training",
    "Precision": ".precision",
    "Traffic": ".wire.ledger",
}

# Importing a module binds its name here. Modules that share their name with something above are imported
# now (they are pure), so that the binding can be undone and no later import hides the API.
for _name in ("shard", "plan"):
    import_module(f".{_name}", __name__)
    del globals()[_name]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
