"""shardwise: one engine for every way of sharding data-parallel training. This file is the API."""

from .engine.api import accumulate, describe, shard, traffic
from .engine.whole import full_state_dict, load_full_state_dict, whole
from .errors import ConfigurationError, ShardwiseError, StateError, WireError
from .layout import Layout
from .mesh import init
from .precision import Precision
from .version import VERSION
from .wire.ledger import Traffic

__version__ = VERSION

__all__ = [
    "ConfigurationError",
    "Layout",
    "Precision",
    "ShardwiseError",
    "StateError",
    "Traffic",
    "WireError",
    "__version__",
    "accumulate",
    "describe",
    "full_state_dict",
    "init",
    "load_full_state_dict",
    "shard",
    "traffic",
    "whole",
]
