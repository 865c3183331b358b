"""The collectives, all in place: the buffer that is gathered is the buffer that is computed with.

`start_*` queues a collective and returns an `InFlight` record; `finish` makes the current stream (on a CPU: the caller)
wait for it, then runs the work that follows, such as decoding. The record keeps the buffer alive until then. On an axis
of one rank nothing is queued. This module does not know what a parameter is.

A buffer of N equal parts is encoded as N rows of bytes, each part separately, so a rank's part is made of whole rows.
Rows are gathered over one axis after the other, and decoded once, at the end. A reduction sends every rank the rows of
its own part (an all-to-all), decodes the rows of all ranks and sums them in fp32: values are encoded once for each hop,
and no rank receives more than it needs. A sum that every rank needs is encoded once more and gathered. `Carrier`
encodes and decodes.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions, ReduceScatterOptions
from torch.distributed.distributed_c10d import _get_object_coll_device, _object_to_tensor, _tensor_to_object

from ...base.errors import WireError
from .codec import Codec
from .ledger import Call, Kind, Ledger, describe_call
from .rank_watch import SLICE, Watch

# Methods of a process group are called directly: the functions of torch.distributed around them cost a dozen Python
# calls each. torch 2.13 renamed the flat collectives; 2.11 has only the older names.
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
    # The watch finds ranks that wait forever. `mesh` is the number of the mesh; if None, the order is not checked.
    watch: Watch | None = None
    mesh: int | None = None
    # The time limit of a wait here if another rank may be busy with its disk; 0: the usual limit.
    patience_s: float = 0.0


@dataclass(slots=True)
class InFlight:
    """A queued collective, the buffer that it uses until it is finished, and the work that follows then."""

    kind: Any  # a `Kind`, or "broadcast" or "exchange"
    channel: Channel
    what: str
    buffer: Tensor
    work: dist.Work | None = None
    then: Callable[[], object] | None = None
    call: Call | None = None  # for the ledger, if the bytes are encoded values


Step = Callable[[], InFlight]


class HopChain:
    """A sequence of collectives (`go`) and work between them (`do`); each starts when the one before is finished."""

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


def start_all_gather(channel: Channel, buffer: Tensor, what: str) -> InFlight:
    """Fill `buffer` with every rank's part; this rank's own part is already in its place."""
    flight = InFlight("all_gather", channel, what, buffer)
    return _start(flight, _ALL_GATHER, buffer, _own_part(channel, buffer), _GATHER)


def start_reduce_scatter(channel: Channel, buffer: Tensor, what: str, out: Tensor | None = None) -> InFlight:
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


def start_all_reduce(channel: Channel, buffer: Tensor, what: str, sums: bool = False) -> InFlight:
    """Sum `buffer` over the ranks, on every rank. If the channel averages, compute the mean, unless `sums` is True."""
    flight = InFlight("all_reduce", channel, what, buffer)
    return _start(flight, "allreduce", [buffer], _ALL_REDUCE[channel.averages and not sums])


def start_gather_of_rows(channel: Channel, rows: Tensor, codec: Codec, what: str) -> InFlight:
    """Gather rows in place; this rank's own rows are in their place already."""
    flight = _flight_of_rows("all_gather", channel, rows, codec, what)
    return _start(flight, _ALL_GATHER, flight.buffer, _own_part(channel, flight.buffer), _GATHER)


def start_exchange_of_rows(channel: Channel, sent: Tensor, received: Tensor, codec: Codec, what: str) -> InFlight:
    """Send every rank the row of its part (an all-to-all), and receive this rank's part of each rank's buffer."""
    flight = _flight_of_rows("reduce_scatter", channel, sent, codec, what)
    return _start(flight, _ALL_TO_ALL, received.view(-1), flight.buffer, [], [], _EXCHANGE)


def _flight_of_rows(kind: Kind, channel: Channel, rows: Tensor, codec: Codec, what: str) -> InFlight:
    """The record of a collective of rows. The ledger counts it under the codec's name."""
    call = Call(kind, channel.axis, str(codec), rows.nbytes, channel.num_ranks)
    return InFlight(kind, channel, what, rows.view(-1), call=call)


def finish(flight: InFlight) -> None:
    """Wait for a collective, then run the work that follows. On a GPU the stream waits, and this returns at once. On a
    CPU the caller waits, and the other ranks are watched."""
    work, channel, watch = flight.work, flight.channel, flight.channel.watch
    if work is not None:
        try:
            if watch is None or flight.buffer.is_cuda:
                work.wait()
            else:
                try:
                    work.wait(SLICE)
                except RuntimeError:
                    watch.wait(work, f"{flight.kind} of {flight.what}", channel.mesh is None, channel.patience_s)
        except WireError:
            raise
        except RuntimeError as error:
            _fail(flight, error)
    if flight.then is not None:
        flight.then()


def broadcast_from_first(channel: Channel, buffer: Tensor, what: str = "weights") -> None:
    """Copy rank 0's `buffer` to every rank; for set-up only, not counted in the ledger."""
    if channel.num_ranks > 1:
        _meet(channel, "broadcast", what)
        _run(channel, "broadcast", what, buffer, lambda: dist.broadcast(buffer, 0, channel.group, async_op=True))


def mean_over(channel: Channel, buffer: Tensor) -> None:
    """Replace `buffer` by its mean over the ranks; between steps only, not counted in the ledger."""
    if channel.num_ranks > 1:
        _meet(channel, "all_reduce", "buffers")
        start = partial(dist.all_reduce, buffer, group=channel.group, async_op=True)
        _run(channel, "all_reduce", "buffers", buffer, start)
        buffer /= channel.num_ranks


def exchange(channel: Channel, value: Any, what: str = "what the ranks agree on", to_all: bool = True) -> list[Any]:
    """Return the Python objects that the ranks passed, by rank; for set-up only, not counted in the ledger. Without
    `to_all` only rank 0 gets them, and the others get an empty list.

    Gathers the lengths of the pickled objects, then their bytes, padded to the longest.
    """
    if channel.num_ranks == 1:
        return [value]
    _meet(channel, "exchange", what)
    group, gather = channel.group, getattr(channel.group, _ALL_GATHER)
    data, length = _object_to_tensor(value, _get_object_coll_device(group), group)
    lengths = length.repeat(channel.num_ranks)
    _run(channel, "exchange", what, lengths, lambda: gather(lengths, length, _GATHER))
    sizes = [int(size) for size in lengths.tolist()]
    padded = torch.nn.functional.pad(data, (0, max(sizes) - data.numel()))
    if to_all:
        received = padded.repeat(channel.num_ranks)
        _run(channel, "exchange", what, padded, lambda: gather(received, padded, _GATHER))
        rows = list(received.split(padded.numel()))
    else:
        rows = [torch.empty_like(padded) for _ in sizes] if channel.index == 0 else []
        start = partial(dist.gather, padded, rows or None, dst=0, group=group, async_op=True)
        _run(channel, "exchange", what, padded, start)
    # A rank that receives nothing has no rows.
    return [_tensor_to_object(row, size, group) for row, size in zip(rows, sizes, strict=False)]


def _meet(channel: Channel, kind: str, what: str) -> None:
    if channel.watch is not None and channel.mesh is not None:
        channel.watch.order.take((f"{kind} of {what}", channel.mesh))


def _run(channel: Channel, kind: str, what: str, buffer: Tensor, start: Callable[[], Any]) -> None:
    flight = InFlight(kind, channel, what, buffer)
    try:
        flight.work = start()
    except RuntimeError as error:
        _fail(flight, error)
    finish(flight)


def _own_part(channel: Channel, buffer: Tensor) -> Tensor:
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
            _fail(flight, error)
    return flight


def _fail(flight: InFlight, error: RuntimeError) -> NoReturn:
    channel, what = flight.channel, f"{flight.kind} of {flight.what}"
    failure = f"{what} over axis {channel.axis!r} ({channel.num_ranks} ranks) failed on this rank: {error}"
    if channel.watch is not None:
        raise WireError(channel.watch.explain(failure)) from error
    raise WireError(
        f"{failure}. Another rank has died, left, or is not taking part; its own error, if it printed one, is the cause"
    ) from error
