"""A checkpoint as a folder. One rank calls these functions.

A checkpoint is written next to its place, into `<path>.partial`. Its marker comes last, when the disk has everything
else, and only then is it renamed. The marker holds the digest of the index, so a checkpoint with a marker is as it was
written. To replace a checkpoint takes two renames: in between, the new one is complete under its other name, and is
found there.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..base.errors import CheckpointError, DamageError, SaveError
from ..base.regular_file import read_regular

INDEX, MARKER = "index.json", "complete"
# Half a million tensors with two moments each, or two million without; a marker is 64 characters.
MAX_INDEX_BYTES, MAX_MARKER_BYTES = 256 << 20, 1 << 10


@contextmanager
def os_errors_as(kind: type[CheckpointError], what: str) -> Iterator[None]:
    """Raise OSErrors as another class, with their reason after `what`."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}") from error


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def partial_of(path: Path) -> Path:
    return _beside(path, ".partial")


def replaced_of(path: Path) -> Path:
    return _beside(path, ".replaced")


def _beside(path: Path, ending: str) -> Path:
    path = path if path.name else path.absolute()  # "." has no name of its own
    return path.parent / f"{path.name}{ending}"


def find(path: Path) -> Path | None:
    """Return the folder of the complete checkpoint of this name, if there is one."""
    return next((place for place in (path, partial_of(path)) if (place / MARKER).is_file()), None)


def read_index(path: Path) -> tuple[Path, bytes]:
    """Return the folder of a complete checkpoint and the text of its index."""
    folder = find(path)
    if folder is None:
        raise _why_not(path)
    text = read_index_in(folder)
    if not is_sealed(folder, text):
        raise DamageError(f"{folder / INDEX} is not what was written: its digest differs from the marker's")
    return folder, text


def read_index_in(folder: Path) -> bytes:
    """Return the text of an index, whether its save finished or not."""
    return _read(folder / INDEX, MAX_INDEX_BYTES)


def is_sealed(folder: Path, text: bytes) -> bool:
    """Return whether the marker holds the digest of this index."""
    return _read(folder / MARKER, MAX_MARKER_BYTES).strip() == hashlib.sha256(text).hexdigest().encode()


def _read(path: Path, max_bytes: int) -> bytes:
    with os_errors_as(DamageError, f"cannot read {path}"):
        return read_regular(path, max_bytes)


def _why_not(path: Path) -> CheckpointError:
    if (path / INDEX).is_file() or partial_of(path).is_dir():
        return DamageError(
            f"the checkpoint {path} is incomplete: its save did not finish (no file {MARKER!r}); take an older one"
        )
    if not path.exists():
        return CheckpointError(f"there is no checkpoint {path}")
    return DamageError(f"{path} is not a checkpoint: it has no {INDEX!r} and no {MARKER!r}")


def begin(path: Path) -> Path:
    """Make an empty folder to write into."""
    if path.exists() and not (path.is_dir() and ((path / INDEX).is_file() or not any(path.iterdir()))):
        raise SaveError(f"{path} exists and is not a checkpoint, so it is not replaced: save to another path")
    partial = partial_of(path)
    with os_errors_as(SaveError, f"cannot make {partial}"):
        settle(path)
        partial.mkdir(parents=True)
    return partial


def settle(path: Path) -> None:
    """Remove the remains of a killed save; if it died between two renames, put the checkpoint in place."""
    if find(path) == partial_of(path):
        put_in_place(path)
    remove(partial_of(path))
    if find(path) is not None:
        remove(replaced_of(path))


def abandon(path: Path) -> None:
    """Remove the remains of a failed save, but never a complete checkpoint of which there is no other copy."""
    if find(path) != partial_of(path):
        with suppress(OSError):
            remove(partial_of(path))


def complete(path: Path, index: str) -> None:
    """Seal the content of the partial folder, and rename the folder to `path`."""
    partial, text = partial_of(path), index.encode()
    if len(text) > MAX_INDEX_BYTES:
        raise SaveError(
            f"cannot complete {partial}: its {INDEX} would have {len(text):,} bytes, and at most {MAX_INDEX_BYTES:,} "
            "are read: save fewer tensors"
        )
    with os_errors_as(SaveError, f"cannot complete {partial}"):
        _write(partial / INDEX, text)
        sync(partial)
        # The marker appears complete or not at all, also on a full disk or if the process dies.
        draft = partial / f"{MARKER}.draft"
        _write(draft, hashlib.sha256(text).hexdigest().encode())
        draft.rename(partial / MARKER)
        sync(partial)
        put_in_place(path)


def put_in_place(path: Path) -> None:
    """Rename the partial folder; the old one is removed afterwards, and comes back if the rename fails."""
    replaced = replaced_of(path)
    remove(replaced)
    if path.exists():
        path.rename(replaced)
    try:
        partial_of(path).rename(path)
    except OSError:
        if replaced.exists():
            replaced.rename(path)
        raise
    sync(path.parent)
    # The new one is in place even if the old one cannot be removed: a reader may prevent that (NFS).
    with suppress(OSError):
        remove(replaced)


def remove(folder: Path) -> None:
    """Remove a folder, its marker first, so that an interrupted removal leaves no checkpoint.

    Of a link, only the link is removed: its target may be another checkpoint.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    (folder / MARKER).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems (SMB, some of FUSE's) sync files only.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
