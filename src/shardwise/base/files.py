"""Files by their descriptors: regular files that a user named, and reads and writes around the page cache (O_DIRECT).

Only regular files are read; for others an OSError says why. Opening a FIFO would wait for a writer, and a device may
have no end. `read_regular` also takes a limit, because a sparse file can be terabytes long. With O_DIRECT, where the
file system allows it, the disk reaches its full speed, the processor copies less, and the page cache keeps its
contents. Lengths, offsets and addresses must then be multiples of `ALIGNMENT`.
"""

import errno
import fcntl
import os
import stat
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

# O_DIRECT's alignment of lengths, offsets and addresses, on all common disks.
ALIGNMENT = 4096
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFDIR: "a folder"}


def open_regular(path: Path) -> int:
    """Open a regular file for reading."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(file), path)
    except OSError:
        os.close(file)
        raise
    return file


class OpenFile:
    """A regular file that is open for reading. It is closed when the last reference to it is gone."""

    def __init__(self, path: Path) -> None:
        self.path, self.descriptor = path, open_regular(path)
        weakref.finalize(self, os.close, self.descriptor)
        self.num_bytes = os.fstat(self.descriptor).st_size


def num_bytes_of(path: Path) -> int:
    """Return the length of a regular file, without opening it."""
    status = path.stat()
    _require_regular(status, path)
    return status.st_size


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Read a whole file of at most `most_bytes`."""
    with os.fdopen(open_regular(path), "rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes > most_bytes:
            raise OSError(errno.EFBIG, f"it has {num_bytes:,} bytes, and at most {most_bytes:,} are read", str(path))
        return file.read(num_bytes)


def _require_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        code = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
        raise OSError(code, f"it is {kind}, and only regular files are read", str(path))


def enable_direct_io(file: int) -> None:
    """Switch an open descriptor to O_DIRECT, if the file system supports it."""
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def is_direct(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


def read_at(file: int, view: memoryview, offset: int) -> int:
    """Read from an offset until the view is full or the file ends; return the number of bytes. Both must be aligned."""
    done = 0
    while done < len(view):
        num = _run(file, partial(os.preadv, file, [view[done:]], offset + done))
        if num == 0:
            break
        done += num
    return done


def write_at(file: int, view: memoryview, offset: int) -> None:
    """Write the whole view at an offset in a file. Both must be aligned."""
    done = 0
    while done < len(view):
        done += _run(file, partial(os.pwrite, file, view[done:], offset + done))


def _run(file: int, do: Callable[[], int]) -> int:
    """Run a read or write. Some file systems accept O_DIRECT when it is set and refuse it here: then switch it off."""
    try:
        return do()
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # Another thread may have switched it off in the meantime, so the flags are not checked.
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)
    return do()
