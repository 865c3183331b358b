"""Pinned host memory of one rank: an arena that is sized once and pinned as a whole, and buffers that are reused.

torch's own pinned allocator is not used, because it rounds every request up to a power of two. The arena is registered
with CUDA as a whole, because CUDA cannot copy a range that crosses two registrations.
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
from operator import attrgetter

import torch
from torch import Tensor

from ...base.errors import NoRoomError, StoreError
from ...base.files import ALIGNMENT
from ...base.intervals import round_up

logger = logging.getLogger("shardwise")
_SIZE = attrgetter("num_bytes")


class Arena:
    """Zeroed memory, taken piece by piece. Its tensors keep the memory alive; it is pinned while this object lives."""

    def __init__(self, num_bytes: int, pin: bool) -> None:
        self.num_bytes = num_bytes
        self.taken_bytes = 0
        self.row = _zeros(num_bytes)
        self.is_pinned = pin and num_bytes > 0 and _pin(self.row)
        if self.is_pinned:
            # Not at exit: the driver unpins the memory itself, and may already be shut down.
            unpin = weakref.finalize(self, lambda row: torch.cuda.cudart().cudaHostUnregister(row.data_ptr()), self.row)
            unpin.atexit = False

    def take(self, num_elems: int, dtype: torch.dtype, what: str) -> Tensor:
        """Return the next piece as a row of this many elements; it begins at a multiple of `ALIGNMENT`."""
        size = num_elems * dtype.itemsize
        if self.taken_bytes + round_up(size, ALIGNMENT) > self.num_bytes:
            left, size = self.num_bytes - self.taken_bytes, round_up(size, ALIGNMENT)
            raise StoreError(f"{what} needs {size} bytes, and {left} of {self.num_bytes} are left: see padded_bytes")
        begin = self.taken_bytes
        self.taken_bytes += round_up(size, ALIGNMENT)
        return self.row[begin : begin + size].view(dtype)

    def owns(self, tensor: Tensor) -> bool:
        """Return True for a piece of this memory, or a view of one."""
        if tensor.device.type != "cpu" or not self.num_bytes:
            return False
        return tensor.untyped_storage().data_ptr() == self.row.data_ptr()


def temporary_zeros(num_elems: int, dtype: torch.dtype) -> Tensor:
    """Return a temporary tensor of zeros. Its memory goes back to the system when it is freed. malloc would keep the
    memory without reusing it for the next large tensor, and take more and more from the system."""
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
            f"the system refuses {num_bytes} bytes of host memory for offloaded state ({error.strerror}): "
            f"offload less to the host, or raise the limit (ulimit -v)"
        ) from error
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: a kernel without huge pages
            raise
    # A child, such as a data loader's worker, would get a copy of every pinned page.
    memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _pin(row: Tensor) -> bool:
    """Register memory with CUDA. If CUDA refuses, log a warning and return False."""
    why = "there is no CUDA device"
    if torch.cuda.is_available():
        row.zero_()  # many threads allocate the pages here; registering them is then fast
        runtime = torch.cuda.cudart()
        refused = runtime.cudaHostRegister(row.data_ptr(), row.numel(), 0)
        if refused == runtime.cudaError.success:
            return True
        _take_last_error()
        why = f"CUDA: {runtime.cudaGetErrorString(refused)}"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    logger.warning(
        "%d bytes of host memory could not be pinned (%s): they stay pageable, and copies to and from the device are "
        "slower and wait for each other. The limit of locked memory (RLIMIT_MEMLOCK, ulimit -l) is %s; raise it "
        "(ulimit -l unlimited; Docker: --ulimit memlock=-1), or offload less to the host.",
        row.numel(),
        why,
        "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes",
    )
    return False


def _take_last_error() -> None:
    """Clear CUDA's last error, which the next kernel launch would report otherwise."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda").add_(1)


class HostBuffers:
    """A pool of host buffers. If sizes do not vary from step to step, nothing is allocated after the first step.

    If no free buffer is large enough, the largest free one is replaced by a new one, so there are never more buffers
    than were lent at once. `settle` waits until no copy reads or writes a free buffer.
    """

    def __init__(self, pin: bool, settle: Callable[[], None]) -> None:
        self._pin = pin
        self._settle = settle
        self._free: list[Arena] = []  # sorted by size
        # The garbage collector may return a buffer at any moment; `lend` moves it to `_free`.
        self._returned: deque[Arena] = deque()
        self.held_bytes = 0

    def lend(self, num_bytes: int) -> Arena:
        """Return a buffer of at least this many bytes."""
        while self._returned:
            buffer = self._returned.popleft()
            self._free.insert(bisect_left(self._free, buffer.num_bytes, key=_SIZE), buffer)
        found = bisect_left(self._free, num_bytes, key=_SIZE)
        if found < len(self._free):
            return self._free.pop(found)
        if self._free:
            self._settle()
            self.held_bytes -= self._free.pop().num_bytes
        buffer = Arena(round_up(num_bytes, ALIGNMENT), self._pin)
        self.held_bytes += buffer.num_bytes
        return buffer

    def take_back(self, buffer: Arena) -> None:
        self._returned.append(buffer)
