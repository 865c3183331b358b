"""The checkpoints of a run: how they are saved, and how a run resumes from one.

A save in the background begins with a copy in host memory. State that is offloaded to disk is not copied, because host
memory is too small for it; state that is offloaded to host memory is copied if the copy fits there.

A run resumes from the newest usable checkpoint. An incomplete or damaged one is reported, and every rank loads the next
older one, which overwrites what a failed load has changed. If the user names a checkpoint, no other one is tried. If
none is usable, the run ends with an error; it does not start from scratch.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ..base.errors import CheckpointError, ConfigurationError, DamageError
from ..base.text import size
from ..checkpoint.folder import CHECKPOINTS, all_steps, read_index
from ..checkpoint.loading import load, rounded
from ..checkpoint.opened import open_checkpoint
from ..checkpoint.saving import together
from ..core.engine.guards import engine_of
from ..core.engine.runtime import Engine
from ..core.wire.collectives import Channel, exchange
from ..planner.auto import free_bytes_on
from .settings import Settings, interval_of

PROBE_BYTES = 8 << 20  # written once, to predict the time of a save
# Share of the free host memory that a copy may take; the rest is for the data and the system.
MAX_HOST_SHARE = 0.9
# Types of the values in the extra of a checkpoint that `shardwise train` saved. Other checkpoints have at most a step.
_OWN = {"step": int, "num_samples_seen": int, "global_batch_size": int, "data": dict, "book": dict}


@dataclass(frozen=True, slots=True)
class Saves:
    """How a run saves. `num_bytes`: one checkpoint of all ranks. `why_not`: why it cannot save in the background."""

    num_bytes: int
    in_background: bool
    why_not: str = ""


def saves_of(engine: Engine, num_moments: float, in_background: bool, free_host_bytes: int, hosts: Channel) -> Saves:
    """Decide how to save; all ranks call it. `free_host_bytes` were free for this rank before the run."""
    # The master weights, and the moments of trained parameters.
    num_bytes = sum(
        round(param.num_elems * flat.master.itemsize * (1 + num_moments * flat.trainable))
        for unit in engine.schedule.units
        for flat in unit.flats
        for param in flat.stored_params
    )
    why_not = ""
    if in_background and any(unit.layout.uses_disk for unit in engine.schedule.units):
        why_not = "state that is offloaded to disk is read as it is written, and not copied to the host"
    elif in_background and engine.host.size.host:
        copy, left = num_bytes // engine.mesh.world_size, free_host_bytes - engine.host.size.host
        left = min(exchange(hosts, left))
        if copy > MAX_HOST_SHARE * left:
            why_not = f"a copy of {size(copy)} a rank does not fit into the {size(max(left, 0))} that the host has left"
    return Saves(num_bytes, in_background and not why_not, why_not)


def require_room(folder: Path, saves: Saves, num_steps: range, settings: Settings, say: Callable[[str], None]) -> None:
    """Refuse a disk without room for one checkpoint; warn if those that will exist at once do not fit.

    An older checkpoint is removed when the new one is complete. Files of an interrupted save count as free space.
    """
    root = folder / CHECKPOINTS
    free = free_bytes_on(folder) + sum(file.stat().st_size for file in root.glob("*.partial/*"))
    if saves.num_bytes > free:
        raise ConfigurationError(
            f"output_dir {folder}: a checkpoint takes {size(saves.num_bytes)}, but its disk has {size(free)} free: "
            "free some, or name a folder on another disk with --output-dir"
        )
    every, limit = interval_of(settings.save_steps, num_steps.stop), settings.save_total_limit
    num_saves = -(-num_steps.stop // every) - num_steps.start // every if every else 1  # the end is always saved
    if settings.load_best_model_at_end:  # each evaluation may be the best so far
        every = interval_of(settings.eval_steps, num_steps.stop)
        num_saves, limit = num_saves + num_steps.stop // every - num_steps.start // every, limit and limit + 1
    num_at_once = num_saves if limit is None else min(num_saves, max(limit + 1 - len(all_steps(root)), 1))
    if num_at_once * saves.num_bytes > free:
        fix = "free some" if limit == 1 else "free some, or --save-total-limit 1"
        say(
            f"the disk of {folder} has {size(free)} free, and {num_at_once} checkpoints at once take "
            f"{size(num_at_once * saves.num_bytes)}: it may be full before the end of the run; {fix}"
        )


def expected_save_s(folder: Path, saves: Saves, engine: Engine) -> float | None:
    """Predict the time of one save. State on disk must also be read; reading is assumed to be as slow as writing."""
    try:
        seconds = saves.num_bytes * _seconds_per_byte(folder)
        if engine.host.disk is not None:  # each machine has its own disk, which its ranks share
            read_bytes = engine.host.size.disk * engine.mesh.node_size
            seconds += read_bytes * _seconds_per_byte(engine.host.disk.folder)
    except OSError:  # a full disk is an error only when a save fails
        return None
    return seconds


def _seconds_per_byte(folder: Path) -> float:
    began = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
        probe.write(bytes(PROBE_BYTES))
        os.fsync(probe.fileno())
    return (time.perf_counter() - began) / PROBE_BYTES


@dataclass(frozen=True, slots=True)
class Resumed:
    """The point where a run continues; by default its start. `data` is None if the checkpoint's data is unknown."""

    checkpoint: str | None = None
    step: int = 0
    num_samples_seen: int = 0
    global_batch_size: int | None = None
    data: Any = None
    book: dict[str, Any] = field(default_factory=dict)  # saved values of `StepRecords`
    learning_rate: float | None = None  # of the last step; None: unknown


def resume(candidates: Sequence[str], model: nn.Module, optimizer: Any, say: Callable[[str], None]) -> Resumed:
    """Load the first usable checkpoint of `candidates`. All ranks call it."""
    skipped = []
    for path in candidates:
        try:
            extra = _load(path, model, optimizer, len(candidates) > 1, say)
        except DamageError as error:
            if len(candidates) == 1:
                raise
            skipped.append(f"{path} ({error})")
            say(f"skipped {Path(path).name}, which cannot be used: {error}")
        else:
            return _resumed(path, extra, say)
    if skipped:
        raise CheckpointError(f"no checkpoint of this run can be used: {'; '.join(skipped)}")
    return Resumed()


def _load(path: str, model: nn.Module, optimizer: Any, is_of_run: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Load weights and optimizer state, but keep the hyper-parameters and the dtype of the masters of this run."""
    mesh = engine_of(model).mesh

    def describe() -> tuple[bool, list[str]]:
        """Return whether the checkpoint has optimizer state, and the tensors that are rounded to this run's masters."""
        place = Path(path).resolve()
        if is_of_run:
            read_index(place)  # without our index, a folder of this run is damaged, not in another format
        index = open_checkpoint(place).index
        return index.optimizer is not None, rounded(engine_of(model), index)

    described = together(mesh.world, lambda: describe() if mesh.rank == 0 else (False, []))
    has_optimizer, rounded_names = exchange(mesh.world, described)[0]
    extra = load(path, model, optimizer if has_optimizer else None, allow_rounding=True, keep_groups=True)
    if rounded_names:
        more = f", and {len(rounded_names) - 1} more" if len(rounded_names) > 1 else ""
        say(f"weights are rounded to this run's precision: {rounded_names[0]}{more}")
    if not has_optimizer:
        say(f"{path} holds no optimizer: its weights are used, and the optimizer begins anew")
    return extra


def _resumed(path: str, extra: dict[str, Any], say: Callable[[str], None]) -> Resumed:
    if not set(extra) >= set(_OWN):
        step = extra.get("step")
        step = step if type(step) is int and step >= 0 else 0
        say(
            f"{path} was not saved by shardwise train: training continues after step {step}, with the data from its "
            "beginning"
        )
        return Resumed(path, step)
    for key, kind in _OWN.items():
        if type(extra[key]) is not kind:
            raise CheckpointError(f"{path}: the value of {key!r} in its extra is invalid: {extra[key]!r}")
    rate = extra.get("learning_rate")
    known = {key: extra[key] for key in _OWN}
    return Resumed(path, **known, learning_rate=rate if isinstance(rate, float) else None)
