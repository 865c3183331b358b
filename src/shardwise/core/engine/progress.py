"""How far a forward and a backward have come among the units, in the schedule's order.

A rank may leave units out that others do not. Their collectives come in the schedule's order all the same: whoever
reaches a unit is told which ones it has passed over, and passes by each of them as if it had computed.
"""

from collections import deque
from collections.abc import Iterator

from ..schedule.step_schedule import Schedule


class Progress:
    def __init__(self, schedule: Schedule) -> None:
        self.follow(schedule)
        self._num_units = len(schedule.units)
        self._forward_at = self._backward_at = self._num_units
        # Those whose gradients can be reduced, and those that are not reduced yet, in the schedule's order.
        self._complete = [False] * self._num_units
        self._to_reduce: deque[int] = deque()

    def follow(self, schedule: Schedule) -> None:
        """Take over another order of units, between steps."""
        self._order = schedule.order
        self._position_of = {unit: position for position, unit in enumerate(self._order)}
        self._holds_units = [unit.holds_units for unit in schedule.units]

    def is_leaf(self, index: int) -> bool:
        return not self._holds_units[index]

    def begin_forward(self) -> None:
        self._forward_at = 0

    def reach_in_forward(self, index: int | None) -> tuple[int, ...]:
        """The end is None. Returns the units passed over."""
        position = len(self._order) if index is None else self._position_of[index]
        passed = self._order[self._forward_at : position]
        self._forward_at = max(self._forward_at, position + 1)
        return passed

    def begin_backward(self, reduce_order: tuple[int, ...]) -> None:
        self._complete = [False] * self._num_units
        self._to_reduce = deque(reduce_order)
        self._backward_at = len(self._order)

    def reach_in_backward(self, index: int | None) -> list[int]:
        """The end is None. Returns the units passed over. Those that others lie inside begin before them, and count
        as passed over by whoever comes to what ran before them."""
        position = -1 if index is None else self._position_of[index]
        passed = self._order[position + 1 : self._backward_at]
        self._backward_at = min(self._backward_at, max(position, 0))
        return [unit for unit in reversed(passed) if not self._complete[unit]] if passed else []

    def complete(self, index: int) -> None:
        """No more gradients come to a unit in this backward."""
        self._complete[index] = True

    def is_next_to_reduce(self, index: int) -> bool:
        return bool(self._to_reduce) and self._to_reduce[0] == index

    def reducible(self) -> Iterator[int]:
        """The next units to reduce, as far as they are complete; each is given once."""
        while self._to_reduce and self._complete[self._to_reduce[0]]:
            yield self._to_reduce.popleft()

    def left_to_reduce(self) -> Iterator[int]:
        while self._to_reduce:
            yield self._to_reduce.popleft()
