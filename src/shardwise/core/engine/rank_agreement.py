"""Checks before anything is sharded: all ranks must have the same model, optimizers and settings."""

import hashlib
import platform
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...base.errors import ConfigurationError, ShardwiseError, WireError
from ...version import VERSION
from ..schedule.model import UnitSpec
from ..schedule.step_schedule import UnitPlan
from ..wire.collectives import Channel, exchange

T = TypeVar("T")
Report = TypeVar("Report")
Facts = Sequence[tuple[str, str]]

# Bits are added as integers: exact in any order, so equal weights give equal sums on every machine.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW_ELEMS = 1024


def all_or_none(world: Channel, prepare: Callable[[], T]) -> T:
    """Run `prepare` on every rank; if it fails on one, it fails on all, with that one's reason and exit code."""
    result, failure, reports = attempt(world, prepare, _report)
    if failure is not None:
        raise failure
    for rank, report in enumerate(reports):
        if report is not None:
            kind, reason = report
            raise kind(f"rank {rank} cannot go on: {reason}")
    return result  # type: ignore[return-value]


def _report(failure: Exception) -> tuple[type[ShardwiseError], str]:
    return type(failure) if isinstance(failure, ShardwiseError) else ConfigurationError, str(failure)


def attempt(
    world: Channel, do: Callable[[], T], describe: Callable[[Exception], Report]
) -> tuple[T | None, Exception | None, list[Report | None]]:
    """Run `do` on every rank. Return its result or failure on this rank, and each rank's report, None if it worked."""
    result: T | None = None
    failure: Exception | None = None
    try:
        result = do()
    except Exception as error:  # noqa: BLE001  any failure: the other ranks wait for this report
        failure = error
    return result, failure, exchange(world, None if failure is None else describe(failure))


def require_agreement(world: Channel, facts: Facts) -> None:
    """Raise on every rank if the facts differ, with the first one that does and both values of it."""
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    if len(set(exchange(world, digest))) == 1:
        return
    reports: list[Facts] = exchange(world, facts)
    for rows in zip(*reports, strict=False):
        for rank, (what, value) in enumerate(rows):
            if (what, value) != rows[0]:
                other = value if what == rows[0][0] else f"{what}: {value}"
                raise WireError(f"the ranks differ in {rows[0][0]}: rank 0 has {rows[0][1]}, rank {rank} has {other}")
    raise WireError("the ranks differ in how many parameters their models have")


def facts_about(model: nn.Module, found: list[UnitSpec], plans: list[UnitPlan], settings: dict[str, Any]) -> Facts:
    """Facts that must be the same on every rank, from the general to the particular."""
    facts = [
        ("shardwise's version", VERSION),
        ("torch's version", torch.__version__),
        ("Python's version", platform.python_version()),
        *((name, repr(value)) for name, value in settings.items()),
        ("the units", ", ".join(unit.name for unit in found)),
    ]
    params = dict(model.named_parameters(remove_duplicate=False))
    for unit, plan in zip(found, plans, strict=True):
        facts.append((f"the layout of unit {unit.name!r}", str(plan.layout)))
        for param in unit.params:
            shape = f"{tuple(param.shape)} {param.dtype}, {'trained' if param.trainable else 'frozen'}"
            facts.append((f"unit {unit.name!r}, parameter {param.name!r}", shape))
        for param in unit.params:
            name = f"the weights of unit {unit.name!r}, {param.name!r} (seed the ranks alike, or load the same weights)"
            facts.append((name, f"checksum {checksum(params[param.name])}"))
    return facts


def facts_about_optimizer(optimizer: torch.optim.Optimizer | None, names: dict[Tensor, str]) -> Facts:
    if optimizer is None:
        return [("the optimizer", "None")]
    facts = [("the optimizer", f"{type(optimizer).__name__} with {len(optimizer.param_groups)} groups")]
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(value, (int, float, str, tuple, type(None))):
                facts.append((f"the optimizer's group {index}, {key!r}", repr(value)))
        held = hashlib.sha256(", ".join(names[param] for param in group["params"]).encode()).hexdigest()[:12]
        facts.append((f"the parameters of the optimizer's group {index}", f"{len(group['params'])} ({held})"))
    return facts


def checksum(param: Tensor) -> str:
    """A sum of the bits that depends on their places: rows and columns are weighted by their number."""
    if param.is_meta:
        return "meta"
    bits = param.detach().contiguous().view(-1).view(_BITS[param.dtype.itemsize])
    num_rows = bits.numel() // _ROW_ELEMS
    rows = bits[: num_rows * _ROW_ELEMS].view(num_rows, _ROW_ELEMS)
    rest = bits[num_rows * _ROW_ELEMS :]
    sums = [rows.sum(1, dtype=torch.int64), rows.sum(0, dtype=torch.int64), rest.to(torch.int64)]
    weighed = [(part * torch.arange(1, part.numel() + 1, device=part.device)).sum() for part in sums]
    return "-".join(str(int(value)) for value in weighed)
