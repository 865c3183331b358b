"""The collectives, all in place: the buffer that is gathered is the buffer that is computed with.

`start_*` queues a collective and returns an `InFlight` record; `finish` makes the current stream (on a CPU: the caller)
wait for it, then runs the work that follows, such as decoding. The record keeps the buffer alive until then. On an axis
of one rank nothing is queued. This module does not know what a parameter is.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions, ReduceScatterOptions
from torch.distributed.distributed_c10d import _get_object_coll_device, _object_to_tensor, _tensor_to_object

from ...base.errors import WireError
from .ledger import Call, Kind, Ledger, describe_call
from .rank_watch import SLICE, Watch

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
# The sum, or the mean if the communicator can compute it.
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
    # True if the communicator can compute means instead of sums.
    averages: bool = False
    # The watch over ranks that wait here, and the number of the mesh, whose collectives are checked for order; or None.
    watch: Watch | None = None
    mesh: int | None = None
    # The time limit if one rank may be busy with a disk while the others wait here; 0: the usual limit.
    patience_s: float = 0.0


@dataclass(slots=True)
class InFlight:
    """A queued collective, the buffer that it uses until it is finished, and the work that follows then."""

    kind: Kind
    channel: Channel
    what: str
    buffer: torch.Tensor
    work: dist.Work | None = None
    then: Callable[[], object] | None = None
    call: Call | None = None  # for the ledger, if the bytes are encoded values


Step = Callable[[], InFlight]


class HopChain:
    """A sequence of collectives and of work between them; each starts when the one before it is finished."""

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
        """Run until the first collective is in flight."""
        while self._num_steps and self._flight is None:
            self._go_on()

    def go_to_last(self) -> None:
        """Run until the last collective is in flight."""
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
    flight = InFlight("all_gather", channel, what, buffer)
    return _start(flight, _ALL_GATHER, buffer, _own_part(channel, buffer), _GATHER)


def start_reduce_scatter(
    channel: Channel, buffer: torch.Tensor, what: str, out: torch.Tensor | None = None
) -> InFlight:
    """Sum `buffer` over the ranks, or average it if the channel does. Afterwards this rank's part of the result is in
    `out`, or without `out` in its own part of `buffer`; the rest of `buffer` is undefined."""
    flight = InFlight("reduce_scatter", channel, what, buffer)
    part = _own_part(channel, buffer) if out is None else out
    if channel.watch is not None and not buffer.is_cuda and channel.num_ranks > 1:
        # gloo does the same itself, but returns a handle that cannot be waited for with a time limit.
        summed = buffer.clone()
        flight.then = partial(part.copy_, summed.view(channel.num_ranks, -1)[channel.index])
        return _start(flight, "allreduce", [summed], _ALL_REDUCE[channel.averages])
    return _start(flight, _REDUCE_SCATTER, part, buffer, _SCATTER[channel.averages])


def start_all_reduce(channel: Channel, buffer: torch.Tensor, what: str, sums: bool = False) -> InFlight:
    """Sum `buffer` over the ranks, on every rank; or average it, if the channel does and `sums` is False."""
    flight = InFlight("all_reduce", channel, what, buffer)
    return _start(flight, "allreduce", [buffer], _ALL_REDUCE[channel.averages and not sums])


def start_exchange(flight: InFlight, received: torch.Tensor) -> InFlight:
    """Start an all-to-all: every rank receives its own part of each rank's buffer, in the order of the ranks."""
    return _start(flight, _ALL_TO_ALL, received, flight.buffer, [], [], _EXCHANGE)


def start_gather(flight: InFlight) -> InFlight:
    return _start(flight, _ALL_GATHER, flight.buffer, _own_part(flight.channel, flight.buffer), _GATHER)


def finish(flight: InFlight) -> None:
    if flight.work is not None:
        _wait(flight.channel, flight.work, flight.buffer, flight.kind, flight.what)
    if flight.then is not None:
        flight.then()


def _wait(channel: Channel, work: dist.Work, buffer: torch.Tensor, kind: str, what: str) -> None:
    """Wait for a collective. On a GPU the stream waits, and this returns at once. On a CPU the caller waits, and the
    other ranks are watched."""
    watch = channel.watch
    try:
        if watch is None or buffer.is_cuda:
            work.wait()
            return
        try:
            work.wait(SLICE)
        except RuntimeError:
            watch.wait(work, kind, what, channel.mesh is None, channel.patience_s)
    except WireError:
        raise
    except RuntimeError as error:
        _fail(kind, channel, what, error)


def broadcast_from_first(channel: Channel, buffer: torch.Tensor, what: str = "weights") -> None:
    """Copy rank 0's `buffer` to every rank; for set-up only, not counted."""
    if channel.num_ranks > 1:
        _meet(channel, "broadcast", what)
        _run(channel, "broadcast", what, buffer, lambda: dist.broadcast(buffer, 0, channel.group, async_op=True))


def mean_over(channel: Channel, buffer: torch.Tensor) -> None:
    """Replace `buffer` by its mean over the ranks; between steps only, not counted."""
    if channel.num_ranks > 1:
        _meet(channel, "all_reduce", "buffers")
        start = partial(dist.all_reduce, buffer, group=channel.group, async_op=True)
        _run(channel, "all_reduce", "buffers", buffer, start)
        buffer /= channel.num_ranks


def exchange(channel: Channel, value: Any, what: str = "what the ranks agree on") -> list[Any]:
    """Return every rank's value of some plain Python object, by rank; for set-up only, not counted."""
    if channel.num_ranks == 1:
        return [value]
    rows = _meet_with_bytes(channel, "exchange", what, value)
    received = torch.empty_like(rows.padded).repeat(channel.num_ranks)
    gather = getattr(channel.group, _ALL_GATHER)
    _run(channel, "exchange", what, received, lambda: gather(received, rows.padded, _GATHER))
    return rows.loads(received)


def collect(channel: Channel, value: Any, what: str = "what the ranks wrote") -> list[Any]:
    """Return every rank's value of some plain Python object, by rank, on rank 0; nothing on the others. Not counted."""
    if channel.num_ranks == 1:
        return [value]
    rows = _meet_with_bytes(channel, "collect", what, value)
    is_first = channel.index == 0
    received = torch.empty_like(rows.padded).repeat(channel.num_ranks if is_first else 0)
    found = list(received.split(rows.padded.numel())) if is_first else None
    _run(
        channel, "collect", what, rows.padded,
        lambda: dist.gather(rows.padded, found, dst=0, group=channel.group, async_op=True),
    )  # fmt: skip
    return rows.loads(received) if is_first else []


@dataclass(frozen=True, slots=True)
class _Rows:
    """This rank's object as bytes, padded to the length of the longest one, and the lengths on all ranks."""

    padded: torch.Tensor
    lengths: list[int]
    group: dist.ProcessGroup | None

    def loads(self, received: torch.Tensor) -> list[Any]:
        rows = received.view(len(self.lengths), -1)
        return [_tensor_to_object(row, size, self.group) for row, size in zip(rows, self.lengths, strict=True)]


def _meet_with_bytes(channel: Channel, kind: str, what: str, value: Any) -> _Rows:
    _meet(channel, kind, what)
    data, length = _object_to_tensor(value, _get_object_coll_device(channel.group), channel.group)
    lengths = length.repeat(channel.num_ranks)
    gather = getattr(channel.group, _ALL_GATHER)
    _run(channel, kind, what, lengths, lambda: gather(lengths, length, _GATHER))
    found = [int(length) for length in lengths.tolist()]
    return _Rows(torch.nn.functional.pad(data, (0, max(found) - data.numel())), found, channel.group)


def _meet(channel: Channel, kind: str, what: str) -> None:
    if channel.watch is not None and channel.mesh is not None:
        channel.watch.order.take((f"{kind} of {what}", channel.mesh))


def _run(channel: Channel, kind: str, what: str, buffer: torch.Tensor, start: Callable[[], Any]) -> None:
    try:
        work = start()
    except RuntimeError as error:
        _fail(kind, channel, what, error)
    if work is not None:
        _wait(channel, work, buffer, kind, what)


def gather_seconds(channel: Channel, buffer: torch.Tensor, num_tries: int = 3) -> float:
    """The shortest time of gathering `buffer` over the ranks; set-up only."""
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
    """Start a collective, if it moves anything, after a check that all ranks start the same one; count it."""
    channel, buffer = flight.channel, flight.buffer
    if channel.num_ranks > 1 and buffer.numel():
        call = flight.call or describe_call(flight.kind, channel.axis, channel.num_ranks, buffer.numel(), buffer.dtype)
        if channel.watch is not None and channel.mesh is not None:
            channel.watch.order.take((call, flight.what, channel.mesh))
        channel.ledger.calls.append(call)
        try:
            flight.work = getattr(channel.group, method)(*arguments)
        except RuntimeError as error:
            _fail(flight.kind, channel, flight.what, error)
    return flight


def _fail(kind: str, channel: Channel, what: str, error: RuntimeError) -> NoReturn:
    failure = f"{kind} of {what} over axis {channel.axis!r} ({channel.num_ranks} ranks) failed on this rank: {error}"
    if channel.watch is not None:
        raise WireError(channel.watch.explain(failure)) from error
    raise WireError(
        f"{failure}. Another rank has died, left, or is not taking part; its own error, if it printed one, is the cause"
    ) from error
