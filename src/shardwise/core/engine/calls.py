"""Forwards that a backward may come back to, and which units compute at this moment."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(slots=True, eq=False, weakref_slot=True)
class ForwardCall:
    """One forward of a unit that a backward may come back to, between two ticks of the clock of `Calls`.

    It lives as long as the graph that can lead to it. `closed_in` is the last backward that went through it, and it is
    spent when that backward did not keep the graph.
    """

    unit: int
    began: int
    ended: int
    version: int  # of the weights it ran with
    is_open: bool = False
    closed_in: int = -1
    is_spent: bool = False


class Calls:
    def __init__(self, num_units: int) -> None:
        self._num_units = num_units
        self._clock = 0
        self._began = [0] * num_units
        self._num_backwards = 0
        self._recorded: list[list[weakref.ref[ForwardCall]]] = [[] for _ in range(num_units)]
        # Those that this backward has begun and not ended.
        self.opened: set[ForwardCall] = set()
        # How many forwards and backwards of each unit are under way.
        self.busy = [0] * num_units

    def begin_forward(self) -> None:
        """Of the model: what an error has left half done is over."""
        self.busy = [0] * self._num_units

    def begin(self, index: int) -> None:
        self._clock += 1
        self._began[index] = self._clock

    def record(self, index: int, version: int) -> ForwardCall:
        """The forward of a unit has ended, and leads to a backward."""
        self._clock += 1
        call = ForwardCall(index, self._began[index], self._clock, version)
        self._recorded[index].append(weakref.ref(call))
        return call

    def live(self, index: int) -> list[ForwardCall]:
        """Forwards of a unit that a backward may still come to."""
        if not self._recorded[index]:
            return []
        found = [call for call in [ref() for ref in self._recorded[index]] if call is not None and not call.is_spent]
        self._recorded[index] = [weakref.ref(call) for call in found]
        return found

    def forget(self, units: Iterable[int]) -> None:
        """None of theirs can lead to a backward any more."""
        for unit in units:
            self._recorded[unit] = []

    def begin_backward(self) -> None:
        self._num_backwards += 1

    def open(self, call: ForwardCall) -> None:
        call.is_open = True
        self.opened.add(call)
        self.busy[call.unit] += 1

    def may_come(self, index: int, call: ForwardCall | None) -> bool:
        """Whether a backward that has come to `call` may still come to a forward of this unit: one before its end (its
        own forward may have called the unit), which this backward has not been through. Autograd runs what was recorded
        last first. The end is None."""
        return call is not None and any(
            other.began < call.ended and not self.is_closed(other) for other in self.live(index)
        )

    def opened_after(self, call: ForwardCall | None) -> list[ForwardCall]:
        """Recorded after `call`, the last first: when its backward begins, theirs has run. The end is None."""
        ended = [other for other in self.opened if call is None or other.began > call.ended]
        return sorted(ended, key=_began, reverse=True) if len(ended) > 1 else ended

    def close(self, call: ForwardCall) -> bool:
        """Whether this backward is through with the unit."""
        self.opened.discard(call)
        call.is_open = False
        call.closed_in = self._num_backwards
        call.is_spent = not torch._C._autograd._get_current_graph_task_keep_graph()
        self.busy[call.unit] -= 1
        return not self.busy[call.unit] and not [other for other in self.live(call.unit) if not self.is_closed(other)]

    def is_closed(self, call: ForwardCall) -> bool:
        """In this backward, or in the last one if there is none."""
        return call.closed_in == self._num_backwards

    def abandon_backward(self) -> None:
        self.busy = [0] * self._num_units
        self.forget(range(self._num_units))
        self.opened.clear()


def _began(call: ForwardCall) -> int:
    return call.began
