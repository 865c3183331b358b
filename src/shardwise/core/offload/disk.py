"""Bytes on a disk, in regions of one file of this rank, which has no name: it is gone when the process is.

Requests are cut into parts that threads move at the same time, around the page cache where the file system lets them.
A request waits for earlier ones that touch the same blocks, unless all of them read. The first thing that goes wrong is
kept, and every later call says it again: state that was lost is not trained on.
"""

import ctypes
import errno
import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ...base.direct_io import ALIGNMENT, is_direct
from ...base.errors import StoreError
from ...base.intervals import round_up
from ..native.block_moves import moves
from .blocks import Blocks, memory_of
from .region import Part, Pending, Region
from .unnamed_file import reserve
from .workers import Workers

__all__ = ["Disk", "Pending", "Region"]

_NUM_THREADS = 8  # that read, and as many that write: while some sum, others keep the disk at work
_FIXES = {
    errno.ENOSPC: "make room there, or name a folder on another disk",
    errno.EDQUOT: "raise the quota, or name a folder on another disk",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
}
_FIX = "replace the disk, or name a folder on another one"


class Disk:
    """Room for so many bytes in a folder that is there, all of it reserved now.

    `library` is the host's C: with it, threads need less of the processor and wait less for the interpreter's lock.
    """

    def __init__(self, folder: Path, num_bytes: int, library: ctypes.CDLL | None = None) -> None:
        self.folder = folder
        self.reserved_bytes = round_up(num_bytes, ALIGNMENT)
        self.read_bytes = 0  # as asked for; so are those written
        self.written_bytes = 0
        self._regions: list[Region] = []
        self._taken_bytes = 0
        # Requests are in the queues in the order of their regions' lists; so nobody waits for one that comes later.
        self._lock = threading.Lock()
        self._kept = _Kept()
        self._file = reserve(folder, self.reserved_bytes)
        self._blocks = Blocks(self._file, moves(library), 2 * _NUM_THREADS)
        self._readers = Workers("shardwise-fetch", _NUM_THREADS)
        self._writers = Workers("shardwise-put", _NUM_THREADS)
        # Also when the interpreter exits.
        self._end = weakref.finalize(self, _end, folder, self._kept, self._readers, self._writers, self._file)

    @property
    def is_direct(self) -> bool:
        """Whether it goes around the page cache."""
        return is_direct(self._file)

    def region(self, num_bytes: int, what: str) -> Region:
        """The next one; `what` names it in errors."""
        left = self.reserved_bytes - self._taken_bytes
        if num_bytes > left:
            raise StoreError(
                f"{what} needs {num_bytes} bytes, and {left} of the {self.reserved_bytes} reserved in {self.folder} "
                f"are left: size it with disk_bytes over all its regions"
            )
        region = Region(what, self._taken_bytes, num_bytes)
        self._taken_bytes += round_up(num_bytes, ALIGNMENT)
        with self._lock:
            self._regions.append(region)
        return region

    def put(self, region: Region, source: Tensor, at: int = 0) -> Pending:
        """Start to write a tensor's bytes, to byte `at` of a region and on. It must not change before that is done."""
        return self._start(region, source, at, is_put=True)

    def fetch(self, region: Region, into: Tensor, at: int = 0) -> Pending:
        """Start to read bytes of a region, from byte `at` on, into a tensor. It has them when that is done."""
        return self._start(region, into, at, is_put=False)

    def flush(self) -> None:
        """Wait for all that is under way."""
        with self._lock:
            under_way = [pending for region in self._regions for pending in region.under_way()]
        for pending in under_way:
            pending.settle()
        self._kept.require_good()

    def close(self) -> None:
        """Give the room back. What threads have begun is finished, the rest is dropped."""
        self._end()

    def _start(self, region: Region, tensor: Tensor, at: int, is_put: bool) -> Pending:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise StoreError(
                f"{region.what}: only contiguous tensors on the host go to a disk and come from it, and this one is on "
                f"{tensor.device} with shape {tuple(tensor.shape)} and strides {tensor.stride()}: copy it first"
            )
        stop = at + tensor.nbytes
        if not 0 <= at <= stop <= region.num_bytes:
            raise StoreError(
                f"bytes {at} to {stop} are not all in {region.what}, which has {region.num_bytes}: ask for less"
            )
        parts = region.parts(at, stop, tensor.data_ptr())
        pending = Pending(at, stop, is_put, len(parts))
        memory = memory_of(tensor)
        with self._lock:
            self._kept.require_good()
            if is_put:
                region.note_written(at, stop)
                self.written_bytes += tensor.nbytes
            else:
                region.require_written(at, stop)
                self.read_bytes += tensor.nbytes
            earlier = region.add(pending)
            workers = self._writers if is_put else self._readers
            for part in parts:
                piece = memory[part.start - at : part.stop - at]
                workers.add(_Job(self, region, part, piece, tensor, pending, earlier).do)
        return pending

    def _move(self, region: Region, part: Part, memory: memoryview, is_put: bool) -> None:
        """One part, by one of the threads. Whatever happens is kept, because whoever waits must hear of it."""
        try:
            (self._blocks.put if is_put else self._blocks.fetch)(region, part, memory)
        except OSError as error:
            self._keep(region, part, is_put, error.strerror or str(error), _FIXES.get(error.errno or 0, _FIX), error)
        except StoreError as error:
            self._keep(region, part, is_put, str(error), _FIX, error)
        except Exception as error:  # noqa: BLE001
            self._keep(region, part, is_put, repr(error), "report this, it is a bug", error)

    def _keep(self, region: Region, part: Part, is_put: bool, why: str, fix: str, cause: Exception) -> None:
        told = StoreError(
            f"{self.folder}: bytes {part.start} to {part.stop} of {region.what} could not be "
            f"{'written' if is_put else 'read'}: {why}. What rests on this disk is lost: {fix}, and resume from the "
            f"last checkpoint, which is as it was"
        )
        told.__cause__ = cause
        self._kept.keep(told)


@dataclass(frozen=True, slots=True)
class _Job:
    disk: Disk
    region: Region
    part: Part
    memory: memoryview
    tensor: Tensor  # keeps the memory
    pending: Pending
    earlier: list[Pending]

    def do(self) -> None:
        for each in self.earlier:
            each.settle()
        if self.disk._kept.failure is None:
            self.disk._move(self.region, self.part, self.memory, self.pending.is_put)
        self.pending.end_part(self.disk._kept.failure)


class _Kept:
    """The first thing that went wrong."""

    def __init__(self) -> None:
        self.failure: StoreError | None = None
        self._lock = threading.Lock()

    def keep(self, failure: StoreError) -> None:
        with self._lock:
            self.failure = self.failure or failure

    def require_good(self) -> None:
        if self.failure is not None:
            raise StoreError(str(self.failure)) from self.failure


def _end(folder: Path, kept: _Kept, readers: Workers, writers: Workers, file: int) -> None:
    kept.keep(StoreError(f"{folder}: the disk was closed, and nothing of it can be read or written any more"))
    readers.close()
    writers.close()
    os.close(file)
