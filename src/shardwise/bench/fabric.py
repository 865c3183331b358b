"""An emulated fabric of N ranks on one device: this process plays one of them.

`start(parse("2x8,intra=400GB/s,inter=50GB/s"))` creates the default group of `torch.distributed` with the backend
below; groups made from it (`new_group`, DeviceMesh) use the same backend, so shardwise, FSDP2 and DDP run unchanged.
An operation writes this rank's own data where that of other ranks would arrive, reads what it would send, and occupies
the rank's wires (its links) for the time that `links` computes. The cell of a wire is a number in memory: the time at
which the wire is free again. A transfer begins at max(now, free), advances the cell by the seconds it needs, and ends
one latency later.

There are two sets of cells, one per clock. On the host a transfer is a deadline, and a wait sleeps until then. On CUDA
a kernel of one thread waits for the wire on `%globaltimer`, a nanosecond timer that does not depend on the SM clock.
Then as many thread blocks as the channels of a collective read and write the data at the speed of the wire. One lock
protects the cells of both wires. A transfer allocates nothing and needs no work of the host while it runs, so a CUDA
graph can capture it, and replays are counted. benchmarks/README.md says what is modelled and what is not.
"""

import ctypes
import functools
import itertools
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from ..base.errors import ConfigurationError, StateError
from ..core.engine.streams import Event, current_stream
from ..planner.hardware.links import WIRES, Fabric, Kind, Transfer, Wire, plan_transfer
from .case import MAX_BLOCKS, refuse_faster

BACKEND = "emulated"
_SPIN_S = 2e-4  # a sleep ends late by about this much, so the end of a wait is a busy loop
_GIGABYTES_PER_S_OF_A_BLOCK = 25.0  # a channel of NCCL is one thread block, and moves 20 to 25 GB/s over NVLink
_THREADS_OF_A_BLOCK = 512
_WORD_BYTES = 16
_TRIAL_BYTES = 1 << 29  # larger than any cache


class Kernel:
    """A kernel whose arguments are converted to C once, so that a launch is a single call of the CUDA driver. The
    last arguments may be addresses that are given at each launch."""

    def __init__(self, name: str, args: list[Tensor | int | float], num_blocks: int = 1, num_threads: int = 1) -> None:
        self._function = _compiled(name).func
        self._shape = (num_blocks, 1, 1, num_threads, 1, 1, 0)
        self._tensors = [arg for arg in args if isinstance(arg, Tensor)]  # kept alive: arguments are addresses
        self._args = [_c_value(arg) for arg in args]
        pointers = [ctypes.cast(ctypes.pointer(arg), ctypes.c_void_p) for arg in self._args]
        self._pointers = (ctypes.c_void_p * len(args))(*pointers)

    def launch(self, stream: torch.cuda.Stream, *addresses: int) -> None:
        for arg, address in zip(self._args[len(self._args) - len(addresses) :], addresses, strict=True):
            arg.value = address
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


class CopyShape(NamedTuple):
    """A copy without its addresses.

    gather    The source is written to every part of the target, except where it lies there already.
    scatter   All parts of the source are read; this rank's part is written to the target, unless it is the target.
    whole     The source is written to the target. Both may be the same memory.
    """

    kind: Literal["gather", "scatter", "whole"]
    num_bytes: int  # of all parts
    is_in_place: bool


class Copy(NamedTuple):
    """Memory that an operation reads and writes on this rank, all of it each time."""

    kind: Literal["gather", "scatter", "whole"]
    target: Tensor
    source: Tensor

    def shape(self, place: int, num_parts: int) -> CopyShape | None:
        """The shape for `Wires.kernels`; None if the memory is not aligned to words."""
        whole, part = (self.source, self.target) if self.kind == "scatter" else (self.target, self.source)
        address, num_bytes = whole.data_ptr(), whole.nbytes
        if (address | part.data_ptr() | num_bytes | num_bytes // num_parts) % _WORD_BYTES:
            return None
        return CopyShape(self.kind, num_bytes, address + place * num_bytes // num_parts == part.data_ptr())

    def run(self, place: int, num_parts: int) -> None:
        """Copy with torch: on the host, and on the device if the memory is not aligned."""
        if self.kind == "scatter":
            self.target.view(-1).copy_(self.source.view(num_parts, -1)[place])
        elif self.kind == "gather":
            own, parts = self.source.view(1, -1), self.target.view(num_parts, -1)
            for others in (parts[:place], parts[place + 1 :]):
                others.copy_(own.expand_as(others))
            parts[place : place + 1].copy_(own)
        elif self.target is not self.source:
            self.target.copy_(self.source)


@dataclass
class Wires:
    """The state of both wires on both clocks. The tensor lives until the next call of `start`."""

    fabric: Fabric
    cells: Tensor | None = None  # the struct `Cells` of fabric.cu: 7 words of 8 bytes; None: there is no device
    host_free_s: dict[Wire, float] = field(default_factory=lambda: dict.fromkeys(WIRES, 0.0))
    host_busy_s: dict[Wire, float] = field(default_factory=lambda: dict.fromkeys(WIRES, 0.0))
    host_moved_bytes: dict[Wire, float] = field(default_factory=lambda: dict.fromkeys(WIRES, 0.0))
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def make(cls, fabric: Fabric) -> "Wires":
        refuse_faster(fabric)
        if not torch.cuda.is_available():
            return cls(fabric)
        wires = cls(fabric, torch.zeros(7, dtype=torch.int64, device="cuda"))
        wires._refuse_links_that_are_too_fast()
        wires.device_cells()  # waits: other streams will use the cells
        return wires

    def _refuse_links_that_are_too_fast(self) -> None:
        """Measure how fast the thread blocks of a collective write. Refuse links whose data would come faster."""
        parts = 8
        memory = torch.zeros(_TRIAL_BYTES, dtype=torch.uint8, device="cuda")
        at_once = Transfer(dict.fromkeys(WIRES, 0.0), dict.fromkeys(WIRES, 0.0), 0.0)
        span = torch.empty(2, dtype=torch.int64, device="cuda")
        kernels = self.kernels(at_once, (CopyShape("gather", _TRIAL_BYTES, True),), span, (0, parts))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        for event in events:
            launch(kernels, torch.cuda.current_stream(), [Copy("gather", memory, memory)])
            event.record()
        torch.cuda.synchronize()
        trial_s = min(begin.elapsed_time(end) for begin, end in itertools.pairwise(events)) * 1e-3
        refuse_faster(self.fabric, _TRIAL_BYTES * (parts - 1) / parts / trial_s / 1e9)

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

    def kernels(
        self, transfer: Transfer, copies: tuple[CopyShape, ...], span: Tensor, part: tuple[int, int]
    ) -> list[Kernel]:
        """Return the kernels of one transfer for `launch`: one that waits for the wires, and one for each copy. `span`
        is the struct `Span` of fabric.cu, used by one transfer at a time. `part`: this rank's, and the number of them.
        """
        assert self.cells is not None, "no CUDA device when the fabric was started"
        occupied_ns = [round(transfer.occupied_s[wire] * 1e9) for wire in WIRES]
        moved = [transfer.moved_bytes[wire] for wire in WIRES]
        latency_ns = round(transfer.latency_s * 1e9)
        kernels = [Kernel("occupy", [self.cells, *occupied_ns, *moved, latency_ns, len(copies), span])]
        total, before = sum(copy.num_bytes for copy in copies) // _WORD_BYTES, 0
        rate = total * _WORD_BYTES / max(*occupied_ns, 1)  # GB/s
        num_blocks = min(math.ceil(rate / _GIGABYTES_PER_S_OF_A_BLOCK), MAX_BLOCKS)
        for number, copy in enumerate(copies, 1):
            num_words, (place, num_parts) = copy.num_bytes // _WORD_BYTES, part
            own = (place * num_words // num_parts, (place + 1) * num_words // num_parts)
            read, written, skipped = {
                "gather": (num_words // num_parts, (0, num_words), own if copy.is_in_place else (0, 0)),
                "scatter": (0, (0, 0) if copy.is_in_place else own, (0, 0)),
                "whole": (0, (0, num_words), (0, 0)),
            }[copy.kind]
            args = [total, before, num_words, read, *written, *skipped, latency_ns, int(number == len(copies))]
            num_chunks = -(-num_words // (16 * _THREADS_OF_A_BLOCK))
            shape = (max(min(num_blocks, num_chunks), 1), _THREADS_OF_A_BLOCK)
            kernels.append(Kernel("carry", [span, *args, 0, 0], *shape))
            before += num_words
        return kernels

    def device_cells(self) -> Tensor:
        if self.cells is None:
            return torch.zeros(7, dtype=torch.int64)
        torch.cuda.synchronize()
        return self.cells.cpu()


def launch(kernels: Sequence[Kernel], stream: torch.cuda.Stream, copies: Sequence[Copy]) -> None:
    """Launch what `Wires.kernels` returned. Without kernels for the copies, torch has copied before."""
    kernels[0].launch(stream)
    for kernel, copy in zip(kernels[1:], copies, strict=False):
        kernel.launch(stream, copy.source.data_ptr(), copy.target.data_ptr())


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
    on_device = wires.device_cells()[3:5].tolist()
    return {wire: wires.host_busy_s[wire] + busy_ns * 1e-9 for wire, busy_ns in zip(WIRES, on_device, strict=True)}


def moved_bytes() -> dict[str, float]:
    """Return the bytes sent over each wire since `start`. Synchronises the device."""
    wires = _started()
    on_device = wires.device_cells()[5:7].view(torch.float64).tolist()
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

    def __init__(self, done_s: float, copies: list[Copy]) -> None:
        super().__init__()
        self.done_s, self.copies = done_s, copies

    def wait(self, timeout: Any = None) -> bool:
        sleep_until(self.done_s)
        return True

    def is_completed(self) -> bool:
        return time.perf_counter() >= self.done_s

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        left_s = max(0.0, self.done_s - time.perf_counter())
        tensors = [copy.target for copy in self.copies]
        threading.Timer(left_s, future.set_result, [tensors]).start()
        return future


class _DeviceTransfer(dist.Work):
    """A transfer that is complete when `event` is. It holds references to its tensors, so that they stay allocated."""

    def __init__(self, event: Any, stream: torch.cuda.Stream, copies: list[Copy]) -> None:
        super().__init__()
        self.event, self.stream, self.copies = event, stream, copies

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait, not the host."""
        current = current_stream(self.stream.device_index)
        if current.cuda_stream != self.stream.cuda_stream:
            self.event.wait(current)
        return True

    def is_completed(self) -> bool:
        return bool(self.event.query())

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[self.copies[0].target.device])
        # The future completes when the work that is queued on this stream so far has run.
        with torch.cuda.stream(self.stream):
            future.set_result([copy.target for copy in self.copies])
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
            lambda kind, num_bytes, copies: wires.kernels(
                self._transfer(kind, num_bytes), copies, self._span, (place, len(ranks))
            )
        )
        self._host_done_s = 0.0
        self._tail: _Tail | None = None
        if wires.cells is not None:
            self._stream = torch.cuda.Stream(priority=-1)
            self._ready = Event()
            self._span = torch.empty(2, dtype=torch.int64, device=wires.cells.device)

    def getBackendName(self) -> str:  # noqa: N802, torch asks for it
        return BACKEND

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    # Every operation goes through `_start`. `num_bytes`: of the whole buffer; `copies`: what it reads and writes here.
    # With a real fabric no Python runs here, so this has as few calls as possible.

    def _start(self, kind: Kind, num_bytes: int, copies: list[Copy], opts: Any) -> dist.Work:
        if not copies or not copies[0].target.is_cuda:
            return self._start_on_host(kind, num_bytes, copies)
        index = copies[0].target.device.index
        current = stream = current_stream(index)
        capture = capture_of(current) if torch._C._cuda_isCurrentStreamCapturing() else 0
        if opts is None or opts.asyncOp:
            stream = self._stream
            self._ready.record(current)
            self._ready.wait(stream)
        handle = stream.cuda_stream
        if self._tail is not None and self._tail[1] != handle and self._tail[2] == capture:
            self._tail[0].wait(stream)
        shapes = tuple([copy.shape(self._place, len(self._ranks)) for copy in copies])
        if None in shapes or len(self._ranks) == 1:
            shapes = ()
            with torch.cuda.stream(stream):
                self._run(copies)
        if len(self._ranks) > 1:
            launch(self._kernels(kind, num_bytes, shapes), stream, copies)
        event = Event()
        event.record(stream)
        self._tail = (event, handle, capture)
        return _DeviceTransfer(event, stream, copies)

    def _start_on_host(self, kind: Kind, num_bytes: int, copies: list[Copy]) -> dist.Work:
        self._run(copies)
        self._host_done_s = self._wires.occupy_host(self._transfer(kind, num_bytes), self._host_done_s)
        return _HostTransfer(self._host_done_s, copies)

    def _run(self, copies: list[Copy]) -> None:
        for copy in copies:
            copy.run(self._place, len(self._ranks))

    # The operations, under the names that torch calls.

    def all_gather_single(self, whole: Tensor, shard: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([whole], [shard], opts)

    def reduce_scatter_single(self, shard: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([shard], [whole], opts)

    def all_gather_single_coalesced(self, wholes: list[Tensor], shards: list[Tensor], opts: Any = None) -> dist.Work:
        copies = [Copy("gather", *pair) for pair in zip(wholes, shards, strict=True)]
        return self._start("all_gather", sum(whole.nbytes for whole in wholes), copies, opts)

    def reduce_scatter_single_coalesced(
        self, shards: list[Tensor], wholes: list[Tensor], opts: Any = None
    ) -> dist.Work:
        copies = [Copy("scatter", *pair) for pair in zip(shards, wholes, strict=True)]
        return self._start("reduce_scatter", sum(whole.nbytes for whole in wholes), copies, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        copies = [Copy("whole", slot, shard) for slots, shard in pairs for slot in slots]
        return self._start("all_gather", sum(copy.target.nbytes for copy in copies), copies, opts)

    def _change(self, kind: Kind, tensors: list[Tensor], opts: Any) -> dist.Work:
        copies = [Copy("whole", tensor, tensor) for tensor in tensors]
        return self._start(kind, sum(tensor.nbytes for tensor in tensors), copies, opts)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._change("all_reduce", tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._change("broadcast", tensors, opts)

    def all_to_all_single(
        self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        num_elems = min(received.numel(), sent.numel())
        copy = Copy("whole", received.view(-1)[:num_elems], sent.reshape(-1)[:num_elems])
        return self._start("all_to_all", sent.nbytes, [copy], opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._start("all_reduce", 0, [], opts)

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
