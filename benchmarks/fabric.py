"""An N-rank fabric on one device, on which this process plays one rank.

`start(world_size, link)` makes a `torch.distributed` default group whose backend is the class below; groups
made from it afterwards (`new_group`, DeviceMesh) are of the same kind, so shardwise, FSDP2 and DDP run on
it unchanged.

An operation does two things:

1. it moves what one process can move. All-gather: the local shard goes to its slot (the other slots are
   filled with copies of it when their memory is first seen, so that weights are finite). Reduce-scatter:
   the own slice. All-reduce: nothing. The losses therefore mean nothing; time and memory do.
2. it occupies the link for as long as the bytes of a ring would: latency + (N-1)/N x bytes / bandwidth,
   twice that for an all-reduce.

The link. All groups share it by default, as the communicators of one GPU share its wires: two transfers at
once take as long as one after the other, in the order in which their inputs were ready. It is a cell that
holds the instant at which the wire is free again; a transfer takes max(now, free) and moves the cell
forward. On CUDA that is a one-thread kernel that then spins on `%globaltimer`, nanoseconds whatever the SM
clock does; on the host it is a deadline that `wait()` sleeps for. Contention for SMs and for device memory
is not modelled.

Order. Operations of one group follow each other, as on one NCCL communicator. An asynchronous one runs on
the group's own stream, a synchronous one on the current stream.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

# Gathers up to this size are filled whole every time: they are headers that the ranks compare, not weights.
_SMALL_BYTES = 1 << 20

_OCCUPY = r"""
__device__ __forceinline__ unsigned long long now_ns() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t) :: "memory");
    return t;
}
extern "C" __global__ void occupy(
    unsigned long long* free_ns, unsigned long long* busy_ns, int wire_ns, int latency_ns
) {
    unsigned long long now = now_ns(), seen = *free_ns, assumed, done;
    do {
        assumed = seen;
        done = (assumed > now ? assumed : now) + wire_ns;
        seen = atomicCAS(free_ns, assumed, done);
    } while (seen != assumed);
    atomicAdd(busy_ns, (unsigned long long)wire_ns);
    while (now_ns() < done + latency_ns) __nanosleep(100);
}
"""


@functools.cache
def _occupy_kernel() -> Callable[..., None]:
    return torch.cuda._compile_kernel(_OCCUPY, "occupy")


@dataclass(frozen=True)
class Link:
    """What one rank's wire does, in each direction."""

    gigabytes_per_s: float = float("inf")
    latency_us: float = 20.0
    shared: bool = True  # between all groups; False gives each group a wire of its own

    def wire_ns(self, wire_bytes: float) -> int:
        return int(wire_bytes / self.gigabytes_per_s)


@dataclass
class _Wire:
    """One wire in use. `free` and `busy` exist once per clock: the device's and the host's."""

    link: Link
    host_free_s: float = 0.0
    host_busy_s: float = 0.0
    cells: tuple[Tensor, ...] = ()  # free_ns and busy_ns, on the device
    lock: threading.Lock = field(default_factory=threading.Lock)

    def occupy_device(self, wire_bytes: float) -> None:
        """Queue the transfer on the current stream."""
        if not self.cells:
            self.cells = torch.zeros(2, dtype=torch.int64, device="cuda").unbind()
            torch.cuda.synchronize()  # streams of other groups will use them too
        _occupy_kernel()(args=[*self.cells, self.link.wire_ns(wire_bytes), int(self.link.latency_us * 1e3)])

    def occupy_host(self, wire_bytes: float) -> float:
        """The instant at which the transfer will be over."""
        wire_s = self.link.wire_ns(wire_bytes) * 1e-9
        with self.lock:
            self.host_free_s = max(time.perf_counter(), self.host_free_s) + wire_s
            self.host_busy_s += wire_s
            return self.host_free_s + self.link.latency_us * 1e-6

    def busy_s(self) -> float:
        """Seconds of traffic since the start, waiting not counted."""
        return self.host_busy_s + sum(int(busy_ns) for busy_ns in self.cells[1:]) * 1e-9


class _DeviceTransfer(dist.Work):
    """Done when `event` is. Holds the tensors as long as the caller holds it."""

    def __init__(self, event: torch.cuda.Event, stream: torch.cuda.Stream, tensors: list[Tensor]) -> None:
        super().__init__()
        self.event, self.stream, self.tensors = event, stream, tensors

    def wait(self, timeout: Any = None) -> bool:
        torch.cuda.current_stream().wait_event(self.event)  # the stream waits, not the host
        return True

    def is_completed(self) -> bool:
        return self.event.query()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[self.tensors[0].device])
        # Whoever waits for the future waits for what this stream holds now.
        with torch.cuda.stream(self.stream):
            future.set_result(self.tensors)
        return future


class _HostTransfer(dist.Work):
    """Done at an instant of the host's clock."""

    def __init__(self, done_s: float, tensors: list[Tensor]) -> None:
        super().__init__()
        self.done_s, self.tensors = done_s, tensors

    def wait(self, timeout: Any = None) -> bool:
        time.sleep(max(0.0, self.done_s - time.perf_counter()))
        return True

    def is_completed(self) -> bool:
        return time.perf_counter() >= self.done_s

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        left_s = max(0.0, self.done_s - time.perf_counter())
        threading.Timer(left_s, future.set_result, [self.tensors]).start()
        return future


class EmulatedGroup(dist.ProcessGroup):
    def __init__(self, rank: int, size: int, wire: _Wire) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._wire = rank, size, wire
        self._stream: torch.cuda.Stream | None = None
        self._tail: torch.cuda.Event | None = None
        self._seen: set[tuple[int, int]] = set()

    def getBackendName(self) -> str:  # noqa: N802, torch asks for it
        return "emulated"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def _transfer(
        self, tensors: Sequence[Tensor], ring_bytes: float, move: Callable[[], None], asynchronous: bool
    ) -> dist.Work:
        """The path of every operation. `ring_bytes`: of the whole tensor, twice that for an all-reduce."""
        wire_bytes = ring_bytes * (self._size - 1) / self._size
        if not tensors[0].is_cuda:
            move()
            return _HostTransfer(self._wire.occupy_host(wire_bytes), list(tensors))
        current = torch.cuda.current_stream()
        if self._stream is None:
            self._stream = torch.cuda.Stream(priority=-1)
        stream = self._stream if asynchronous else current
        stream.wait_stream(current)
        if self._tail is not None:
            stream.wait_event(self._tail)
        with torch.cuda.stream(stream):
            move()
            self._wire.occupy_device(wire_bytes)
        self._tail = stream.record_event()
        return _DeviceTransfer(self._tail, stream, list(tensors))

    def _fill(self, whole: Tensor, shard: Tensor) -> None:
        key = (whole.data_ptr(), whole.nbytes)
        slots = whole.view(self._size, -1)
        if whole.nbytes <= _SMALL_BYTES or key not in self._seen:
            self._seen.add(key)
            slots.copy_(shard.reshape(1, -1).clone())  # the shard may be one of the slots
        elif slots[self._rank].data_ptr() != shard.data_ptr():
            slots[self._rank].copy_(shard.reshape(-1))

    def _keep_own(self, shard: Tensor, whole: Tensor) -> None:
        own = whole.view(self._size, -1)[self._rank]
        if own.data_ptr() != shard.data_ptr():
            shard.view(-1).copy_(own)

    def all_gather_single(self, whole: Tensor, shard: Tensor, opts: Any = None) -> dist.Work:
        return self._transfer([whole, shard], whole.nbytes, lambda: self._fill(whole, shard), _is_async(opts))

    def all_gather_single_coalesced(self, wholes: list[Tensor], shards: list[Tensor], opts: Any = None) -> dist.Work:
        works = [self.all_gather_single(*pair, opts) for pair in zip(wholes, shards, strict=True)]
        return works[-1]  # operations of one group follow each other: the last one ends last

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def move() -> None:
            for slots, shard in zip(outputs, inputs, strict=True):
                for slot in slots:
                    slot.copy_(shard)

        slots = [slot for slots in outputs for slot in slots]
        return self._transfer(slots, sum(slot.nbytes for slot in slots), move, _is_async(opts))

    def reduce_scatter_single(self, shard: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        return self._transfer([shard, whole], whole.nbytes, lambda: self._keep_own(shard, whole), _is_async(opts))

    def reduce_scatter_single_coalesced(
        self, shards: list[Tensor], wholes: list[Tensor], opts: Any = None
    ) -> dist.Work:
        works = [self.reduce_scatter_single(*pair, opts) for pair in zip(shards, wholes, strict=True)]
        return works[-1]

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._transfer(tensors, 2 * sum(tensor.nbytes for tensor in tensors), _nothing, _is_async(opts))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._transfer(tensors, sum(tensor.nbytes for tensor in tensors), _nothing, _is_async(opts))

    def all_to_all_single(
        self,
        received: Tensor,
        sent: Tensor,
        received_sizes: list[int],
        sent_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        def move() -> None:
            num_elems = min(received.numel(), sent.numel())
            received.view(-1)[:num_elems].copy_(sent.reshape(-1)[:num_elems])

        return self._transfer([received, sent], sent.nbytes, move, _is_async(opts))

    def barrier(self, opts: Any = None) -> dist.Work:
        return _HostTransfer(self._wire.occupy_host(0.0), [])

    # Spellings of torch before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    allreduce_coalesced = allreduce
    alltoall_base = all_to_all_single


def _nothing() -> None:
    """An operation whose result is what was there already."""


def _is_async(opts: Any) -> bool:
    return True if opts is None else opts.asyncOp


@dataclass
class _Fabric:
    link: Link = Link()
    wires: list[_Wire] = field(default_factory=list)

    def wire(self) -> _Wire:
        """The wire for a new group."""
        if not self.wires or not self.link.shared:
            self.wires.append(_Wire(self.link))
        return self.wires[-1]


_fabric = _Fabric()


def _make_group(store: dist.Store, rank: int, size: int, timeout: Any) -> EmulatedGroup:
    return EmulatedGroup(rank, size, _fabric.wire())


dist.Backend.register_backend("emulated", _make_group, devices=["cuda", "cpu"])


def start(world_size: int, link: Link, rank: int = 0) -> None:
    """Make the default process group: this process is `rank` of `world_size`."""
    _fabric.link = link
    _fabric.wires.clear()
    dist.init_process_group("emulated", store=FakeStore(), rank=rank, world_size=world_size)


def busy_s() -> float:
    """Seconds of traffic on all wires since the start (synchronises the device)."""
    return sum(wire.busy_s() for wire in _fabric.wires)
