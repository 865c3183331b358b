"""The status of each unit: where its weights are, who may use them, what is in flight. One record per unit.

[Note: states of a unit]

    SHARDED    This rank holds its shard only. The memory for the whole weights belongs to another unit, or is free.
    GATHERING  An all-gather into that memory is in flight. It must not be read yet.
    GATHERED   That memory holds the newest weights. A forward or a backward may read them.
    STALE      That memory holds the weights from before the last update. Frozen flats in it are still right.

    SHARDED   -- start_gather --> GATHERING     a unit in the same slot becomes SHARDED
    STALE     -- start_gather --> GATHERING     only the flats that were updated are gathered
    GATHERED  -- start_gather --> GATHERING     for a backward, where a forward gathered rounded weights
    GATHERING -- finish_gather -> GATHERED      the computation has waited for the all-gather
    GATHERED  -- invalidate ----> STALE         an update has changed the master weights
    any       -- lose ----------> SHARDED       the memory is given back, or another unit takes the slot

Two more facts come with the state. `rounded` are the flats that were gathered from encoded weights: a forward may read
them, a backward may not. `copy_is_old` says that the copy at rest is older than the master weights, so that the next
gather renews it first. It is always true in STALE, and can be true or false in SHARDED.

Who uses the weights: `num_computing` is the number of forwards and backwards of the unit that run now; until it is 0
the memory must stay. `forwards` are those that a backward may still run through. `is_lent`: the weights were used
outside the unit's forward, and stay gathered until the step. `version` counts updates of the weights.

The engine's `Gathers` is the only caller of the transitions on real memory. The planner's `step_events` makes the same
ones without any memory, and so predicts every collective of a step exactly.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from .flat import Pass
from .step_schedule import Schedule, UnitPlan


class Weights(Enum):
    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"
    STALE = "stale"


class FlatGather(NamedTuple):
    """One flat of a unit to gather: its position, whether its copy at rest is old, whether it is sent encoded."""

    at: int
    is_stale: bool
    is_encoded: bool


@dataclass(slots=True, eq=False, weakref_slot=True)
class ForwardCall:
    """One forward of a unit that a backward may still run through.

    The engine's clock counts the begins and ends of forwards: `began` and `ended`. The object lives as long as the
    autograd graph of the forward. `closed_in` is the number of the last backward that went through it; `is_spent` is
    set if that backward did not retain the graph."""

    unit: int
    began: int
    ended: int
    version: int  # of the weights it ran with
    closed_in: int = -1
    is_spent: bool = False


@dataclass(slots=True, eq=False)
class UnitStatus:
    index: int
    plan: UnitPlan
    slot: int | None  # None: memory of its own
    slots: dict[int, "UnitStatus"]  # shared by all units: the unit whose weights lie in each slot
    weights: Weights = Weights.SHARDED
    copy_is_old: bool = True
    rounded: set[int] = field(default_factory=set)
    version: int = 0
    is_lent: bool = False
    num_computing: int = 0
    began: int = 0  # the last forward, on the engine's clock
    forwards: list[Callable[[], ForwardCall | None]] = field(default_factory=list)
    is_complete: bool = False  # it gets no more gradients in this backward
    todos: dict[tuple[object, ...], tuple[FlatGather, ...]] = field(default_factory=dict)  # answers of `todo`

    # Questions.

    def is_ready(self, pass_: Pass) -> bool:
        """Return True if nothing has to be gathered for a pass: the weights are there, or in flight."""
        return (self.weights is Weights.GATHERED or self.weights is Weights.GATHERING) and (
            pass_ == "forward" or not self.rounded
        )

    def todo(self, pass_: Pass) -> tuple[FlatGather, ...]:
        """The flats to gather for a pass."""
        is_held, is_old = self.weights is not Weights.SHARDED, self.copy_is_old
        key = (pass_, is_held, is_old, *self.rounded)
        if key in self.todos:
            return self.todos[key]
        todo = []
        for at, flat in enumerate(self.plan.flats):
            is_there = is_held and not (is_old and flat.trainable)
            if is_there and (pass_ == "forward" or at not in self.rounded):
                continue
            todo.append(FlatGather(at, flat.trainable and is_old, flat.is_encoded_for(pass_)))
        self.todos[key] = tuple(todo)
        return self.todos[key]

    def live_forwards(self) -> list[ForwardCall]:
        """Forwards that a backward may still run through."""
        found = []
        for ref in self.forwards:
            call = ref()
            if call is not None and not call.is_spent:
                found.append(call)
        if len(found) < len(self.forwards):
            self.forwards = [weakref.ref(call) for call in found]
        return found

    # Transitions.

    def start_gather(self, pass_: Pass) -> tuple[FlatGather, ...]:
        """Become GATHERING for a pass; returns the flats to gather. Another unit in the slot becomes SHARDED."""
        if self.slot is not None:
            other = self.slots.get(self.slot)
            if other is not None and other is not self:
                other.lose()
            self.slots[self.slot] = self
        todo = self.todo(pass_)
        self.weights = Weights.GATHERING
        self.copy_is_old = False
        for gather in todo:
            if pass_ == "forward" and self.plan.flats[gather.at].rounds_forwards:
                self.rounded.add(gather.at)
            else:
                self.rounded.discard(gather.at)
        return todo

    def finish_gather(self) -> None:
        self.weights = Weights.GATHERED

    def invalidate(self) -> None:
        """Note that an update has changed the trainable master weights. Frozen ones have not changed."""
        self.copy_is_old = True
        if self.weights is not Weights.SHARDED:
            self.weights = Weights.STALE
        if self.rounded:
            self.rounded = {at for at in self.rounded if not self.plan.flats[at].trainable}

    def lose(self) -> None:
        """Note that the memory no longer holds the weights."""
        self.weights = Weights.SHARDED
        if self.slot is not None and self.slots.get(self.slot) is self:
            del self.slots[self.slot]

    def move(self, plan: UnitPlan, slot: int | None) -> None:
        """Take the plan and the slot of a new schedule (None: memory of its own). Nothing is gathered there yet."""
        self.lose()
        self.plan, self.slot = plan, slot
        self.todos.clear()


def statuses_of(schedule: Schedule) -> list[UnitStatus]:
    """One record for every unit of a schedule, all SHARDED."""
    slots: dict[int, UnitStatus] = {}
    return [
        UnitStatus(index, plan, slot, slots)
        for index, (plan, slot) in enumerate(zip(schedule.units, schedule.slot_of, strict=True))
    ]


def snapshot(statuses: list[UnitStatus]) -> list[tuple[object, ...]]:
    """The states of all units, to be compared; a gather in flight counts as done."""
    return [
        (
            Weights.GATHERED if status.weights is Weights.GATHERING else status.weights,
            status.copy_is_old,
            set(status.rounded) if status.weights is not Weights.SHARDED else set(),
        )
        for status in statuses
    ]
