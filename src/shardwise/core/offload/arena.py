"""Host memory of one rank: one piece, sized once, pinned as a whole.

Not torch's pinned allocator, which rounds every request up to a power of two. And one registration, not several: CUDA
copies from and to memory that lies in one of them.
"""

import errno
import logging
import mmap
import resource
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from ...base.direct_io import ALIGNMENT
from ...base.errors import NoRoomError, StoreError
from ...base.intervals import round_up

logger = logging.getLogger("shardwise")


class Arena:
    """Zeros, given out piece by piece. Its tensors keep the memory; closing it takes the pin away."""

    def __init__(self, num_bytes: int, pin: bool) -> None:
        self.num_bytes = num_bytes
        self.taken_bytes = 0
        self._row = _zeros(num_bytes)
        self._unpin: weakref.finalize[..., Arena] | None = None
        if pin and num_bytes and _is_pinned_now(self._row):
            self._unpin = weakref.finalize(self, _unregister, self._row)
            self._unpin.atexit = False  # the driver does it, and may be gone by then

    @property
    def is_pinned(self) -> bool:
        return self._unpin is not None and self._unpin.alive

    def take(self, num_elems: int, dtype: torch.dtype, what: str) -> Tensor:
        """The next piece, as a row of this many elements; it begins at a multiple of `ALIGNMENT`."""
        size = num_elems * dtype.itemsize
        if self.taken_bytes + round_up(size, ALIGNMENT) > self.num_bytes:
            raise StoreError(
                f"{what} needs {round_up(size, ALIGNMENT)} bytes, and {self.num_bytes - self.taken_bytes} of the "
                f"arena's {self.num_bytes} are left: size it with arena_bytes over all its pieces"
            )
        begin = self.taken_bytes
        self.taken_bytes += round_up(size, ALIGNMENT)
        return self._row[begin : begin + size].view(dtype)

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor is a piece of this memory, or a view of one."""
        if tensor.device.type != "cpu" or not self.num_bytes:
            return False
        return tensor.untyped_storage().data_ptr() == self._row.data_ptr()

    def close(self) -> None:
        if self._unpin is not None:
            self._unpin()


def passing(num_elems: int, dtype: torch.dtype) -> Tensor:
    """Zeros for a moment, which go back to the system with the tensor. Those of malloc would stay: where a large tensor
    was it finds no place for another of its size, and takes more and more of the system."""
    num_bytes = num_elems * dtype.itemsize
    return _zeros(num_bytes)[:num_bytes].view(dtype)


def _zeros(num_bytes: int) -> Tensor:
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        # Private: memory that is shared has no huge pages where the system is set up as it comes.
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
    # A child, such as a data loader's worker, would be given a copy of every page that is pinned.
    memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _is_pinned_now(row: Tensor) -> bool:
    if not torch.cuda.is_available():
        _warn(row, "there is no CUDA device")
        return False
    row.zero_()  # pages come into being here, by many threads; to register them is then fast
    runtime = torch.cuda.cudart()
    refused = runtime.cudaHostRegister(row.data_ptr(), row.numel(), 0)
    if refused == runtime.cudaError.success:
        return True
    _take_last_error()
    _warn(row, f"CUDA: {runtime.cudaGetErrorString(refused)}")
    return False


def _take_last_error() -> None:
    """CUDA keeps it for whoever launches a kernel next, which would be the training."""
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
