"""The collectives, all in place: the buffer that is gathered is the buffer that is computed with.

`start_*` queues a collective and returns an `InFlight` record; `finish` makes the current stream (on a
CPU: the caller) wait for it. The record keeps the buffer alive until then. On an axis of one rank
nothing is queued. This module does not know what a parameter is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..errors import WireError
from .ledger import Kind, Ledger, describe_call

# torch 2.13 renamed the flat collectives; 2.11 has only the older names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Channel:
    """One axis of the mesh, seen from this rank, with a communicator of its own."""

    axis: str
    num_ranks: int
    index: int
    group: dist.ProcessGroup | None
    ledger: Ledger


@dataclass(slots=True)
class InFlight:
    """A queued collective, and what it reads and writes until it is finished."""

    kind: Kind
    channel: Channel
    what: str
    buffer: torch.Tensor
    work: dist.Work | None


def start_all_gather(channel: Channel, buffer: torch.Tensor, what: str) -> InFlight:
    """Fill `buffer` with every rank's part; this rank's own part is already in its place."""
    part = _own_part(channel, buffer)
    return _start(
        "all_gather",
        channel,
        buffer,
        what,
        lambda: _all_gather(buffer, part, group=channel.group, async_op=True),
    )


def start_reduce_scatter(channel: Channel, buffer: torch.Tensor, what: str) -> InFlight:
    """Sum `buffer` over the ranks; afterwards only this rank's own part of it means anything."""
    part = _own_part(channel, buffer)
    return _start(
        "reduce_scatter",
        channel,
        buffer,
        what,
        lambda: _reduce_scatter(part, buffer, group=channel.group, async_op=True),
    )


def start_all_reduce(channel: Channel, buffer: torch.Tensor, what: str) -> InFlight:
    """Sum `buffer` over the ranks, on every rank."""
    return _start(
        "all_reduce",
        channel,
        buffer,
        what,
        lambda: dist.all_reduce(buffer, group=channel.group, async_op=True),
    )


def finish(flight: InFlight) -> None:
    if flight.work is not None:
        _checked(flight.kind, flight.channel, flight.what, flight.work.wait)


def broadcast_from_first(channel: Channel, buffer: torch.Tensor) -> None:
    """Rank 0's `buffer` on every rank; set-up only, not counted."""
    if channel.num_ranks > 1:
        _checked("broadcast", channel, "weights", lambda: dist.broadcast(buffer, src=0, group=channel.group))


def exchange(channel: Channel, value: Any) -> list[Any]:
    """Every rank's value of some plain Python object, by rank; set-up only, not counted."""
    if channel.num_ranks == 1:
        return [value]
    found: list[Any] = [None] * channel.num_ranks
    _checked(
        "exchange",
        channel,
        "what the ranks agree on",
        lambda: dist.all_gather_object(found, value, group=channel.group),
    )
    return found


def _own_part(channel: Channel, buffer: torch.Tensor) -> torch.Tensor:
    length = buffer.numel() // channel.num_ranks
    return buffer.narrow(0, channel.index * length, length)


def _start(kind: Kind, channel: Channel, buffer: torch.Tensor, what: str, call: Callable[[], Any]) -> InFlight:
    if channel.num_ranks == 1 or buffer.numel() == 0:
        return InFlight(kind, channel, what, buffer, None)
    channel.ledger.calls.append(describe_call(kind, channel.axis, channel.num_ranks, buffer.numel(), buffer.dtype))
    return InFlight(kind, channel, what, buffer, _checked(kind, channel, what, call))


def _checked(kind: str, channel: Channel, what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RuntimeError as error:
        raise WireError(
            f"{kind} of {what} over axis {channel.axis!r} ({channel.num_ranks} ranks) failed on this rank: {error}. "
            "Another rank has died, left, or is not taking part; its own error, if it printed one, is the cause"
        ) from error
