"""A checkpoint as a folder, and the checkpoints of a run. One rank calls these functions.

A checkpoint is written into `<path>.partial`. When everything else is on disk, its marker, the file `complete`, is
written. Then the folder is renamed to `<path>`. The marker holds the digest of the index, which shows later whether the
index was changed. To replace a checkpoint takes two renames. Between them the new checkpoint is complete, but still
at `<path>.partial`; so `find` also looks there.

The checkpoints of a run are `step-000100` and so on, in one folder. Only the markers decide which of them are complete.
`latest` is a link to the newest complete one, for people and other tools; nothing here reads it.
"""

import errno
import hashlib
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..base.errors import CheckpointError, DamageError, SaveError
from ..base.files import read_regular

INDEX, MARKER = "index.json", "complete"
CHECKPOINTS = "checkpoints"  # the folder of all checkpoints in a run folder
INSIDE = "shardwise"  # our checkpoint in a folder of the Trainer or of Accelerate; further models: shardwise_1 ...
LATEST = "latest"
_NAME = re.compile(r"step-(\d{6,})(\.partial|\.replaced)?")
# Enough for half a million tensors with two moments each, or two million without. A marker is 64 characters.
MAX_INDEX_BYTES, MAX_MARKER_BYTES = 256 << 20, 1 << 10


@contextmanager
def os_errors_as(kind: type[CheckpointError], what: str) -> Iterator[None]:
    """Turn an OSError into an error of class `kind`, with its reason after `what`."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}") from error


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def partial_of(path: Path, ending: str = ".partial") -> Path:
    path = path if path.name else path.absolute()  # "." has no name of its own
    return path.parent / f"{path.name}{ending}"


def replaced_of(path: Path) -> Path:
    return partial_of(path, ".replaced")


def find(path: Path) -> Path | None:
    """Return the folder of the complete checkpoint of this name (`path` or its partial folder), or None."""
    return next((place for place in (path, partial_of(path)) if (place / MARKER).is_file()), None)


def _refuse(problem: str) -> None:
    raise DamageError(problem)


def read_index(path: Path, complain: Callable[[str], object] = _refuse) -> tuple[Path, bytes]:
    """Return the folder of a checkpoint and its index as text. Call `complain` if it is incomplete or was changed."""
    sealed, partial = find(path), partial_of(path)
    if sealed is None:
        if not (path / INDEX).is_file() and not partial.is_dir():
            if not path.exists():
                raise CheckpointError(f"there is no checkpoint {path}")
            raise DamageError(f"{path} is not a checkpoint: it has no {INDEX!r} and no {MARKER!r}")
        complain(f"{path} is incomplete: its save did not finish (no file {MARKER!r}); take an older one")
    folder = sealed or (path if (path / INDEX).is_file() else partial)
    text = _read(folder / INDEX, MAX_INDEX_BYTES)
    if sealed and _read(sealed / MARKER, MAX_MARKER_BYTES).strip() != hashlib.sha256(text).hexdigest().encode():
        complain(f"{folder / INDEX} is not what was written: its digest differs from the marker's")
    return folder, text


def _read(path: Path, max_bytes: int) -> bytes:
    with os_errors_as(DamageError, f"cannot read {path}"):
        return read_regular(path, max_bytes)


def begin(path: Path) -> Path:
    """Make the empty partial folder, into which a checkpoint is written."""
    if path.exists() and not (path.is_dir() and ((path / INDEX).is_file() or not any(path.iterdir()))):
        raise SaveError(f"{path} exists and is not a checkpoint, so it is not replaced: save to another path")
    partial = partial_of(path)
    with os_errors_as(SaveError, f"cannot make {partial}"):
        settle(path)
        partial.mkdir(parents=True)
    return partial


def settle(path: Path) -> None:
    """Remove what a killed save has left. If it was killed between the two renames, do the second one."""
    if find(path) == partial_of(path):
        put_in_place(path)
    remove(partial_of(path))
    if find(path) is not None:
        remove(replaced_of(path))


def abandon(path: Path) -> None:
    """Remove what a failed save has left, unless the partial folder is the only complete checkpoint."""
    if find(path) != partial_of(path):
        with suppress(OSError):
            remove(partial_of(path))


def complete(path: Path, index: str) -> None:
    """Write the index and the marker into the partial folder, and rename the folder to `path`."""
    partial, text = partial_of(path), index.encode()
    if len(text) > MAX_INDEX_BYTES:
        raise SaveError(f"cannot complete {partial}: its {INDEX} exceeds {MAX_INDEX_BYTES:,} bytes: save fewer tensors")
    with os_errors_as(SaveError, f"cannot complete {partial}"):
        (partial / INDEX).write_bytes(text)
        sync(partial / INDEX)
        sync(partial)
        # A rename is atomic: the marker exists with all of its content or not at all, even if the process dies.
        draft = partial / f"{MARKER}.draft"
        draft.write_text(hashlib.sha256(text).hexdigest())
        sync(draft)
        draft.rename(partial / MARKER)
        sync(partial)
        put_in_place(path)


def put_in_place(path: Path) -> None:
    """Rename the partial folder to `path`. Then remove the old checkpoint; if the rename fails, restore it."""
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
    # The save has succeeded even if the old checkpoint cannot be removed: on NFS a reader may prevent that.
    with suppress(OSError):
        remove(replaced)


def remove(folder: Path) -> None:
    """Remove a folder, its marker first, so that an interrupted removal leaves no folder that looks complete.

    If it is a link, only the link is removed: its target may be another checkpoint.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    (folder / MARKER).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on disk (fsync)."""
    # Some file systems flush only files that are open for writing; folders cannot be.
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems (SMB, some FUSE ones) can sync files but not folders.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def all_steps(root: Path) -> list[int]:
    """Return the steps of all checkpoints, oldest first, also of saves that did not finish."""
    if not root.is_dir():
        return []
    names = (_NAME.fullmatch(entry.name) for entry in root.iterdir() if entry.is_dir())
    return sorted({int(name[1]) for name in names if name is not None})


def complete_steps(root: Path) -> list[int]:
    """Return the steps of a run's complete checkpoints, oldest first."""
    return [step for step in all_steps(root) if find(step_folder(root, step)) is not None]


def latest(root: Path) -> Path | None:
    """Return the newest complete checkpoint of a run."""
    steps = complete_steps(root)
    return step_folder(root, steps[-1]) if steps else None


def newest_in(path: Path) -> Path:
    """Return the complete checkpoint at or in `path`: of Trainer or Accelerate, or the newest of a run; else `path`."""
    for place in (path, path / INSIDE):
        if find(place) is not None:
            return place
    return latest(path / CHECKPOINTS) or latest(path) or path


def point_to(root: Path, step: int) -> None:
    """Make `latest` a link to a complete checkpoint, if the file system supports links."""
    draft = root / f".{LATEST}"
    with suppress(OSError):
        draft.unlink(missing_ok=True)
        draft.symlink_to(step_folder(root, step).name)
        draft.replace(root / LATEST)


def continue_from(root: Path, step: int) -> Path | None:
    """Prepare to continue a run from this checkpoint, and remove what killed saves have left.

    Later checkpoints, also damaged ones, do not belong to the continued run. They are moved to a folder: the result.
    """
    for number in all_steps(root):
        settle(step_folder(root, number))
    if find(step_folder(root, step)) is not None:
        point_to(root, step)
    newer = [step_folder(root, number) for number in all_steps(root) if number > step]
    if not newer:
        return None
    names = (root.with_name(f"{root.name}-left-{number}") for number in itertools.count(1))
    place = next(name for name in names if not name.exists())
    place.mkdir()
    for folder in (folder for path in newer for folder in (path, replaced_of(path)) if folder.exists()):
        folder.rename(place / folder.name)
    return place


def prune(root: Path, keep: int, is_good: Callable[[Path], bool], best: int | None = None) -> None:
    """Keep the newest `keep` complete checkpoints, the newest for which `is_good` is true, and that of step `best`.
    Remove all others.

    Unfinished checkpoints are removed if a newer one is complete. If none is good, nothing is removed.
    """
    if keep < 1:
        raise ValueError(f"prune(keep={keep}) would remove every checkpoint: keep at least 1")
    complete = complete_steps(root)
    newest = complete[-keep:]
    old = [step for step in all_steps(root) if newest and step < newest[-1] and step not in newest]
    good = next((step for step in reversed(complete) if old and is_good(step_folder(root, step))), None)
    for path in (step_folder(root, step) for step in old if good is not None and step not in (good, best)):
        for folder in (partial_of(path), replaced_of(path), path):
            remove(folder)
