"""An emulated fabric of N ranks on one device: this process plays one of them.

`start(parse("2x8,intra=400GB/s,inter=50GB/s"))` creates the default group of `torch.distributed` with the backend
below; groups made from it (`new_group`, DeviceMesh) use the same backend, so shardwise, FSDP2 and DDP run unchanged.
An operation copies this rank's own data where that of other ranks would go, and occupies the rank's wires (its links)
for the time that `links` computes. The cell of a wire is a number in memory: the time at which the wire is free again.
A transfer begins at max(now, free), advances the cell by the seconds it needs, and ends one latency later.

There are two sets of cells, one per clock. On the host a transfer is a deadline, and a wait sleeps until then. On CUDA
it is a kernel of one thread that spins on `%globaltimer`, a nanosecond timer that does not depend on the SM clock. One
lock protects the cells of both wires. A transfer allocates nothing and needs no work of the host while it runs, so a
CUDA graph can capture it, and replays are counted. benchmarks/README.md says what is modelled and what is not.
"""

import ctypes
import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from ..base.errors import ConfigurationError, StateError
from ..core.engine.streams import Event, current_stream, make_current
from ..planner.hardware.links import WIRES, Fabric, Kind, Transfer, Wire, plan_transfer

BACKEND = "emulated"
# A larger buffer is filled by its first gather only. Smaller ones are filled each time: ranks compare their contents.
_SMALL_BYTES = 1 << 20
_SPIN_S = 2e-4  # a sleep ends late by about this much, so the end of a wait is a busy loop
_SCRATCH_BYTES = 1 << 28  # larger than any cache; copies go through it from begin to end
_CHUNK_BYTES = 1 << 16
_GIGABYTES_PER_S_OF_A_BLOCK = 25.0
_THREADS_OF_A_BLOCK = 512
_WORD_BYTES = 16


class Kernel:
    """A kernel whose arguments are converted to C once, so that a launch is a single call of the CUDA driver."""

    def __init__(self, name: str, args: list[Tensor | int | float], num_blocks: int = 1, num_threads: int = 1) -> None:
        self._function = _compiled(name).func
        self._shape = (num_blocks, 1, 1, num_threads, 1, 1, 0)
        self._tensors = [arg for arg in args if isinstance(arg, Tensor)]  # kept alive: arguments are addresses
        self._args = [_c_value(arg) for arg in args]
        pointers = [ctypes.cast(ctypes.pointer(arg), ctypes.c_void_p) for arg in self._args]
        self._pointers = (ctypes.c_void_p * len(args))(*pointers)

    def launch(self, stream: torch.cuda.Stream) -> None:
        handle = ctypes.c_void_p(stream.cuda_stream)
        status = _driver().cuLaunchKernel(self._function, *self._shape, handle, self._pointers, None)
        if status:
            raise RuntimeError(f"the kernel of the emulated fabric could not be launched: CUDA driver error {status}")


def _c_value(arg: Tensor | int | float) -> ctypes.c_void_p | ctypes.c_uint64 | ctypes.c_double:
    if isinstance(arg, Tensor):
        return ctypes.c_void_p(arg.data_ptr())
    return ctypes.c_uint64(arg) if isinstance(arg, int) else ctypes.c_double(arg)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _compiled(name: str) -> Any:
    return torch.cuda._compile_kernel(Path(__file__).with_name("fabric.cu").read_text(), name)


def capture_of(stream: torch.cuda.Stream) -> int:
    """Return the id of the CUDA graph capture in progress on this stream."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    nothing = [None] * 3
    handle = ctypes.c_void_p(stream.cuda_stream)
    failed = _driver().cuStreamGetCaptureInfo_v2(handle, ctypes.byref(status), ctypes.byref(number), *nothing)
    if failed:
        raise RuntimeError(f"the stream's capture could not be read: CUDA driver error {failed}")
    return number.value


@dataclass
class Wires:
    """The state of both wires on both clocks. The tensors live until the next call of `start`."""

    fabric: Fabric
    cells: Tensor | None = None  # the struct `Cells` of fabric.cu: 8 words of 8 bytes; None: there is no device
    scratch: Tensor | None = None  # memory for the copies of `copies=on`
    host_free_s: dict[Wire, float] = field(default_factory=lambda: dict.fromkeys(WIRES, 0.0))
    host_busy_s: dict[Wire, float] = field(default_factory=lambda: dict.fromkeys(WIRES, 0.0))
    host_moved_bytes: dict[Wire, float] = field(default_factory=lambda: dict.fromkeys(WIRES, 0.0))
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def make(cls, fabric: Fabric) -> "Wires":
        if not torch.cuda.is_available():
            return cls(fabric)
        cells = torch.zeros(8, dtype=torch.int64, device="cuda")
        scratch = torch.zeros(_SCRATCH_BYTES, dtype=torch.uint8, device="cuda") if fabric.copies else None
        for name in ("begin_carrying", "carry") if fabric.copies else ("occupy",):
            _compiled(name)
        torch.cuda.synchronize()  # other streams will use cells and scratch
        return cls(fabric, cells, scratch)

    def occupy_host(self, transfer: Transfer, not_before_s: float) -> float:
        """Start a transfer. Return the time of `time.perf_counter` at which it ends."""
        with self.lock:
            earliest_s = max(time.perf_counter(), not_before_s)
            done_s = earliest_s
            for wire, wire_s in transfer.occupied_s.items():
                if wire_s:
                    self.host_free_s[wire] = max(earliest_s, self.host_free_s[wire]) + wire_s
                    self.host_busy_s[wire] += wire_s
                    done_s = max(done_s, self.host_free_s[wire])
                self.host_moved_bytes[wire] += transfer.moved_bytes[wire]
            return done_s + transfer.latency_s

    def kernels(self, transfer: Transfer, span: Tensor) -> list[Kernel]:
        """Return the kernels that occupy the wires for one transfer, to be launched in order on one stream.

        `span` is the struct `Span` of fabric.cu, used by one transfer at a time; only copies need it.
        """
        assert self.cells is not None, "no CUDA device when the fabric was started"
        occupied_ns = [round(transfer.occupied_s[wire] * 1e9) for wire in WIRES]
        moved = [transfer.moved_bytes[wire] for wire in WIRES]
        latency_ns = round(transfer.latency_s * 1e9)
        if self.scratch is None:
            return [Kernel("occupy", [self.cells, *occupied_ns, *moved, latency_ns])]
        # The same bytes pass both wires, so their memory traffic is counted once.
        num_words = int(max(moved)) // _WORD_BYTES
        mask = self.scratch.numel() // 2 // _WORD_BYTES - 1
        wire_s = max(*transfer.occupied_s.values(), 1e-9)
        num_blocks = min(
            round(max(moved) / wire_s / 1e9 / _GIGABYTES_PER_S_OF_A_BLOCK), num_words * _WORD_BYTES // _CHUNK_BYTES
        )
        return [
            Kernel("begin_carrying", [self.cells, *occupied_ns, *moved, num_words, span]),
            Kernel("carry", [span, self.scratch, mask, num_words, latency_ns], max(num_blocks, 1), _THREADS_OF_A_BLOCK),
        ]

    def device_cells(self) -> Tensor:
        if self.cells is None:
            return torch.zeros(8, dtype=torch.int64)
        torch.cuda.synchronize()
        return self.cells.cpu()


def sleep_until(instant_s: float) -> None:
    """Wait until this time of `time.perf_counter`: sleep first, then loop for the last fraction of a millisecond."""
    left_s = instant_s - time.perf_counter()
    if left_s > _SPIN_S:
        time.sleep(left_s - _SPIN_S)
    while time.perf_counter() < instant_s:
        time.sleep(0)


def start(fabric: Fabric, rank: int = 0) -> None:
    """Create the default process group, in which this process is `rank`."""
    if not 0 <= rank < fabric.world_size:
        raise ConfigurationError(f"fabric: rank {rank} of {fabric.world_size}; give one from 0 to its size - 1")
    if fabric.copies and not torch.cuda.is_available():
        raise ConfigurationError("fabric: copies=on is traffic of device memory, and there is no CUDA device")
    if dist.is_initialized():
        raise StateError(
            f"fabric: a process group with backend {dist.get_backend()!r} exists already; "
            "start the fabric before sw.init(), or destroy that group first"
        )
    _running[:] = [Wires.make(fabric)]
    dist.init_process_group(BACKEND, store=_NoStore(), rank=rank, world_size=fabric.world_size)


def busy_s() -> dict[str, float]:
    """Return the seconds that each wire ("intra", "inter") was busy, without latency. Synchronises the device."""
    wires = _started()
    on_device = wires.device_cells()[4:6].tolist()
    return {wire: wires.host_busy_s[wire] + busy_ns * 1e-9 for wire, busy_ns in zip(WIRES, on_device, strict=True)}


def moved_bytes() -> dict[str, float]:
    """Return the bytes sent over each wire since `start`. Synchronises the device."""
    wires = _started()
    on_device = wires.device_cells()[6:8].view(torch.float64).tolist()
    return {wire: wires.host_moved_bytes[wire] + moved for wire, moved in zip(WIRES, on_device, strict=True)}


_running: list[Wires] = []  # those of the last `start`; at most one


def _started() -> Wires:
    if not _running:
        raise StateError("no emulated fabric: call fabric.start() first")
    return _running[0]


class _NoStore(Store):
    """A store that is never used: there are no other processes."""


class _HostTransfer(dist.Work):
    """A transfer that is complete at a given time of the host's clock."""

    def __init__(self, done_s: float, tensors: list[Tensor]) -> None:
        super().__init__()
        self.done_s, self.tensors = done_s, tensors

    def wait(self, timeout: Any = None) -> bool:
        sleep_until(self.done_s)
        return True

    def is_completed(self) -> bool:
        return time.perf_counter() >= self.done_s

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        left_s = max(0.0, self.done_s - time.perf_counter())
        threading.Timer(left_s, future.set_result, [self.tensors]).start()
        return future


class _DeviceTransfer(dist.Work):
    """A transfer that is complete when `event` is. It holds references to its tensors, so that they stay allocated."""

    def __init__(self, event: Any, stream: torch.cuda.Stream, tensors: list[Tensor]) -> None:
        super().__init__()
        self.event, self.stream, self.tensors = event, stream, tensors

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait, not the host."""
        current = current_stream(self.stream.device_index)
        if current.cuda_stream != self.stream.cuda_stream:
            self.event.wait(current)
        return True

    def is_completed(self) -> bool:
        return bool(self.event.query())

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[self.tensors[0].device])
        # The future completes when the work that is queued on this stream so far has run.
        with torch.cuda.stream(self.stream):
            future.set_result(self.tensors)
        return future


# The last operation of a group on the device: its event, its stream, and the CUDA graph capture it belongs to. The next
# operation waits for the event, whichever stream each uses. An event of one capture is not valid outside of it.
_Tail = tuple[Any, int, int]


# As Any: the stubs of torch declare overloads of these methods that torch itself never calls.
_ProcessGroup: Any = dist.ProcessGroup


class EmulatedGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group of the fabric's `ranks`. This process is `ranks[place]`."""

    def __init__(self, place: int, ranks: Sequence[int], wires: Wires) -> None:
        super().__init__(place, len(ranks))
        self._place, self._ranks, self._wires = place, ranks, wires
        # Planned once per size: planning visits every rank, and the time of a step must not grow with the world size.
        self._transfer = functools.cache(
            lambda kind, num_bytes: plan_transfer(wires.fabric, kind, num_bytes, ranks, ranks[place])
        )
        self._kernels = functools.cache(
            lambda kind, num_bytes: wires.kernels(self._transfer(kind, num_bytes), self._span) if len(ranks) > 1 else []
        )
        self._filled: set[tuple[int, int]] = set()
        self._host_done_s = 0.0
        self._tail: _Tail | None = None
        if wires.cells is not None:
            self._stream = torch.cuda.Stream(priority=-1)
            self._ready = Event()
            self._span = torch.empty(3, dtype=torch.int64, device=wires.cells.device)

    def getBackendName(self) -> str:  # noqa: N802, torch asks for it
        return BACKEND

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    # Every operation goes through `_start`. `move` copies the data; None if the data is in place already. With a real
    # fabric no Python runs here, so this has as few calls as possible.

    def _start(
        self, kind: Kind, num_bytes: int, tensors: list[Tensor], move: Callable[[], None] | None, opts: Any
    ) -> dist.Work:
        if not tensors or not tensors[0].is_cuda:
            return self._start_on_host(kind, num_bytes, tensors, move)
        index = tensors[0].device.index
        current = stream = current_stream(index)
        capture = capture_of(current) if torch._C._cuda_isCurrentStreamCapturing() else 0
        if opts is None or opts.asyncOp:
            stream = self._stream
            self._ready.record(current)
            self._ready.wait(stream)
        handle = stream.cuda_stream
        if self._tail is not None and self._tail[1] != handle and self._tail[2] == capture:
            self._tail[0].wait(stream)
        if move is not None:
            make_current(stream_id=stream.stream_id, device_index=index, device_type=stream.device_type)
            try:
                move()
            finally:
                make_current(stream_id=current.stream_id, device_index=index, device_type=current.device_type)
        for kernel in self._kernels(kind, num_bytes):
            kernel.launch(stream)
        event = Event()
        event.record(stream)
        self._tail = (event, handle, capture)
        return _DeviceTransfer(event, stream, tensors)

    def _start_on_host(
        self, kind: Kind, num_bytes: int, tensors: list[Tensor], move: Callable[[], None] | None
    ) -> dist.Work:
        if move is not None:
            move()
        self._host_done_s = self._wires.occupy_host(self._transfer(kind, num_bytes), self._host_done_s)
        return _HostTransfer(self._host_done_s, tensors)

    # The operations, under the names that torch calls.

    def all_gather_single(self, whole: Tensor, shard: Tensor, opts: Any = None) -> dist.Work:
        in_place = whole.data_ptr() + self._place * shard.nbytes == shard.data_ptr()
        memory = (whole.data_ptr(), whole.nbytes)
        is_filled = whole.nbytes > _SMALL_BYTES and memory in self._filled

        def move() -> None:
            slots = whole.view(len(self._ranks), -1)
            if not is_filled:
                self._filled.add(memory)
                for others in (slots[: self._place], slots[self._place + 1 :]):
                    others.copy_(shard.view(1, -1).expand_as(others))
            if not in_place:
                slots[self._place].copy_(shard.view(-1))

        return self._start("all_gather", whole.nbytes, [whole, shard], None if is_filled and in_place else move, opts)

    def reduce_scatter_single(self, shard: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        def move() -> None:
            shard.view(-1).copy_(whole.view(len(self._ranks), -1)[self._place])

        in_place = whole.data_ptr() + self._place * shard.nbytes == shard.data_ptr()
        return self._start("reduce_scatter", whole.nbytes, [shard, whole], None if in_place else move, opts)

    def all_gather_single_coalesced(self, wholes: list[Tensor], shards: list[Tensor], opts: Any = None) -> dist.Work:
        works = [self.all_gather_single(*pair, opts) for pair in zip(wholes, shards, strict=True)]
        return works[-1]  # operations of one group run in order: the last one ends last

    def reduce_scatter_single_coalesced(
        self, shards: list[Tensor], wholes: list[Tensor], opts: Any = None
    ) -> dist.Work:
        works = [self.reduce_scatter_single(*pair, opts) for pair in zip(shards, wholes, strict=True)]
        return works[-1]

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def move() -> None:
            for slots, shard in zip(outputs, inputs, strict=True):
                for slot in slots:
                    slot.copy_(shard)

        slots = [slot for slots in outputs for slot in slots]
        return self._start("all_gather", sum(slot.nbytes for slot in slots), slots, move, opts)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._start("all_reduce", sum(tensor.nbytes for tensor in tensors), tensors, None, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._start("broadcast", sum(tensor.nbytes for tensor in tensors), tensors, None, opts)

    def all_to_all_single(
        self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        def move() -> None:
            num_elems = min(received.numel(), sent.numel())
            received.view(-1)[:num_elems].copy_(sent.reshape(-1)[:num_elems])

        return self._start("all_to_all", sent.nbytes, [received, sent], move, opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._start("all_reduce", 0, [], None, opts)

    reduce = broadcast  # the same chain of ranks in the other direction
    allreduce_coalesced = allreduce
    # Names in torch before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _make_group(common: Any, options: Any) -> EmulatedGroup:
    """Make a group; torch calls this. For the default group it passes no list of ranks, which means all ranks."""
    ranks = list(common.global_ranks_in_group) or list(range(common.group_size))
    return EmulatedGroup(common.group_rank, ranks, _started())


dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=["cuda", "cpu"])
