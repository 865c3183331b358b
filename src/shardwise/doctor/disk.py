"""Speed of a folder's disk: a file is written, flushed, read back and removed."""

import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..base.files import ALIGNMENT, enable_direct_io, is_direct, write_at
from . import Finding, judged, size

TOPIC = "disk"
CHUNK = 16 << 20
MAX_BYTES = 128 << 20
BUDGET_S = 2.0  # for writing, and again for reading: on a slow disk fewer bytes are measured
SLOW = 200e6  # bytes/s
LEAST_FREE = 10 << 30
# Bytes per parameter of a checkpoint: an fp32 master and two moments.
CHECKPOINT_BYTES = 12


def look(folder: Path) -> Iterator[Finding]:
    place = existing(folder)
    free = shutil.disk_usage(place).free
    meaning = (
        f"for runs in {place.resolve()}; a checkpoint has {CHECKPOINT_BYTES} bytes for each trained parameter, and so "
        "has an optimizer on disk"
    )
    fix = "make room, or give --output-dir elsewhere" if free < LEAST_FREE else ""
    yield judged(TOPIC, "free", size(free), meaning, fix)
    try:
        written, read = speeds(place)
    except OSError as error:
        why = f"{place.resolve()}: {error.strerror or error}"
        yield Finding(TOPIC, "write", "not possible", why, "broken", "give --output-dir a folder that can be written")
        return
    seconds = 1e9 * CHECKPOINT_BYTES / written
    meaning = f"flushed to the disk; a checkpoint of 1B parameters takes {seconds:.0f} s from one machine"
    fix = "a local NVMe disk or a parallel file system; or save less often (--save-steps)" if written < SLOW else ""
    yield judged(TOPIC, "write", f"{written / 1e6:.0f} MB/s", meaning, fix)
    yield Finding(TOPIC, "read", f"{read / 1e6:.0f} MB/s", "resuming and loading weights; memory may have helped")
    meaning = "O_DIRECT: state on disk (--offload optimizer=disk:FOLDER) and checkpoints go around the cache"
    fix = "" if goes_direct(place) else "for --offload, a folder on a local disk with ext4 or xfs"
    yield judged(TOPIC, "around the cache", "no" if fix else "yes", meaning, fix)


def speeds(folder: Path) -> tuple[float, float]:
    """Bytes per second, written and read. The file has no name, and no longer exists when this returns."""
    chunk = os.urandom(CHUNK)  # random, so that a compressing file system does not look faster
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began_s, num_written = time.perf_counter(), 0
        while num_written < MAX_BYTES and time.perf_counter() - began_s < BUDGET_S:
            num_written += file.write(chunk) or 0
            os.fsync(file.fileno())
        write_s = time.perf_counter() - began_s
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        began_s, num_read = time.perf_counter(), 0
        while num_read < num_written and time.perf_counter() - began_s < BUDGET_S:
            num_read += len(file.read(CHUNK) or b"")
        read_s = time.perf_counter() - began_s
    return num_written / write_s, num_read / read_s


def goes_direct(folder: Path) -> bool:
    """Return True if O_DIRECT works; some file systems accept the flag, and then fail to write."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        enable_direct_io(file.fileno())
        write_at(file.fileno(), memoryview(mmap.mmap(-1, ALIGNMENT)), 0)
        return is_direct(file.fileno())


def existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists: a run would create the missing ones."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())
