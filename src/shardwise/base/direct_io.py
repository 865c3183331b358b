"""Reads and writes that go around the page cache where the file system lets them (O_DIRECT).

The disk is then as fast as it can be, the processor has less to copy, and what the run keeps in the cache stays there.
Lengths, offsets and addresses must be multiples of `ALIGNMENT`.
"""

import errno
import fcntl
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

# What O_DIRECT asks of lengths, offsets and addresses, on every disk that is sold.
ALIGNMENT = 4096


def open_direct(path: Path, flags: int) -> int:
    """A descriptor that goes around the page cache, if there is a way around it."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)


def go_direct(file: int) -> None:
    """Let a descriptor that is open go around the page cache from now on, if there is a way around it."""
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def is_direct(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


def read_at(file: int, view: memoryview, offset: int) -> int:
    """Fill the view from a place in a file, both aligned; returns how much there was before the file ended."""
    done = 0
    while done < len(view):
        num = _or_through_the_cache(file, partial(os.preadv, file, [view[done:]], offset + done))
        if num == 0:
            break
        done += num
    return done


def write_at(file: int, view: memoryview, offset: int) -> None:
    """Write all of the view to a place in a file, both aligned."""
    done = 0
    while done < len(view):
        done += _or_through_the_cache(file, partial(os.pwrite, file, view[done:], offset + done))


def _or_through_the_cache(file: int, do: Callable[[], int]) -> int:
    """For file systems that open files this way and then do not read or write them."""
    try:
        return do()
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # Another thread may have found out in the meantime: so whatever the flags are now, it is tried once more.
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)
    return do()
