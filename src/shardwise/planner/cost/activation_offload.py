"""Activations that rest on the host: when they go there and when they come back, among the events of a step.

What a unit saves goes to the host while the next unit computes, so what the last one saves never goes. In the backward
it comes back one unit ahead. The last two units of a forward are still on the device when the backward begins: what the
first of them saved went to the host for nothing. Of a checkpointed unit its input goes; what selective checkpointing
keeps besides is the checkpoint's own and stays on the device.
"""

from collections.abc import Iterator, Mapping, Sequence

from ...core.schedule.events import Event, Move
from ...core.schedule.offload import MIN_OFFLOADED_ACTIVATION_BYTES
from ...core.schedule.step_schedule import Schedule
from ..work.work import Work

# Units whose activations are on the device at once: the one that runs, and one on its way.
NUM_THERE = 2


def stowed_bytes(schedule: Schedule, works: Mapping[str, Work]) -> dict[str, int]:
    """By name of the unit, in the order of the forward: what may go. The last one's stays."""
    leaves = [schedule.units[unit] for unit in schedule.leaves]
    saved = {unit.name: _leaving(works[unit.name]) for unit in leaves if unit.layout.activations_on == "host"}
    return {name: num_bytes for name, num_bytes in saved.items() if num_bytes >= MIN_OFFLOADED_ACTIVATION_BYTES}


def _leaving(work: Work) -> int:
    """A block's input has the size of its output."""
    return min(work.saved_bytes, work.output_bytes) if work.recomputed else work.saved_bytes


def with_stowing(events: Sequence[Event], stowed: Mapping[str, int]) -> Sequence[Event]:
    """The step's events, and those of activations among them."""
    return list(_told(events, stowed)) if stowed else events


def _told(events: Sequence[Event], stowed: Mapping[str, int]) -> Iterator[Event]:
    names = list(stowed)
    # Begun ahead of a unit's backward: the fetch for the one before it, unless that is still there.
    before = {name: names[index - 1] for index, name in enumerate(names) if 0 < index <= len(names) - NUM_THERE}
    for event in events:
        ahead = before.get(event.unit) if event.verb == "backward" else None
        if ahead is not None:
            yield Event("fetch", ahead, moves=(Move("to_device", stowed[ahead]),))
        yield event
        if event.verb == "forward" and event.unit in names[:-1]:
            yield Event("stow", event.unit, moves=(Move("to_host", stowed[event.unit]),))
