"""A file without a name: nobody can open it, and nothing is left of it when its process ends, however it ends."""

import errno
import os
from pathlib import Path
from tempfile import mkstemp

from ...base.direct_io import go_direct
from ...base.errors import NoRoomError, PlaceError

# Of file systems that have no files without names; the last is what old kernels say.
_NOT_HERE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EISDIR)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def reserve(folder: Path, num_bytes: int) -> int:
    """A descriptor of a new file in a folder that is there, with its room taken; it goes around the page cache."""
    if not folder.is_dir():
        raise PlaceError(
            f"{folder} is not a folder, and state should rest there on disk: make it, or name one that is there"
        )
    seen = os.statvfs(folder)
    free = seen.f_bavail * seen.f_frsize
    if num_bytes > free and seen.f_blocks:  # before it is tried, which would take what others need; 0: it does not tell
        raise _no_room(folder, num_bytes, free)
    try:
        file = _open_nameless(folder)
    except OSError as error:
        raise PlaceError(
            f"{folder}: no file can be made there, and state should rest there on disk ({error.strerror}): "
            f"let it be written to, or name another folder"
        ) from error
    try:
        if num_bytes:
            # Where the file system cannot do it, the C library writes single bytes: so before O_DIRECT.
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


def _open_nameless(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
    file, path = mkstemp(prefix=".shardwise-", dir=folder)
    Path(path).unlink()
    return file


def _no_room(folder: Path, num_bytes: int, free: int, why: str | None = None) -> NoRoomError:
    return NoRoomError(
        f"{folder}: {num_bytes} bytes are needed for state that rests on disk, and {free} are free there"
        f"{f' ({why})' if why else ''}: make room, name a folder on a larger disk, or let less rest on disk"
    )
