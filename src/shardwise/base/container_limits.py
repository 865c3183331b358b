"""Memory and processor limits of a container (cgroups), which the machine's own numbers do not show."""

from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def cgroup_values(name: str, old_name: str | None, root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> list[str]:
    """Read the values of a limit, from this process's group up to the root. `old_name` is its file in cgroups v1."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base, file = (root, name) if not controllers else (root / controllers, old_name)
        if file is None:
            continue
        group = base / path.strip("/")
        # In a container the path is that of the host, and the container's own group is the root.
        for folder in (group, *group.parents):
            if not folder.is_relative_to(base):
                break
            if (folder / file).is_file():
                found.append((folder / file).read_text().strip())
    return found


def memory_limit(values: list[str], total_bytes: int) -> int | None:
    """The lowest limit in bytes; None where there is none."""
    limits = [int(value) for value in values if value.isdecimal()]
    return min((limit for limit in limits if limit < total_bytes), default=None)  # v1 says "none" with a huge number


def cpu_limit(values: list[str]) -> float | None:
    """The lowest limit in cores, from values such as "200000 100000" (v2: quota and period)."""
    pairs = [value.split() for value in values]
    return min((int(quota) / int(period) for quota, period in pairs if quota != "max"), default=None)
