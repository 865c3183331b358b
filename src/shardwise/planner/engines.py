"""Other engines that can be planned, FSDP1, FSDP2 and DeepSpeed, and the comparison of ours with them.

Traffic, units and activations are those of our schedule. `cost/fsdp.py` and `cost/deepspeed.py` say what differs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..core.schedule.step_schedule import Schedule
from .cost.compute import Speed, UnitSeconds
from .cost.deepspeed import Zero, deepspeed_events, deepspeed_memory_of, deepspeed_seconds
from .cost.fsdp import fsdp_memory_of, fsdp_seconds
from .cost.peak import Memory
from .events import Event
from .training import EngineName, Training
from .work.work import Work

if TYPE_CHECKING:
    from .assess import Assessment, Assessor

OURS: EngineName = "shardwise"
TITLES = {"fsdp1": "FSDP1", "fsdp2": "FSDP2", "deepspeed": "DeepSpeed"}


def memory_under(schedule: Schedule, works: Mapping[str, Work], training: Training) -> Memory:
    return (fsdp_memory_of if training.is_fsdp else deepspeed_memory_of)(schedule, works, training)


def events_under(events: Sequence[Event], schedule: Schedule, training: Training) -> list[Event]:
    """Return our events of a step as the training's engine executes them."""
    return list(events) if training.is_fsdp else deepspeed_events(events, schedule, training, Zero())


def seconds_under(
    schedule: Schedule, seconds: Mapping[str, UnitSeconds], speed: Speed, training: Training
) -> dict[str, UnitSeconds]:
    return (fsdp_seconds if training.is_fsdp else deepspeed_seconds)(schedule, seconds, speed, training)


def under_ours(assess: "Assessor", entry: "Assessment") -> "Assessment":
    """Assess the same strategy and training under our engine, with sums in the same dtype."""
    training = replace(entry.training, engine=OURS, precision=entry.training.formats, reduce=None)
    return assess(entry.name, entry.layouts, training)


def compared(entry: "Assessment", ours: "Assessment") -> str:
    """Say what the same strategy needs and takes under our engine."""
    text = f"the same under {OURS}: {ours.needed_bytes / 1e9:,.1f} GB"
    if not ours.fits:
        return f"{text}, which does not fit either" if not entry.fits else f"{text}, which does not fit"
    return f"{text} and {ours.tokens_per_s / entry.tokens_per_s:.2f}x the speed"
