"""The collectives, all in place: the buffer that is gathered is the buffer that is computed with.

A `Collective` is prepared once and may run in every step. `start` queues it; `finish` makes the current stream (on a
CPU: the caller) wait for it, then runs the work that follows, such as decoding. On an axis of one rank nothing is
queued. This module does not know what a parameter is.

A buffer of N equal parts is encoded as N rows of bytes, each part separately, so a rank's part is made of whole rows.
Rows are gathered over one axis after the other, and decoded once, at the end. A reduction sends every rank the rows of
its own part (an all-to-all), decodes the rows of all ranks and sums them in fp32: values are encoded once for each hop,
and no rank receives more than it needs. A sum that every rank needs is encoded once more and gathered. `Carrier`
encodes and decodes.
"""

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
from .collective_order import Event
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


Work = Callable[[], object]


@dataclass(slots=True, eq=False)
class Collective:
    """A collective on a buffer, with the work around it: `before` it starts, `meanwhile`, and `then`, when it is over.
    It may run any number of times, one after the other."""

    kind: Any  # a `Kind`, or "broadcast" or "exchange"
    channel: Channel
    what: str
    buffer: Tensor
    queue: Callable[[], dist.Work] | None  # None: there is nothing to move
    call: Call | None = None  # for the ledger and the check of the order; None: set-up, which is not counted
    before: Work | None = None
    meanwhile: Work | None = None
    then: Work | None = None
    work: dist.Work | None = None
    event: Event = ()

    def start(self) -> None:
        """Start the collective, after a check that all ranks start the same one; count it."""
        if self.before is not None:
            self.before()
        if self.queue is not None:
            if self.call is not None:
                if self.event:
                    self.channel.watch.order.take(self.event)  # type: ignore[union-attr]
                self.channel.ledger.calls.append(self.call)
            try:
                self.work = self.queue()
            except RuntimeError as error:
                self._fail(error)
        if self.meanwhile is not None:
            self.meanwhile()

    def finish(self) -> None:
        """Wait for the collective, then run the work that follows. On a GPU the stream waits, and this returns at once.
        On a CPU the caller waits, and the other ranks are watched."""
        work, self.work = self.work, None
        if work is not None:
            channel = self.channel
            try:
                if channel.watch is None or self.buffer.is_cuda:
                    work.wait()
                else:
                    try:
                        work.wait(SLICE)
                    except RuntimeError:
                        what = f"{self.kind} of {self.what}"
                        channel.watch.wait(work, what, channel.mesh is None, channel.patience_s)
            except WireError:
                raise
            except RuntimeError as error:
                self._fail(error)
        if self.then is not None:
            self.then()

    def run(self) -> None:
        self.start()
        self.finish()

    def _fail(self, error: RuntimeError) -> NoReturn:
        channel, what = self.channel, f"{self.kind} of {self.what}"
        failure = f"{what} over axis {channel.axis!r} ({channel.num_ranks} ranks) failed on this rank: {error}"
        if channel.watch is not None:
            raise WireError(channel.watch.explain(failure)) from error
        raise WireError(
            f"{failure}. Another rank has died, left, or is not taking part; its own error, if it printed one, is the "
            "cause"
        ) from error


class HopChain:
    """Collectives and work between them; each starts when the one before is finished. It runs again in every step:
    everything that stays the same is prepared once."""

    def __init__(self, steps: Sequence[Collective | Work]) -> None:
        # The last step, None, only waits for what is in flight.
        self._steps = (*steps, None)
        self._flight: Collective | None = None
        places = [at for at, step in enumerate(steps, start=1) if isinstance(step, Collective)]
        # How many steps have run; how many until the first and the last collective are in flight; and all of them.
        self.at, self.end = 0, len(self._steps)
        self.first, self.last = (places[0], places[-1]) if places else (0, 0)

    def run_to(self, place: int) -> None:
        """Run on to `first`, `last` or `end`. To run to `first` is to begin again."""
        if place == self.first:
            self.at, self._flight = 0, None
        while self.at < place:
            if self._flight is not None:
                flight, self._flight = self._flight, None
                flight.finish()
            step = self._steps[self.at]
            self.at += 1
            if isinstance(step, Collective):
                step.start()
                self._flight = step
            elif step is not None:
                step()


def all_gather(channel: Channel, buffer: Tensor, what: str) -> Collective:
    """Fill `buffer` with every rank's part; this rank's own part is already in its place."""
    return _prepare("all_gather", channel, buffer, what, _ALL_GATHER, buffer, _own_part(channel, buffer), _GATHER)


def reduce_scatter(channel: Channel, buffer: Tensor, what: str, out: Tensor | None = None) -> Collective:
    """Sum `buffer` over the ranks, or average it if the channel does. Afterwards this rank's part of the result is in
    `out`, or without `out` in its own part of `buffer`; the rest of `buffer` is undefined."""
    part = _own_part(channel, buffer)
    if channel.watch is not None and not buffer.is_cuda:
        # gloo sums all parts, too, in a copy, but returns a handle that cannot be waited for with a time limit.
        options = _ALL_REDUCE[channel.averages]
        prepared = _prepare("reduce_scatter", channel, buffer, what, "allreduce", [buffer], options)
        prepared.then = None if out is None else partial(out.copy_, part)
        return prepared
    arguments = (part if out is None else out, buffer, _SCATTER[channel.averages])
    return _prepare("reduce_scatter", channel, buffer, what, _REDUCE_SCATTER, *arguments)


def all_reduce(channel: Channel, buffer: Tensor, what: str, sums: bool = False) -> Collective:
    """Sum `buffer` over the ranks, on every rank. If the channel averages, compute the mean, unless `sums` is True."""
    options = _ALL_REDUCE[channel.averages and not sums]
    return _prepare("all_reduce", channel, buffer, what, "allreduce", [buffer], options)


def gather_of_rows(channel: Channel, rows: Tensor, codec: Codec, what: str) -> Collective:
    """Gather rows in place; this rank's own rows are in their place already."""
    flat = rows.view(-1)
    own = _own_part(channel, flat)
    return _prepare("all_gather", channel, flat, what, _ALL_GATHER, flat, own, _GATHER, codec=codec)


def exchange_of_rows(channel: Channel, sent: Tensor, received: Tensor, codec: Codec, what: str) -> Collective:
    """Send every rank the row of its part (an all-to-all), and receive this rank's part of each rank's buffer."""
    flat = sent.view(-1)
    received = received.view(-1)
    return _prepare("reduce_scatter", channel, flat, what, _ALL_TO_ALL, received, flat, [], [], _EXCHANGE, codec=codec)


def _prepare(
    kind: Kind, channel: Channel, buffer: Tensor, what: str, method: str, *arguments: Any, codec: Codec | None = None
) -> Collective:
    """Prepare a call of this method of the process group. `codec`: that of the rows in the buffer."""
    if channel.num_ranks == 1 or not buffer.numel():
        return Collective(kind, channel, what, buffer, None)
    call = describe_call(kind, channel.axis, channel.num_ranks, buffer.numel(), buffer.dtype, codec)
    event = () if channel.watch is None or channel.mesh is None else (call, what, channel.mesh)
    queue = partial(getattr(channel.group, method), *arguments)
    return Collective(kind, channel, what, buffer, queue, call, event=event)


def broadcast_from_first(channel: Channel, buffer: Tensor, what: str = "weights") -> None:
    """Copy rank 0's `buffer` to every rank; for set-up only, not counted in the ledger."""
    if channel.num_ranks > 1:
        _meet(channel, "broadcast", what)
        start = partial(dist.broadcast, buffer, 0, channel.group, async_op=True)
        Collective("broadcast", channel, what, buffer, start).run()


def mean_over(channel: Channel, buffer: Tensor) -> None:
    """Replace `buffer` by its mean over the ranks; between steps only, not counted in the ledger."""
    if channel.num_ranks > 1:
        _meet(channel, "all_reduce", "buffers")
        start = partial(dist.all_reduce, buffer, group=channel.group, async_op=True)
        Collective("all_reduce", channel, "buffers", buffer, start).run()
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
    Collective("exchange", channel, what, lengths, lambda: gather(lengths, length, _GATHER)).run()
    sizes = [int(size) for size in lengths.tolist()]
    padded = torch.nn.functional.pad(data, (0, max(sizes) - data.numel()))
    if to_all:
        received = padded.repeat(channel.num_ranks)
        Collective("exchange", channel, what, padded, lambda: gather(received, padded, _GATHER)).run()
        rows = list(received.split(padded.numel()))
    else:
        rows = [torch.empty_like(padded) for _ in sizes] if channel.index == 0 else []
        start = partial(dist.gather, padded, rows or None, dst=0, group=group, async_op=True)
        Collective("exchange", channel, what, padded, start).run()
    # A rank that receives nothing has no rows.
    return [_tensor_to_object(row, size, group) for row, size in zip(rows, sizes, strict=False)]


def _meet(channel: Channel, kind: str, what: str) -> None:
    if channel.watch is not None and channel.mesh is not None:
        channel.watch.order.take((f"{kind} of {what}", channel.mesh))


def _own_part(channel: Channel, buffer: Tensor) -> Tensor:
    length = buffer.numel() // channel.num_ranks
    return buffer.narrow(0, channel.index * length, length)
