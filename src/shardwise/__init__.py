"""shardwise: one engine for every way of sharding data-parallel training. This file is the API.

A name is imported when it is first used, so that commands which need no tensors do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import VERSION

if TYPE_CHECKING:
    from .api.cuda_graph import capture
    from .api.full_weights import full_state_dict, grad_norms, load_full_state_dict, whole
    from .api.memory_report import Memory, memory
    from .api.sharded_model import accumulate, describe, sync_buffers, traffic
    from .api.sharding import shard
    from .base.errors import CheckpointError, ConfigurationError, ShardwiseError, StateError, WireError
    from .checkpoint.loading import load
    from .checkpoint.saving import save, start_save
    from .core.engine.hooks import register_forward
    from .core.layout import Layout
    from .core.mesh import init
    from .core.precision import Precision
    from .core.wire.ledger import Traffic
    from .migrate.api import from_accelerate, from_deepspeed
    from .migrate.migrated import Migrated
    from .planner.hardware.cluster import make_cluster
    from .planner.planning import Plan, plan
    from .planner.training import Training

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
    "load": ".checkpoint.loading",
    "save": ".checkpoint.saving",
    "start_save": ".checkpoint.saving",
    "accumulate": ".api.sharded_model",
    "describe": ".api.sharded_model",
    "shard": ".api.sharding",
    "traffic": ".api.sharded_model",
    "sync_buffers": ".api.sharded_model",
    "capture": ".api.cuda_graph",
    "Memory": ".api.memory_report",
    "memory": ".api.memory_report",
    "register_forward": ".core.engine.hooks",
    "full_state_dict": ".api.full_weights",
    "load_full_state_dict": ".api.full_weights",
    "whole": ".api.full_weights",
    "grad_norms": ".api.full_weights",
    "CheckpointError": ".base.errors",
    "ConfigurationError": ".base.errors",
    "ShardwiseError": ".base.errors",
    "StateError": ".base.errors",
    "WireError": ".base.errors",
    "Layout": ".core.layout",
    "init": ".core.mesh",
    "from_accelerate": ".migrate.api",
    "from_deepspeed": ".migrate.api",
    "Migrated": ".migrate.migrated",
    "make_cluster": ".planner.hardware.cluster",
    "Plan": ".planner.planning",
    "plan": ".planner.planning",
    "Training": ".planner.training",
    "Precision": ".core.precision",
    "Traffic": ".core.wire.ledger",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
