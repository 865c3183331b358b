"""Going on from a checkpoint: the newest that is good, whoever wrote it, and what it says about where the run was.

A checkpoint that is incomplete or damaged is told of, and the next older one is taken, on every rank the same. A load
that broke off leaves a mixture, over which the next one writes everything. One that was named is not replaced by
another, and where none is good the run does not begin anew.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ..base.errors import CheckpointError, DamageError
from ..checkpoint.compare import rounded
from ..checkpoint.folder import read_index
from ..checkpoint.loading import load
from ..checkpoint.opened import open_checkpoint
from ..checkpoint.together import together
from ..core.engine.guards import engine_of
from ..core.wire.collectives import exchange

# What a checkpoint of the trainer says in its extra; others say a step at most.
_OWN = {"step": int, "num_samples_seen": int, "global_batch_size": int, "data": dict, "book": dict}


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a run goes on; at its beginning, where it does not. `data` is None where nobody knows which was used."""

    checkpoint: str | None = None
    step: int = 0
    num_samples_seen: int = 0
    global_batch_size: int | None = None
    data: Any = None
    book: dict[str, Any] = field(default_factory=dict)
    learning_rate: float | None = None  # of the last step; None: nobody knows


def resume(to_try: Sequence[str], model: nn.Module, optimizer: Any, say: Callable[[str], None]) -> Resumed:
    """Load the first of these that is good. All ranks call it."""
    skipped = []
    for path in to_try:
        try:
            extra = _load(path, model, optimizer, len(to_try) > 1, say)
        except DamageError as error:
            if len(to_try) == 1:
                raise
            skipped.append(f"{path} ({error})")
            say(f"skipped {Path(path).name}, which cannot be used: {error}")
        else:
            return _resumed(path, extra, say)
    if skipped:
        raise CheckpointError(f"no checkpoint of this run can be used: {'; '.join(skipped)}")
    return Resumed()


@dataclass(frozen=True, slots=True)
class _About:
    has_optimizer: bool
    rounded: list[str]


def _load(path: str, model: nn.Module, optimizer: Any, is_of_run: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Hyper-parameters stay those asked for. Masters of this run may hold fewer digits, which is told."""
    engine = engine_of(model)
    world = engine.mesh.world
    about = exchange(world, together(world, lambda: _about(path, model, is_of_run) if engine.mesh.rank == 0 else None))[
        0
    ]
    assert about is not None
    extra = load(path, model, optimizer if about.has_optimizer else None, allow_rounding=True, keep_groups=True)
    if about.rounded:
        more = f", and {len(about.rounded) - 1} more" if len(about.rounded) > 1 else ""
        say(f"weights are rounded to this run's precision: {about.rounded[0]}{more}")
    if not about.has_optimizer:
        say(f"{path} holds no optimizer: its weights are used, and the optimizer begins anew")
    return extra


def _about(path: str, model: nn.Module, is_of_run: bool) -> _About:
    place = Path(path).resolve()
    if is_of_run:
        read_index(place)  # what is not there as ours is damaged, whatever else it may look like
    index = open_checkpoint(place).index
    return _About(index.optimizer is not None, rounded(engine_of(model), index))


def _resumed(path: str, extra: dict[str, Any], say: Callable[[str], None]) -> Resumed:
    if set(extra) >= set(_OWN):
        wrong = [key for key, kind in _OWN.items() if type(extra[key]) is not kind]
        if wrong:
            raise CheckpointError(
                f"{path} says in its extra {wrong[0]!r}: {extra[wrong[0]]!r}, which is no place to go on"
            )
        rate = extra.get("learning_rate")
        known = {**{key: extra[key] for key in _OWN}, "learning_rate": rate if isinstance(rate, float) else None}
        return Resumed(path, **known)
    step = extra.get("step")
    step = step if type(step) is int and step >= 0 else 0
    say(f"{path} was not saved by shardwise train: it goes on after step {step}, with the data from its beginning")
    return Resumed(path, step)
