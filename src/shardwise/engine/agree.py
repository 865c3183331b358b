"""Before anything is sharded, the ranks make sure that they mean the same model in the same way."""

import hashlib
import platform

import torch
from torch import nn

from ..errors import WireError
from ..mesh import Mesh
from ..plan.model import FoundUnit
from ..precision import Precision
from ..version import VERSION
from ..wire.collectives import exchange
from .schedule import UnitPlan

# Bits are added as integers: exact in any order, so equal weights give equal sums on every machine.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_agreement(
    mesh: Mesh, model: nn.Module, found: list[FoundUnit], plans: list[UnitPlan], precision: Precision
) -> None:
    """An error on every rank, naming the first thing that differs and both values of it."""
    facts = [
        ("shardwise's version", VERSION),
        ("torch's version", torch.__version__),
        ("Python's version", platform.python_version()),
        ("the precision", str(precision)),
        ("the ranks per node", str(mesh.node_size)),
        ("the units", ", ".join(unit.name for unit in found)),
    ]
    params = dict(model.named_parameters(remove_duplicate=False))
    for unit, plan in zip(found, plans, strict=True):
        facts.append((f"the layout of unit {unit.name!r}", str(plan.layout)))
        for param in unit.params:
            shape = f"{tuple(param.shape)} {param.dtype}, {'trained' if param.trainable else 'frozen'}"
            facts.append((f"unit {unit.name!r}, parameter {param.name!r}", shape))
        values = "; ".join(_checksum(params[param.name]) for param in unit.params)
        facts.append((f"the weights of unit {unit.name!r} (seed the ranks alike, or load the same weights)", values))
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    if len(set(exchange(mesh.world, digest))) == 1:
        return
    reports = exchange(mesh.world, facts)
    for rows in zip(*reports, strict=False):
        for rank, row in enumerate(rows):
            if row != rows[0]:
                raise WireError(
                    f"the ranks differ in {rows[0][0]}: rank 0 has {rows[0][1]!r}, rank {rank} has {row[0]}: {row[1]!r}"
                    if row[0] != rows[0][0]
                    else f"the ranks differ in {row[0]}: rank 0 has {rows[0][1]!r}, rank {rank} has {row[1]!r}"
                )
    raise WireError("the ranks differ in the number of parameters of their last unit")


def _checksum(param: nn.Parameter) -> str:
    if param.is_meta:
        return "meta"
    bits = param.detach().contiguous().view(-1).view(_BITS[param.dtype.itemsize])
    return str(int(bits.sum(dtype=torch.int64)))
