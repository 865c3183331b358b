"""Processes: a container's limits on this one, children that end with their parent, folders of killed ones.

The machine's total memory and number of processors do not show the limits that a container (cgroups) has set.
A child that is started as a command gets its environment from `as_child`, and first calls `end_with_parent`.
"""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

PARENT = "SHARDWISE_PARENT_PID"
PR_SET_PDEATHSIG = 1
CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def as_child(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a child that should end with this process."""
    return {**environment, PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """End when the parent ends, if `as_child` made the environment. Children of this process do not inherit that."""
    pid = os.environ.pop(PARENT, None)
    if pid is not None:
        end_with(int(pid))


def end_with(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent ends; end now if the parent is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def state_of(pid: int) -> str:
    """Return the state of a process as the kernel's letter: "T" if stopped by a signal, "Z" if a zombie; "" if gone;
    "?" if it cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError:  # no descriptor is left, for example: that says nothing about the process
        return "?"


@contextlib.contextmanager
def temporary_folder(place: str | Path | None = None) -> Iterator[Path]:
    """Make a folder in `place` (default: the system's temporary folder), and remove it at the end.

    This process holds a lock on it. Folders without a lock were left behind by killed processes of this machine; they
    are removed first.
    """
    place = Path(tempfile.gettempdir() if place is None else place)
    # Other machines that share `place` may not see our locks, so the prefix contains the host name.
    prefix = f"shardwise-tmp-{socket.gethostname()}-"
    for folder in place.glob(f"{prefix}*"):
        _remove_if_abandoned(folder)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another process removed it as abandoned before it was opened
            continue
        with contextlib.suppress(OSError):  # without locks, `_remove_if_abandoned` fails and removes nothing
            fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            break
        os.close(lock)  # another process removed it before it was locked
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_if_abandoned(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another user's, locked, or just removed by its owner
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _cgroup_values(name: str, old_name: str | None, root: Path, membership: Path) -> list[str]:
    """Read a limit from the cgroup of this process and all groups above it. `old_name` is its file in cgroups v1."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    values = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base, file = (root, name) if not controllers else (root / controllers, old_name)
        group = base / path.strip("/")
        # In a container the path may be that of the host. The container's own group is then at the root.
        for folder in (group, *group.parents):
            if file is not None and folder.is_relative_to(base) and (folder / file).is_file():
                values.append((folder / file).read_text().strip())
    return values


def memory_limit(total_bytes: int, root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Return the container's lowest memory limit in bytes; None if no limit is below the memory of the machine."""
    values = _cgroup_values("memory.max", "memory.limit_in_bytes", root, membership)
    limits = [int(value) for value in values if value.isdecimal()]
    return min((limit for limit in limits if limit < total_bytes), default=None)  # in v1 a huge number means no limit


def cpu_limit(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """Return the container's lowest limit in cores, from values such as "200000 100000" (v2: quota and period)."""
    pairs = [value.split() for value in _cgroup_values("cpu.max", None, root, membership)]
    return min((int(quota) / int(period) for quota, period in pairs if quota != "max"), default=None)
