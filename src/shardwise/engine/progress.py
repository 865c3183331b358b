"""How far a forward and a backward have come among the units that run one after the other.

A rank may leave units out that others do not. Their collectives come in the schedule's order all the same: whoever
reaches a unit is told which ones it has passed over.
"""

from collections import deque
from collections.abc import Iterator

from ..plan.schedule import Schedule


class Progress:
    def __init__(self, schedule: Schedule) -> None:
        self.follow(schedule)
        self._num_units = len(schedule.units)
        self._forward_at = len(self._leaves)
        self._backward_at = 0
        self._called = [False] * self._num_units
        # Those whose gradients can be reduced, and those that are not reduced yet, in the schedule's order.
        self._complete = [False] * self._num_units
        self._to_reduce: deque[int] = deque()

    def follow(self, schedule: Schedule) -> None:
        """Take over another order of units, between steps."""
        self._leaves = schedule.leaves
        self._position_of = {unit: position for position, unit in enumerate(self._leaves)}

    def is_leaf(self, index: int) -> bool:
        return index in self._position_of

    def begin_forward(self, leads_to_backward: bool) -> None:
        self._called = [False] * self._num_units
        self._forward_at = 0 if leads_to_backward else len(self._leaves)

    def reach_in_forward(self, index: int) -> tuple[int, ...]:
        """Returns the units passed over."""
        self._called[index] = True
        position = self._position_of.get(index)
        if position is None:
            return ()
        passed = self._leaves[self._forward_at : position]
        self._forward_at = max(self._forward_at, position + 1)
        return passed

    def end_forward(self) -> tuple[int, ...]:
        """Returns the units that were not reached."""
        passed = self._leaves[self._forward_at :]
        self._forward_at = len(self._leaves)
        return passed

    def begin_backward(self, reduce_order: tuple[int, ...]) -> None:
        self._complete = [False] * self._num_units
        self._to_reduce = deque(reduce_order)
        self._backward_at = len(self._leaves)

    def reach_in_backward(self, index: int | None) -> list[int]:
        """The end is None. Returns the units passed over that the last forward of this rank did not call."""
        position = -1 if index is None else self._position_of.get(index, len(self._leaves))
        passed = reversed(self._leaves[position + 1 : self._backward_at])
        self._backward_at = min(self._backward_at, max(position, 0))
        return [unit for unit in passed if not (self._called[unit] or self._complete[unit])]

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
