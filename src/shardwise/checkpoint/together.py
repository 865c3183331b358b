"""One rank's failure is every rank's: nobody waits for a rank that gave up, and nobody goes on alone."""

from collections.abc import Callable
from typing import TypeVar

from ..errors import CheckpointError
from ..wire.collectives import Channel, exchange

T = TypeVar("T")


def together(world: Channel, do: Callable[[], T], error: type[CheckpointError] = CheckpointError) -> T:
    """Run `do` on every rank, and meet. Where it failed, an `error` on every rank, with the first one's reason."""
    failure: Exception | None = None
    result: T | None = None
    try:
        result = do()
    except Exception as raised:  # noqa: BLE001  whatever it is, the other ranks wait to hear of it
        failure = raised
    reports = exchange(world, _reason(failure))
    reason = next((report for report in reports if report), "")
    if reason:
        rank = reports.index(reason)
        alike = all(report == reason for report in reports)
        raise error(reason if alike else f"rank {rank}: {reason}") from failure
    return result  # type: ignore[return-value]


def _reason(failure: Exception | None) -> str:
    if failure is None:
        return ""
    return f"{failure}" if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: {failure}"
