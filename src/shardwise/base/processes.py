"""Processes: a container's limits on this one, children that end with their parent, folders of killed ones.

The machine's own numbers do not show the limits on memory and processors that a container (cgroups) has set.
A child that is started as a command gets `as_child` as its environment and calls `end_with_parent` first.
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
    """The environment of a child that should end with this process."""
    return {**environment, PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """End with the parent, if this process was started with `as_child`. Its own children are not affected."""
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
    """The kernel's letter for a process: "T" where a signal has stopped it, "Z" after its end; "" where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@contextlib.contextmanager
def temporary_folder(place: str | Path | None = None) -> Iterator[Path]:
    """A folder in `place` (default: where temporary files go) that is removed at the end.

    It is locked as long as this process lives. Folders without a lock, which killed processes of this machine have left
    in the same place, are removed first.
    """
    place = Path(tempfile.gettempdir() if place is None else place)
    # A lock may not be seen on other machines that share the place.
    prefix = f"shardwise-tmp-{socket.gethostname()}-"
    for folder in place.glob(f"{prefix}*"):
        _remove_if_abandoned(folder)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # it was found, and taken for abandoned, in the instant before it was opened
            continue
        with contextlib.suppress(OSError):  # a file system without locks: no process removes it, either
            fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            break
        os.close(lock)  # or in the instant before it was locked
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_if_abandoned(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another user's, or just removed by its owner
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _cgroup_values(name: str, old_name: str | None, root: Path, membership: Path) -> list[str]:
    """Read the values of a limit, from this process's group up to the root. `old_name` is its file in cgroups v1."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    values = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base, file = (root, name) if not controllers else (root / controllers, old_name)
        group = base / path.strip("/")
        # In a container the path is that of the host, and the container's own group is the root.
        for folder in (group, *group.parents):
            if file is not None and folder.is_relative_to(base) and (folder / file).is_file():
                values.append((folder / file).read_text().strip())
    return values


def memory_limit(total_bytes: int, root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """The lowest limit of a container in bytes; None where none is below all memory of the machine."""
    values = _cgroup_values("memory.max", "memory.limit_in_bytes", root, membership)
    limits = [int(value) for value in values if value.isdecimal()]
    return min((limit for limit in limits if limit < total_bytes), default=None)  # v1 says "none" with a huge number


def cpu_limit(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """The lowest limit of a container in cores, from values such as "200000 100000" (v2: quota and period)."""
    pairs = [value.split() for value in _cgroup_values("cpu.max", None, root, membership)]
    return min((int(quota) / int(period) for quota, period in pairs if quota != "max"), default=None)
