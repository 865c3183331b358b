"""The collectives, all in place: the buffer that is gathered is the buffer that is computed with.

`start_*` queues a collective and returns an `InFlight` record; `finish` makes the current stream (on a
CPU: the caller) wait for it, and does what is left to do then. The record keeps the buffer alive until then. On an axis
of one rank nothing is queued. This module does not know what a parameter is.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions, ReduceScatterOptions

from ..errors import WireError
from .ledger import Call, Kind, Ledger, describe_call

# The groups' own methods: the functions of torch.distributed around them cost a dozen Python calls each. torch 2.13
# renamed the flat collectives; 2.11 has only the older names.
_ALL_GATHER, _REDUCE_SCATTER, _ALL_TO_ALL = (
    ("all_gather_single", "reduce_scatter_single", "all_to_all_single")
    if "all_gather_single" in dir(dist.ProcessGroup)
    else ("_allgather_base", "_reduce_scatter_base", "alltoall_base")
)


def _asynchronous(options: Any, averages: bool = False) -> Any:
    options.asyncOp = True
    if averages:
        options.reduceOp = dist.ReduceOp.AVG
    return options


_GATHER = _asynchronous(AllgatherOptions())
_EXCHANGE = _asynchronous(AllToAllOptions())
# Sum, and where the communicator can do so on the way, mean.
_SCATTER = {averages: _asynchronous(ReduceScatterOptions(), averages) for averages in (False, True)}
_ALL_REDUCE = {averages: _asynchronous(AllreduceOptions(), averages) for averages in (False, True)}


@dataclass(frozen=True, slots=True)
class Channel:
    """One axis of the mesh, seen from this rank, with a communicator of its own."""

    axis: str
    num_ranks: int
    index: int
    group: dist.ProcessGroup | None
    ledger: Ledger
    # Whether the communicator can take the mean where it would take the sum.
    averages: bool = False


@dataclass(slots=True)
class InFlight:
    """A queued collective, what it reads and writes until it is finished, and what is done then."""

    kind: Kind
    channel: Channel
    what: str
    buffer: torch.Tensor
    work: dist.Work | None = None
    then: Callable[[], None] | None = None
    call: Call | None = None  # for the ledger, where bytes stand for something else


Step = Callable[[], InFlight]


class Journey:
    """Collectives one behind the other, and what is done between them, each when what was before it is finished."""

    def __init__(self) -> None:
        self._todo: deque[Callable[[], InFlight | None]] = deque()
        self._num_steps = 0
        self._flight: InFlight | None = None

    def go(self, steps: Sequence[Step]) -> None:
        self._todo.extend(steps)
        self._num_steps += len(steps)

    def do(self, work: Callable[[], None]) -> None:
        self._todo.append(work)

    def begin(self) -> None:
        """Until the first collective is under way."""
        while self._num_steps and self._flight is None:
            self._go_on()

    def go_to_last(self) -> None:
        """Until the last collective is under way."""
        while self._num_steps:
            self._go_on()

    def finish(self) -> None:
        while self._todo:
            self._go_on()
        self._arrive()

    def _go_on(self) -> None:
        self._arrive()
        self._flight = self._todo.popleft()()
        self._num_steps -= self._flight is not None

    def _arrive(self) -> None:
        if self._flight is not None:
            finish(self._flight)
            self._flight = None


def start_all_gather(channel: Channel, buffer: torch.Tensor, what: str) -> InFlight:
    """Fill `buffer` with every rank's part; this rank's own part is already in its place."""
    return start_gather(InFlight("all_gather", channel, what, buffer))


def start_reduce_scatter(
    channel: Channel, buffer: torch.Tensor, what: str, out: torch.Tensor | None = None
) -> InFlight:
    """Sum `buffer` over the ranks, or average it where the channel does. Afterwards this rank's part of the result is
    in `out`, or without it in its own part of `buffer`, and the rest means nothing."""
    flight = InFlight("reduce_scatter", channel, what, buffer)
    part = _own_part(channel, buffer) if out is None else out
    return _start(flight, _REDUCE_SCATTER, part, buffer, _SCATTER[channel.averages])


def start_all_reduce(channel: Channel, buffer: torch.Tensor, what: str, sums: bool = False) -> InFlight:
    """Sum `buffer` over the ranks, on every rank; or average it, where the channel does and `sums` is not asked for."""
    flight = InFlight("all_reduce", channel, what, buffer)
    return _start(flight, "allreduce", [buffer], _ALL_REDUCE[channel.averages and not sums])


def start_exchange(flight: InFlight, received: torch.Tensor) -> InFlight:
    """Every rank gets its own part of each rank's buffer, in their order."""
    return _start(flight, _ALL_TO_ALL, received, flight.buffer, [], [], _EXCHANGE)


def start_gather(flight: InFlight) -> InFlight:
    return _start(flight, _ALL_GATHER, flight.buffer, _own_part(flight.channel, flight.buffer), _GATHER)


def finish(flight: InFlight) -> None:
    if flight.work is not None:
        try:
            flight.work.wait()
        except RuntimeError as error:
            _fail(flight.kind, flight.channel, flight.what, error)
    if flight.then is not None:
        flight.then()


def broadcast_from_first(channel: Channel, buffer: torch.Tensor) -> None:
    """Rank 0's `buffer` on every rank; set-up only, not counted."""
    if channel.num_ranks > 1:
        try:
            dist.broadcast(buffer, src=0, group=channel.group)
        except RuntimeError as error:
            _fail("broadcast", channel, "weights", error)


def mean_over(channel: Channel, buffer: torch.Tensor) -> None:
    """The mean of `buffer` over the ranks, in its place; between steps only, not counted."""
    if channel.num_ranks > 1:
        try:
            dist.all_reduce(buffer, group=channel.group)
        except RuntimeError as error:
            _fail("all_reduce", channel, "buffers", error)
        buffer /= channel.num_ranks


def exchange(channel: Channel, value: Any) -> list[Any]:
    """Every rank's value of some plain Python object, by rank; set-up only, not counted."""
    if channel.num_ranks == 1:
        return [value]
    found: list[Any] = [None] * channel.num_ranks
    try:
        dist.all_gather_object(found, value, group=channel.group)
    except RuntimeError as error:
        _fail("exchange", channel, "what the ranks agree on", error)
    return found


def collect(channel: Channel, value: Any) -> list[Any]:
    """Every rank's value of some plain Python object, by rank, on rank 0; nothing on the others. Not counted."""
    if channel.num_ranks == 1:
        return [value]
    found: list[Any] | None = [None] * channel.num_ranks if channel.index == 0 else None
    try:
        dist.gather_object(value, found, dst=0, group=channel.group)
    except RuntimeError as error:
        _fail("collect", channel, "what the ranks wrote", error)
    return found or []


def gather_seconds(channel: Channel, buffer: torch.Tensor, num_tries: int = 3) -> float:
    """How long it takes to gather `buffer` over the ranks, at best; set-up only."""
    times = []
    for _ in range(1 + num_tries):
        begin_s = time.perf_counter()
        finish(start_all_gather(channel, buffer, "a first measurement"))
        buffer[-1].item()  # until the device has it
        times.append(time.perf_counter() - begin_s)
    return min(times[1:])


def _own_part(channel: Channel, buffer: torch.Tensor) -> torch.Tensor:
    length = buffer.numel() // channel.num_ranks
    return buffer.narrow(0, channel.index * length, length)


def _start(flight: InFlight, method: str, *arguments: Any) -> InFlight:
    """Let the communicator begin, where something moves; then it is in the ledger."""
    channel, buffer = flight.channel, flight.buffer
    if channel.num_ranks > 1 and buffer.numel():
        channel.ledger.calls.append(
            flight.call or describe_call(flight.kind, channel.axis, channel.num_ranks, buffer.numel(), buffer.dtype)
        )
        try:
            flight.work = getattr(channel.group, method)(*arguments)
        except RuntimeError as error:
            _fail(flight.kind, channel, flight.what, error)
    return flight


def _fail(kind: str, channel: Channel, what: str, error: RuntimeError) -> NoReturn:
    raise WireError(
        f"{kind} of {what} over axis {channel.axis!r} ({channel.num_ranks} ranks) failed on this rank: {error}. "
        "Another rank has died, left, or is not taking part; its own error, if it printed one, is the cause"
    ) from error
