"""Reading files that a user named: regular files only, and no larger than expected.

A FIFO would wait for a writer, a device need not end, and a sparse file can be terabytes long. Each of them is refused
with an OSError that says why.
"""

import errno
import os
import stat
from pathlib import Path

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


def num_bytes_of(path: Path) -> int:
    """The length of a regular file, without opening it."""
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
