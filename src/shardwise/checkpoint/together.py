"""One rank's failure is every rank's: nobody waits for a rank that gave up, and nobody goes on alone."""

from collections.abc import Callable
from typing import TypeVar

from ..base.errors import CheckpointError
from ..core.engine.rank_agreement import attempt
from ..core.wire.collectives import Channel

T = TypeVar("T")


def together(world: Channel, do: Callable[[], T], error: type[CheckpointError] | None = None) -> T:
    """Run `do` on every rank, and meet. Where it failed, an error on every rank, with the first one's reason.

    It is an `error`; without one, the CheckpointError that it was on that rank.
    """
    result, failure, reports = attempt(world, do, _report)
    first = next((report for report in reports if report is not None), None)
    if first is not None:
        kind, reason = first
        alike = all(report == first for report in reports)
        raise (error or kind)(reason if alike else f"rank {reports.index(first)}: {reason}") from failure
    return result  # type: ignore[return-value]


def _report(failure: Exception) -> tuple[type[CheckpointError], str]:
    if isinstance(failure, CheckpointError):
        return type(failure), str(failure)
    return CheckpointError, f"{type(failure).__name__}: {failure}"
