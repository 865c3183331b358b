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
    "CheckpointError", "ConfigurationError", "Layout", "Memory", "Migrated", "Plan", "Precision", "ShardwiseError",
    "StateError", "Traffic", "Training", "WireError", "__version__", "accumulate", "capture", "describe",
    "from_accelerate", "from_deepspeed", "full_state_dict", "grad_norms", "init", "load", "load_full_state_dict",
    "make_cluster", "memory", "plan", "register_forward", "save", "shard", "start_save", "sync_buffers", "traffic",
    "whole",
]  # fmt: skip

# The same names by the modules they come from.
_NAMES = {
    ".api.cuda_graph": "capture",
    ".api.full_weights": "full_state_dict grad_norms load_full_state_dict whole",
    ".api.memory_report": "Memory memory",
    ".api.sharded_model": "accumulate describe sync_buffers traffic",
    ".api.sharding": "shard",
    ".base.errors": "CheckpointError ConfigurationError ShardwiseError StateError WireError",
    ".checkpoint.loading": "load",
    ".checkpoint.saving": "save start_save",
    ".core.engine.hooks": "register_forward",
    ".core.layout": "Layout",
    ".core.mesh": "init",
    ".core.precision": "Precision",
    ".core.wire.ledger": "Traffic",
    ".migrate.api": "from_accelerate from_deepspeed",
    ".migrate.migrated": "Migrated",
    ".planner.hardware.cluster": "make_cluster",
    ".planner.planning": "Plan plan",
    ".planner.training": "Training",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
