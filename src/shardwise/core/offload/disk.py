"""Bytes on a disk, in regions of one file per rank. The file has no name, so it is gone when the process ends.

Requests are cut into parts that threads move in parallel, around the page cache where the file system allows it. A
request waits for earlier ones that touch the same blocks, unless all of them read. The first failure is stored, and
every later call raises it again, so that training never continues with lost state.
"""

import ctypes
import errno
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import mkstemp

from torch import Tensor

from ...base.direct_io import ALIGNMENT, go_direct, is_direct
from ...base.errors import NoRoomError, PlaceError, StoreError
from ...base.intervals import round_up
from ..native.checked_io import checked_io
from .region import Blocks, Pending, Region, RegionPart, memory_of

__all__ = ["Disk", "Pending", "Region"]

_NUM_THREADS = 8  # readers, and as many writers: while some compute checksums, others keep the disk busy
_FIXES = {
    errno.ENOSPC: "make room there, or name a folder on another disk",
    errno.EDQUOT: "raise the quota, or name a folder on another disk",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
}
_FIX = "replace the disk, or name a folder on another one"
# Errors of file systems without unnamed files (the last one is that of old kernels), and of full ones.
_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EISDIR)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Disk:
    """Room for `num_bytes` in an existing folder, all of it reserved now.

    `library` is the compiled C code: threads need less processor time with it, and wait less for the interpreter's
    lock.
    """

    def __init__(self, folder: Path, num_bytes: int, library: ctypes.CDLL | None = None) -> None:
        self.folder = folder
        self.reserved_bytes = round_up(num_bytes, ALIGNMENT)
        self.read_bytes = 0  # as requested, without alignment; so are `written_bytes`
        self.written_bytes = 0
        self._regions: list[Region] = []
        self._taken_bytes = 0
        # Held while a request enters its region's list and the queue, so that both have the same order: no thread waits
        # for a request that is behind it in the queue.
        self._lock = threading.Lock()
        self._failure = _Failure()
        self._file = reserve(folder, self.reserved_bytes)
        self._blocks = Blocks(self._file, checked_io(library), 2 * _NUM_THREADS)
        self._readers = Workers("shardwise-fetch", _NUM_THREADS)
        self._writers = Workers("shardwise-put", _NUM_THREADS)
        # Also when the interpreter exits.
        self._end = weakref.finalize(self, _end, folder, self._failure, self._readers, self._writers, self._file)

    @property
    def is_direct(self) -> bool:
        """True if reads and writes go around the page cache."""
        return is_direct(self._file)

    def region(self, num_bytes: int, what: str) -> Region:
        """Reserve the next region; `what` names it in errors."""
        left = self.reserved_bytes - self._taken_bytes
        if num_bytes > left:
            raise StoreError(
                f"{what} needs {num_bytes} bytes, and {left} of the {self.reserved_bytes} reserved in {self.folder} "
                f"are left: size it with padded_bytes over all its regions"
            )
        region = Region(what, self._taken_bytes, num_bytes)
        self._taken_bytes += round_up(num_bytes, ALIGNMENT)
        with self._lock:
            self._regions.append(region)
        return region

    def put(self, region: Region, source: Tensor, at: int = 0) -> Pending:
        """Start to write a tensor to a region, from byte `at` on. The tensor must not change before that is done."""
        return self._start(region, source, at, is_put=True)

    def fetch(self, region: Region, into: Tensor, at: int = 0) -> Pending:
        """Start to read a region, from byte `at` on, into a tensor."""
        return self._start(region, into, at, is_put=False)

    def flush(self) -> None:
        """Wait for every request in flight."""
        with self._lock:
            under_way = [pending for region in self._regions for pending in region.under_way()]
        for pending in under_way:
            pending.settle()
        self._failure.require_none()

    def close(self) -> None:
        """Release the space. Parts that a thread has begun are finished, the rest is dropped."""
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
            self._failure.require_none()
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

    def _move(self, region: Region, part: RegionPart, memory: memoryview, is_put: bool) -> None:
        """Move one part, in one of the threads. Any failure is stored for the callers that wait."""
        try:
            (self._blocks.put if is_put else self._blocks.fetch)(region, part, memory)
        except OSError as error:
            self._fail(region, part, is_put, error.strerror or str(error), _FIXES.get(error.errno or 0, _FIX), error)
        except StoreError as error:
            self._fail(region, part, is_put, str(error), _FIX, error)
        except Exception as error:  # noqa: BLE001
            self._fail(region, part, is_put, repr(error), "report this, it is a bug", error)

    def _fail(self, region: Region, part: RegionPart, is_put: bool, why: str, fix: str, cause: Exception) -> None:
        failure = StoreError(
            f"{self.folder}: bytes {part.start} to {part.stop} of {region.what} could not be "
            f"{'written' if is_put else 'read'}: {why}. What rests on this disk is lost: {fix}, and resume from the "
            f"last checkpoint, which is as it was"
        )
        failure.__cause__ = cause
        self._failure.keep(failure)


@dataclass(frozen=True, slots=True)
class _Job:
    disk: Disk
    region: Region
    part: RegionPart
    memory: memoryview
    tensor: Tensor  # keeps the memory alive
    pending: Pending
    earlier: list[Pending]

    def do(self) -> None:
        for each in self.earlier:
            each.settle()
        if self.disk._failure.first is None:
            self.disk._move(self.region, self.part, self.memory, self.pending.is_put)
        self.pending.end_part(self.disk._failure.first)


class _Failure:
    """The first failure of a disk."""

    def __init__(self) -> None:
        self.first: StoreError | None = None
        self._lock = threading.Lock()

    def keep(self, failure: StoreError) -> None:
        with self._lock:
            self.first = self.first or failure

    def require_none(self) -> None:
        if self.first is not None:
            raise StoreError(str(self.first)) from self.first


class Workers:
    """Threads that run jobs in the order in which they were added.

    Not an executor: that takes no more work once the main thread has ended, and a save may still run then.
    """

    def __init__(self, name: str, num: int) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._jobs,), name=f"{name}-{number}", daemon=True)
            for number in range(num)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, job: Callable[[], None]) -> None:
        """Queue a job, which must not raise."""
        self._jobs.put(job)

    def close(self) -> None:
        """Return when all jobs are done."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # the last job may hold the last reference to their owner
                thread.join()


def _end(folder: Path, failure: _Failure, readers: Workers, writers: Workers, file: int) -> None:
    failure.keep(StoreError(f"{folder}: the disk was closed, and nothing of it can be read or written any more"))
    readers.close()
    writers.close()
    os.close(file)


def _work(jobs: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds tensors, and the next one may not come for a long time


def reserve(folder: Path, num_bytes: int) -> int:
    """Create an unnamed file of this size in an existing folder; its descriptor goes around the page cache."""
    if not folder.is_dir():
        raise PlaceError(
            f"{folder} is not a folder, and state should rest there on disk: make it, or name one that is there"
        )
    seen = os.statvfs(folder)
    free = seen.f_bavail * seen.f_frsize
    if num_bytes > free and seen.f_blocks:  # checked first, as trying would fill the disk; 0: unknown
        raise _no_room(folder, num_bytes, free)
    try:
        file = _open_unnamed(folder)
    except OSError as error:
        raise PlaceError(
            f"{folder}: no file can be made there, and state should rest there on disk ({error.strerror}): "
            f"let it be written to, or name another folder"
        ) from error
    try:
        if num_bytes:
            # If the file system cannot do it, the C library writes single bytes, which O_DIRECT would refuse.
            os.posix_fallocate(file, 0, num_bytes)
        go_direct(file)
    except OSError as error:
        os.close(file)
        if error.errno in _NO_ROOM:
            raise _no_room(folder, num_bytes, free, error.strerror) from error
        raise PlaceError(
            f"{folder}: {num_bytes} bytes could not be reserved there ({error.strerror}): name another folder"
        ) from error
    return file


def _open_unnamed(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno not in _NO_UNNAMED_FILES:
            raise
    file, path = mkstemp(prefix=".shardwise-", dir=folder)
    Path(path).unlink()
    return file


def _no_room(folder: Path, num_bytes: int, free: int, why: str | None = None) -> NoRoomError:
    return NoRoomError(
        f"{folder}: {num_bytes} bytes are needed for state that rests on disk, and {free} are free there"
        f"{f' ({why})' if why else ''}: make room, name a folder on a larger disk, or let less rest on disk"
    )
