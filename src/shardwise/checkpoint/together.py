"""One rank's failure is every rank's: nobody waits for a rank that gave up, and nobody goes on alone."""

from collections.abc import Callable
from typing import TypeVar

from ..engine.agree import attempt
from ..errors import CheckpointError
from ..wire.collectives import Channel

T = TypeVar("T")


def together(world: Channel, do: Callable[[], T], error: type[CheckpointError] = CheckpointError) -> T:
    """Run `do` on every rank, and meet. Where it failed, an `error` on every rank, with the first one's reason."""
    result, failure, reports = attempt(world, do, _reason)
    reason = next((report for report in reports if report is not None), None)
    if reason is not None:
        alike = all(report == reason for report in reports)
        raise error(reason if alike else f"rank {reports.index(reason)}: {reason}") from failure
    return result  # type: ignore[return-value]


def _reason(failure: Exception) -> str:
    return f"{failure}" if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: {failure}"
