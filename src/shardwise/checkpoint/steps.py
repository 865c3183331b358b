"""The checkpoints of a run: `step-000100` and so on, in one folder. One rank calls these functions.

Only the markers decide which of them are complete. `latest` is a link to the newest complete one, for people and other
tools; nothing here reads it.
"""

import itertools
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .folder import find, partial_of, remove, replaced_of, settle

CHECKPOINTS = "checkpoints"  # their folder in a run folder
INSIDE = "shardwise"  # our checkpoint in a folder of the Trainer or of Accelerate; further models: shardwise_1 ...
LATEST = "latest"
_NAME = re.compile(r"step-(\d{6,})(\.partial|\.replaced)?")


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
    """Return the newest complete checkpoint for a run's folder or its folder of checkpoints; else the path itself.

    For a folder of the Trainer or of Accelerate, return the checkpoint in it.
    """
    for place in (path, path / INSIDE):
        if find(place) is not None:
            return place
    return latest(path / CHECKPOINTS) or latest(path) or path


def point_to(root: Path, step: int) -> None:
    """Point `latest` to a complete checkpoint, where the file system has links."""
    draft = root / f".{LATEST}"
    with suppress(OSError):
        draft.unlink(missing_ok=True)
        draft.symlink_to(step_folder(root, step).name)
        draft.replace(root / LATEST)


def go_on_from(root: Path, step: int) -> Path | None:
    """Prepare to continue a run from this checkpoint, and remove the remains of killed saves.

    Later checkpoints, also damaged ones, belong to another branch and are moved to another folder. Return this folder,
    if there are any.
    """
    for number in all_steps(root):
        settle(step_folder(root, number))
    if find(step_folder(root, step)) is not None:
        point_to(root, step)
    newer = [number for number in all_steps(root) if number > step]
    place = None
    if newer:
        names = (root.with_name(f"{root.name}-left-{number}") for number in itertools.count(1))
        place = next(name for name in names if not name.exists())
        place.mkdir()
    for path in (step_folder(root, number) for number in newer):
        for folder in (path, replaced_of(path)):
            if place is not None and folder.exists():
                folder.rename(place / folder.name)
    return place


def prune(root: Path, keep: int, is_good: Callable[[Path], bool]) -> None:
    """Remove all but the newest `keep` complete checkpoints, and unfinished ones of older saves.

    The newest one that `is_good` stays too. If none is good, nothing is removed.
    """
    if keep < 1:
        raise ValueError(f"prune(keep={keep}) would remove every checkpoint: keep at least 1")
    complete = complete_steps(root)
    kept = complete[-keep:]
    gone = [step for step in all_steps(root) if kept and step < kept[-1] and step not in kept]
    good = next((step for step in reversed(complete) if gone and is_good(step_folder(root, step))), None)
    for path in (step_folder(root, step) for step in gone if good is not None and step != good):
        for folder in (partial_of(path), replaced_of(path), path):
            remove(folder)
