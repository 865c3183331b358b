"""Checks before anything is sharded: all ranks must have the same model, optimizers and settings."""

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from ...base.errors import ConfigurationError, ShardwiseError, WireError
from ..wire.collectives import Channel, exchange

T = TypeVar("T")
Facts = Sequence[tuple[str, str]]
Report = tuple[type[ShardwiseError], str]


def all_or_none(world: Channel, prepare: Callable[[], T]) -> T:
    """Run `prepare` on every rank. If one rank fails, all ranks raise its error, with the same reason and exit code."""
    result, failure, reports = attempt(world, prepare, ShardwiseError, ConfigurationError)
    if failure is not None:
        raise failure
    for rank, report in enumerate(reports):
        if report is not None:
            kind, reason = report
            raise kind(f"rank {rank} cannot continue: {reason}")
    return result  # type: ignore[return-value]


def attempt(
    world: Channel, do: Callable[[], T], own: type[ShardwiseError], other: type[ShardwiseError]
) -> tuple[T | None, Exception | None, list[Report | None]]:
    """Run `do` on every rank. Return its result or failure on this rank, and the report of each rank (None: success).

    A report is the class and the text of an error; errors that are not `own` are reported as `other`.
    """
    result: T | None = None
    failure: Exception | None = None
    report: Report | None = None
    try:
        result = do()
    except Exception as error:  # noqa: BLE001  any failure: the other ranks wait for this report
        failure, kind = error, type(error)
        report = (kind, str(error)) if issubclass(kind, own) else (other, f"{kind.__name__}: {error}")
    return result, failure, exchange(world, report)


def require_agreement(world: Channel, facts: Facts) -> None:
    """Raise on every rank if the facts differ. The error names the first fact that differs, and both values."""
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
