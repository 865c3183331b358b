"""How far a forward and a backward have come among the units, in the schedule's order.

A rank may leave out units that other ranks compute. Their collectives keep the schedule's order: when a rank reaches a
unit, it gets the units that it has passed over, and takes part in the collectives of each as if it had computed it.

A clock numbers the forwards of units, so that a backward can tell which of them autograd has been through: it runs what
was recorded last first. Facts about one unit are in its `UnitStatus`; their order is here.
"""

import weakref
from collections import deque
from collections.abc import Iterator
from operator import attrgetter

import torch

from ..schedule.step_schedule import Schedule
from ..schedule.unit_status import ForwardCall, UnitStatus


class Progress:
    def __init__(self, schedule: Schedule, statuses: list[UnitStatus]) -> None:
        self._statuses = statuses
        self.follow(schedule)
        self._forward_at = self._backward_at = len(statuses)
        self._clock = 0
        self._num_backwards = 0
        # Forwards whose backward has begun and not ended.
        self.opened: set[ForwardCall] = set()
        # Units whose gradients are not reduced yet in this backward, in the schedule's order.
        self._to_reduce: deque[int] = deque()

    def follow(self, schedule: Schedule) -> None:
        """Switch to another order of units, between steps."""
        self._order = schedule.order
        self._position_of = {unit: position for position, unit in enumerate(self._order)}

    # The forward.

    def begin_forward(self) -> None:
        """Begin a forward of the model. Forwards of units that an error has interrupted count as ended."""
        self._forward_at = 0
        for status in self._statuses:
            status.num_computing = 0

    def reach_in_forward(self, index: int | None) -> tuple[int, ...]:
        """Begin the forward of a unit; None is the end of the model's forward. Returns the units passed over."""
        position = len(self._order)
        if index is not None:
            position = self._position_of[index]
            self._clock += 1
            self._statuses[index].began = self._clock
        passed = self._order[self._forward_at : position]
        self._forward_at = max(self._forward_at, position + 1)
        return passed

    def record(self, status: UnitStatus) -> ForwardCall:
        """Record the forward of a unit that has ended, and that a backward may come back to."""
        self._clock += 1
        call = ForwardCall(status.index, status.began, self._clock, status.version)
        status.forwards.append(weakref.ref(call))
        return call

    # The backward.

    def begin_backward(self, reduce_order: tuple[int, ...]) -> None:
        self._num_backwards += 1
        self._to_reduce = deque(reduce_order)
        self._backward_at = len(self._order)
        for status in self._statuses:
            status.is_complete = False

    def reach_in_backward(self, index: int | None) -> list[int]:
        """Begin the backward of a unit; None is the end. Returns the units passed over. Units that hold others begin
        before those, and count as passed over when the backward reaches a unit that ran before them."""
        position = -1 if index is None else self._position_of[index]
        passed = self._order[position + 1 : self._backward_at]
        self._backward_at = min(self._backward_at, max(position, 0))
        return [unit for unit in reversed(passed) if not self._statuses[unit].is_complete] if passed else []

    def open(self, call: ForwardCall) -> None:
        call.is_open = True
        self.opened.add(call)
        self._statuses[call.unit].num_computing += 1

    def close(self, call: ForwardCall) -> bool:
        """End the backward of one forward. Returns True if this backward needs the unit no more."""
        status = self._statuses[call.unit]
        self.opened.discard(call)
        call.is_open = False
        call.closed_in = self._num_backwards
        call.is_spent = not torch._C._autograd._get_current_graph_task_keep_graph()
        status.num_computing -= 1
        return not status.num_computing and not [call for call in status.live_forwards() if not self.is_closed(call)]

    def is_closed(self, call: ForwardCall) -> bool:
        """Return True if this backward, or the last one if none runs, has been through a forward."""
        return call.closed_in == self._num_backwards

    def may_come(self, index: int, call: ForwardCall | None) -> bool:
        """Return True if a backward at `call` may still come to a forward of this unit: one before its end (its
        own forward may have called the unit), which this backward has not been through. None is the end."""
        return call is not None and any(
            other.began < call.ended and not self.is_closed(other) for other in self._statuses[index].live_forwards()
        )

    def opened_after(self, call: ForwardCall | None) -> list[ForwardCall]:
        """Open forwards that were recorded after `call`, the last first: their backward has run. None is the end."""
        ended = [other for other in self.opened if call is None or other.began > call.ended]
        return sorted(ended, key=attrgetter("began"), reverse=True) if len(ended) > 1 else ended

    def abandon_backward(self) -> None:
        """Forget a backward that failed: none of the recorded forwards can lead to another one."""
        self.opened.clear()
        for status in self._statuses:
            status.num_computing = 0
            status.forwards = []

    # Gradients to reduce.

    def is_next_to_reduce(self, index: int) -> bool:
        return bool(self._to_reduce) and self._to_reduce[0] == index

    def reducible(self) -> Iterator[int]:
        """The next units to reduce, as far as their gradients are complete; each is given once."""
        while self._to_reduce and self._statuses[self._to_reduce[0]].is_complete:
            yield self._to_reduce.popleft()

    def left_to_reduce(self) -> Iterator[int]:
        while self._to_reduce:
            yield self._to_reduce.popleft()
