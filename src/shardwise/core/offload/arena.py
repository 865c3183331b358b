"""Pinned host memory of one rank: an arena that is sized once and pinned as a whole, and buffers that are reused.

torch's own pinned allocator rounds every request up to a power of two. The arena is registered with CUDA once, because
CUDA only copies from and to memory inside a single registration.
"""

import errno
import logging
import mmap
import resource
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from ...base.direct_io import ALIGNMENT
from ...base.errors import NoRoomError, StoreError
from ...base.intervals import round_up

logger = logging.getLogger("shardwise")


class Arena:
    """Zeroed memory, taken piece by piece. Its tensors keep the memory alive; `close` unpins it."""

    def __init__(self, num_bytes: int, pin: bool) -> None:
        self.num_bytes = num_bytes
        self.taken_bytes = 0
        self._row = _zeros(num_bytes)
        self._unpin: weakref.finalize[..., Arena] | None = None
        if pin and num_bytes and _is_pinned_now(self._row):
            self._unpin = weakref.finalize(self, _unregister, self._row)
            self._unpin.atexit = False  # at exit the driver unpins it, and may be gone by then

    @property
    def is_pinned(self) -> bool:
        return self._unpin is not None and self._unpin.alive

    def take(self, num_elems: int, dtype: torch.dtype, what: str) -> Tensor:
        """Return the next piece as a row of this many elements; it begins at a multiple of `ALIGNMENT`."""
        size = num_elems * dtype.itemsize
        if self.taken_bytes + round_up(size, ALIGNMENT) > self.num_bytes:
            raise StoreError(
                f"{what} needs {round_up(size, ALIGNMENT)} bytes, and {self.num_bytes - self.taken_bytes} of the "
                f"arena's {self.num_bytes} are left: size it with padded_bytes over all its pieces"
            )
        begin = self.taken_bytes
        self.taken_bytes += round_up(size, ALIGNMENT)
        return self._row[begin : begin + size].view(dtype)

    def owns(self, tensor: Tensor) -> bool:
        """Return True for a piece of this memory, or a view of one."""
        if tensor.device.type != "cpu" or not self.num_bytes:
            return False
        return tensor.untyped_storage().data_ptr() == self._row.data_ptr()

    def close(self) -> None:
        if self._unpin is not None:
            self._unpin()


def temporary_zeros(num_elems: int, dtype: torch.dtype) -> Tensor:
    """A temporary tensor of zeros, whose memory goes back to the system with it. malloc would keep the memory without
    reusing it for the next large tensor, and take more and more from the system."""
    num_bytes = num_elems * dtype.itemsize
    return _zeros(num_bytes)[:num_bytes].view(dtype)


def _zeros(num_bytes: int) -> Tensor:
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        # Private: by default the system has no huge pages for shared memory.
        memory = mmap.mmap(-1, round_up(num_bytes, ALIGNMENT), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise NoRoomError(
            f"the system refuses {num_bytes} bytes of host memory for state that rests there ({error.strerror}): "
            f"let less rest on the host, or raise the limit (ulimit -v)"
        ) from error
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without them
            raise
    # A child, such as a data loader's worker, would get a copy of every pinned page.
    memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _is_pinned_now(row: Tensor) -> bool:
    if not torch.cuda.is_available():
        _warn(row, "there is no CUDA device")
        return False
    row.zero_()  # many threads allocate the pages here; registering them is then fast
    runtime = torch.cuda.cudart()
    refused = runtime.cudaHostRegister(row.data_ptr(), row.numel(), 0)
    if refused == runtime.cudaError.success:
        return True
    _take_last_error()
    _warn(row, f"CUDA: {runtime.cudaGetErrorString(refused)}")
    return False


def _take_last_error() -> None:
    """Clear CUDA's last error, which the next kernel launch would report otherwise."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda").add_(1)


def _unregister(row: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(row.data_ptr())


def _warn(row: Tensor, why: str) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    logger.warning(
        "%d bytes of host memory could not be pinned (%s): they stay pageable, and copies to and from the device are "
        "slower and wait for each other. The limit of locked memory (RLIMIT_MEMLOCK, ulimit -l) is %s; raise it "
        "(ulimit -l unlimited; Docker: --ulimit memlock=-1), or let less rest on the host.",
        row.numel(),
        why,
        limit,
    )


class HostBuffer:
    """A reusable piece of host memory."""

    def __init__(self, num_bytes: int, pin: bool) -> None:
        self.num_bytes = round_up(num_bytes, ALIGNMENT)
        self._arena = Arena(self.num_bytes, pin)  # pinned as long as it lives
        self.row = self._arena.take(self.num_bytes, torch.uint8, "activations")


class HostBuffers:
    """A pool of host buffers. If sizes do not vary from step to step, nothing is allocated after the first one.

    If no free buffer is large enough, the largest free one is replaced by a new one, so there are never more buffers
    than were lent at once. `settle` waits until no buffer is copied from or to.
    """

    def __init__(self, pin: bool, settle: Callable[[], None]) -> None:
        self._pin = pin
        self._settle = settle
        self._free: list[HostBuffer] = []  # by size
        # The garbage collector may return one at any moment; `lend` sorts them in.
        self._returned: deque[HostBuffer] = deque()
        self.held_bytes = self.peak_bytes = 0

    @property
    def lent_bytes(self) -> int:
        return self.held_bytes - sum(buffer.num_bytes for buffer in (*self._free, *self._returned))

    def lend(self, num_bytes: int) -> HostBuffer:
        """Return a buffer of at least this many bytes."""
        while self._returned:
            buffer = self._returned.popleft()
            self._free.insert(bisect_left(self._free, buffer.num_bytes, key=_size), buffer)
        found = bisect_left(self._free, num_bytes, key=_size)
        if found < len(self._free):
            return self._free.pop(found)
        if self._free:
            self._settle()
            self.held_bytes -= self._free.pop().num_bytes
        buffer = HostBuffer(num_bytes, self._pin)
        self.held_bytes += buffer.num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return buffer

    def take_back(self, buffer: HostBuffer) -> None:
        self._returned.append(buffer)


def _size(buffer: HostBuffer) -> int:
    return buffer.num_bytes
