"""How the checkpoints of a run are saved: how much that is, about how long it takes, and whether training goes on.

A save in the background begins with a copy on the host. Of state that rests on disk, because the host is too small for
it, there is no such copy; beside state that rests on the host, there is one if it fits.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import ConfigurationError
from ..base.text import size
from ..checkpoint.steps import CHECKPOINTS, all_steps
from ..core.engine.runtime import Engine
from ..core.wire.collectives import Channel, exchange
from ..planner.auto import free_bytes_on
from .settings import Settings, interval_of

PROBE_BYTES = 8 << 20  # written once, to know how long a checkpoint will take
# Of what is free on the host; the rest is the data's and the system's.
MOST_OF_HOST = 0.9


@dataclass(frozen=True, slots=True)
class Saves:
    """`num_bytes` of one checkpoint, of all ranks. `why_not`: what was asked for, in the background, is not done."""

    num_bytes: int
    in_background: bool
    why_not: str = ""


def saves_of(engine: Engine, num_moments: float, in_background: bool, free_host_bytes: int, hosts: Channel) -> Saves:
    """All ranks call it and get the same; `free_host_bytes` of this rank, before the run took any."""
    num_bytes = checkpoint_bytes(engine, num_moments)
    why_not = ""
    if in_background and any(unit.layout.uses_disk for unit in engine.schedule.units):
        why_not = "state that rests on disk is read as it is written, and not copied to the host"
    elif in_background and engine.host.size.host:
        copy, left = num_bytes // engine.mesh.world_size, free_host_bytes - engine.host.size.host
        left = min(exchange(hosts, left))
        if copy > MOST_OF_HOST * left:
            why_not = f"a copy of {size(copy)} a rank does not fit into the {size(max(left, 0))} that the host has left"
    return Saves(num_bytes, in_background and not why_not, why_not)


def checkpoint_bytes(engine: Engine, num_moments: float) -> int:
    """Masters, and the moments of what is trained."""
    flats = [flat for unit in engine.schedule.units for flat in unit.flats]
    return sum(
        round(param.num_elems * flat.master.itemsize * (1 + num_moments * flat.trainable))
        for flat in flats
        for param in flat.params
    )


def num_saves_of(settings: Settings, first_step: int, num_steps: int) -> int:
    """Checkpoints that a run still writes if nothing stops it; the end is always saved."""
    every = interval_of(settings.save_steps, num_steps)
    return 1 if not every else -(-num_steps // every) - first_step // every


def require_room(folder: Path, saves: Saves, num_saves: int, settings: Settings, say: Callable[[str], None]) -> None:
    """Refuse a disk that has no room for one checkpoint, and tell where it has none for all that will be there at once:
    an older one is removed when the new one is complete. What a dead save has left goes before the first."""
    root = folder / CHECKPOINTS
    free = free_bytes_on(folder) + sum(file.stat().st_size for file in root.glob("*.partial/*"))
    if saves.num_bytes > free:
        raise ConfigurationError(
            f"output_dir {folder}: a checkpoint takes {size(saves.num_bytes)}, but its disk has {size(free)} free: "
            "free some, or name a folder on another disk with --output-dir"
        )
    limit = settings.save_total_limit
    num_at_once = num_saves if limit is None else min(num_saves, max(limit + 1 - len(all_steps(root)), 1))
    if num_at_once * saves.num_bytes > free:
        fix = "free some" if limit == 1 else "free some, or --save-total-limit 1"
        say(
            f"the disk of {folder} has {size(free)} free, and {num_at_once} checkpoints at once take "
            f"{size(num_at_once * saves.num_bytes)}: it may be full before the end of the run; {fix}"
        )


def expected_s(folder: Path, saves: Saves, engine: Engine) -> float | None:
    """Of one save. What rests on disk is read there, too, which is taken to be as slow as writing."""
    written_s = _seconds_per_byte(folder)
    if written_s is None or engine.host.disk is None:
        return None if written_s is None else saves.num_bytes * written_s
    read_s = _seconds_per_byte(engine.host.disk.folder)
    # Every machine has a disk of its own for its ranks.
    read_bytes = engine.host.size.disk * engine.mesh.node_size
    return None if read_s is None else saves.num_bytes * written_s + read_bytes * read_s


def _seconds_per_byte(folder: Path) -> float | None:
    began = time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            probe.write(bytes(PROBE_BYTES))
            os.fsync(probe.fileno())
    except OSError:  # a full disk is told when something is lost by it
        return None
    return (time.perf_counter() - began) / PROBE_BYTES
