"""Reads and writes that go around the page cache where the file system allows it (O_DIRECT).

The disk reaches its full speed, the processor has less to copy, and the contents of the page cache stay.
Lengths, offsets and addresses must be multiples of `ALIGNMENT`.
"""

import errno
import fcntl
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

# O_DIRECT's alignment of lengths, offsets and addresses, on all common disks.
ALIGNMENT = 4096


def open_direct(path: Path, flags: int) -> int:
    """Open a file around the page cache, or through it where the file system has no O_DIRECT."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)


def go_direct(file: int) -> None:
    """Switch an open descriptor to O_DIRECT, where the file system has it."""
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def is_direct(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


def read_at(file: int, view: memoryview, offset: int) -> int:
    """Fill the view from a place in a file, both aligned; returns the bytes read before the file ended."""
    done = 0
    while done < len(view):
        num = _run(file, partial(os.preadv, file, [view[done:]], offset + done))
        if num == 0:
            break
        done += num
    return done


def write_at(file: int, view: memoryview, offset: int) -> None:
    """Write all of the view to a place in a file, both aligned."""
    done = 0
    while done < len(view):
        done += _run(file, partial(os.pwrite, file, view[done:], offset + done))


def _run(file: int, do: Callable[[], int]) -> int:
    """Run a read or write; switch O_DIRECT off for file systems that accept it when opening and refuse it here."""
    try:
        return do()
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # Another thread may have switched it off in the meantime, so the flags are not checked.
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)
    return do()
