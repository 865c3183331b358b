"""The two wires of the emulated rank, and the time for which transfers occupy them.

A wire is a cell that holds the instant at which it is free again. A transfer begins at max(now, free), advances the
cell by the seconds it needs, and ends after its last byte and its latency. So two concurrent transfers take as long as
one after the other, in the order in which their inputs were ready; the latency of one overlaps the bytes of the next.

There are two sets of cells, one per clock. On the host a transfer is a deadline, and a wait sleeps until then. On CUDA
it is a kernel of one thread that spins on `%globaltimer`, which counts nanoseconds at any SM clock; a transfer over
both wires takes them under one lock. Queueing a transfer allocates nothing and does not involve the host, so it can be
captured in a CUDA graph, and replays count.

With `copies=on`, as many blocks as the bandwidth needs copy the transfer's bytes from one half of a scratch buffer to
the other, at the speed of the wire. The buffer is larger than any cache, and all of it is used in turn.
"""

import ctypes
import functools
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..planner.hardware.links import WIRES, Fabric, Transfer, Wire

_SPIN_S = 2e-4  # a sleep ends late by about this much, so the end of a wait is spun
_SCRATCH_BYTES = 1 << 28
_CHUNK_BYTES = 1 << 16
_GIGABYTES_PER_S_OF_A_BLOCK = 25.0

_SOURCE = r"""
typedef unsigned long long u64;

__device__ __forceinline__ u64 now_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t) :: "memory");
    return t;
}

__device__ __forceinline__ void spin_until(u64 instant) {
    while (now_ns() < instant) __nanosleep(100);
}

struct Cells {
    u64 lock, cursor, free_ns[2], busy_ns[2];
    double moved[2];
};

struct Span {
    u64 begin, done, cursor;
};

__device__ Span take(Cells* shared, u64 intra_ns, u64 inter_ns, double intra_bytes, double inter_bytes, u64 words) {
    volatile Cells* cells = shared;
    u64 ns[2] = {intra_ns, inter_ns};
    double bytes[2] = {intra_bytes, inter_bytes};
    while (atomicCAS(&shared->lock, 0ull, 1ull) != 0ull) __nanosleep(20);
    __threadfence();
    u64 now = now_ns();
    Span span = {now, now, cells->cursor};
    for (int wire = 0; wire < 2; ++wire) {
        if (ns[wire] == 0) continue;
        u64 begin = cells->free_ns[wire] > now ? cells->free_ns[wire] : now;
        u64 done = begin + ns[wire];
        cells->free_ns[wire] = done;
        cells->busy_ns[wire] += ns[wire];
        if (done > span.done) { span.begin = begin; span.done = done; }
    }
    for (int wire = 0; wire < 2; ++wire) cells->moved[wire] += bytes[wire];
    cells->cursor += words;
    __threadfence();
    atomicExch(&shared->lock, 0ull);
    return span;
}

extern "C" __global__ void occupy(
    Cells* cells, u64 intra_ns, u64 inter_ns, double intra_bytes, double inter_bytes, u64 latency_ns
) {
    Span span = take(cells, intra_ns, inter_ns, intra_bytes, inter_bytes, 0);
    spin_until(span.done + latency_ns);
}

extern "C" __global__ void begin_carrying(
    Cells* cells, u64 intra_ns, u64 inter_ns, double intra_bytes, double inter_bytes, u64 words, Span* out
) {
    *out = take(cells, intra_ns, inter_ns, intra_bytes, inter_bytes, words);
}

// Chunk i is not touched before its share of the span has passed. Eight words of a thread are in flight at once.
extern "C" __global__ void carry(const Span* in, uint4* scratch, u64 mask, u64 words, u64 latency_ns) {
    const u64 chunk_words = 8 * 512;
    Span span = *in;
    uint4* written = scratch + mask + 1;
    double ns_of_a_word = words ? (double)(span.done - span.begin) / (double)words : 0.0;
    for (u64 first = blockIdx.x * chunk_words; first < words; first += gridDim.x * chunk_words) {
        if (threadIdx.x == 0) spin_until(span.begin + (u64)(ns_of_a_word * (double)first));
        __syncthreads();
        uint4 held[8];
        #pragma unroll
        for (int i = 0; i < 8; ++i) {
            u64 word = first + i * 512 + threadIdx.x;
            if (word < words) held[i] = scratch[(span.cursor + word) & mask];
        }
        #pragma unroll
        for (int i = 0; i < 8; ++i) {
            u64 word = first + i * 512 + threadIdx.x;
            if (word < words) written[(span.cursor + word) & mask] = held[i];
        }
    }
    if (threadIdx.x == 0) spin_until(span.done + latency_ns);
}
"""
_THREADS_OF_A_BLOCK = 512
_WORD_BYTES = 16


class Kernel:
    """A kernel with converted arguments: launching it is one foreign call."""

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
    return torch.cuda._compile_kernel(_SOURCE, name)


def capture_of(stream: torch.cuda.Stream) -> int:
    """The number of the CUDA graph that is being captured on the current stream; 0: none."""
    if not torch.cuda.is_current_stream_capturing():
        return 0
    status, number = ctypes.c_int(), ctypes.c_uint64()
    nothing = [None] * 3
    handle = ctypes.c_void_p(stream.cuda_stream)
    failed = _driver().cuStreamGetCaptureInfo_v2(handle, ctypes.byref(status), ctypes.byref(number), *nothing)
    if failed:
        raise RuntimeError(f"the stream's capture could not be read: CUDA driver error {failed}")
    return number.value


@dataclass
class _Device:
    """The cells on the device, and the scratch buffer of the copies. They live until the next start."""

    cells: Tensor  # the struct `Cells` of the source: 8 words of 8 bytes
    scratch: Tensor | None

    @classmethod
    def make(cls, fabric: Fabric) -> "_Device":
        cells = torch.zeros(8, dtype=torch.int64, device="cuda")
        scratch = torch.zeros(_SCRATCH_BYTES, dtype=torch.uint8, device="cuda") if fabric.copies else None
        for name in ("begin_carrying", "carry") if fabric.copies else ("occupy",):
            _compiled(name)
        torch.cuda.synchronize()  # other streams will use them
        return cls(cells, scratch)


@dataclass
class Wires:
    """The state of both wires on both clocks."""

    fabric: Fabric
    device: _Device | None = None
    host_free_s: dict[Wire, float] = field(default_factory=lambda: dict.fromkeys(WIRES, 0.0))
    host_busy_s: dict[Wire, float] = field(default_factory=lambda: dict.fromkeys(WIRES, 0.0))
    host_moved_bytes: dict[Wire, float] = field(default_factory=lambda: dict.fromkeys(WIRES, 0.0))
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def make(cls, fabric: Fabric) -> "Wires":
        return cls(fabric, _Device.make(fabric) if torch.cuda.is_available() else None)

    def occupy_host(self, transfer: Transfer, not_before_s: float) -> float:
        """Start a transfer. Return the instant of `time.perf_counter` at which it ends."""
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
        """The kernels that occupy the wires for one transfer, to be launched in order on one stream.

        `span`: three words on the device that nothing else uses meanwhile; needed for copies.
        """
        assert self.device is not None, "no CUDA device when the fabric was started"
        occupied_ns = [round(transfer.occupied_s[wire] * 1e9) for wire in WIRES]
        moved = [transfer.moved_bytes[wire] for wire in WIRES]
        latency_ns = round(transfer.latency_s * 1e9)
        scratch = self.device.scratch
        if scratch is None:
            return [Kernel("occupy", [self.device.cells, *occupied_ns, *moved, latency_ns])]
        # Both wires carry the same bytes, one after the other; memory traffic is counted once.
        num_words = int(max(moved)) // _WORD_BYTES
        mask = scratch.numel() // 2 // _WORD_BYTES - 1
        wire_s = max(*transfer.occupied_s.values(), 1e-9)
        num_blocks = min(
            round(max(moved) / wire_s / 1e9 / _GIGABYTES_PER_S_OF_A_BLOCK), num_words * _WORD_BYTES // _CHUNK_BYTES
        )
        return [
            Kernel("begin_carrying", [self.device.cells, *occupied_ns, *moved, num_words, span]),
            Kernel("carry", [span, scratch, mask, num_words, latency_ns], max(num_blocks, 1), _THREADS_OF_A_BLOCK),
        ]

    def busy_s(self) -> dict[str, float]:
        """Seconds of traffic, without waiting and latency."""
        seen = self._device_cells()[4:6].tolist()
        return {wire: self.host_busy_s[wire] + busy_ns * 1e-9 for wire, busy_ns in zip(WIRES, seen, strict=True)}

    def moved_bytes(self) -> dict[str, float]:
        seen = self._device_cells()[6:8].view(torch.float64).tolist()
        return {wire: self.host_moved_bytes[wire] + moved for wire, moved in zip(WIRES, seen, strict=True)}

    def _device_cells(self) -> Tensor:
        if self.device is None:
            return torch.zeros(8, dtype=torch.int64)
        torch.cuda.synchronize()
        return self.device.cells.cpu()


def sleep_until(instant_s: float) -> None:
    """Wait until this instant of `time.perf_counter`: sleep, then spin for the last moment."""
    left_s = instant_s - time.perf_counter()
    if left_s > _SPIN_S:
        time.sleep(left_s - _SPIN_S)
    while time.perf_counter() < instant_s:
        time.sleep(0)
