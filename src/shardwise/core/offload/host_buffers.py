"""Host memory for what comes and goes: lent, brought back, lent again."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable

import torch

from ...base.direct_io import ALIGNMENT
from ...base.intervals import round_up
from .arena import Arena


class HostBuffer:
    """A piece of host memory of its own."""

    def __init__(self, num_bytes: int, pin: bool) -> None:
        self.num_bytes = round_up(num_bytes, ALIGNMENT)
        self._arena = Arena(self.num_bytes, pin)  # pinned as long as it lives
        self.row = self._arena.take(self.num_bytes, torch.uint8, "activations")


class HostBuffers:
    """Memory on the host, lent again when it comes back: after the first step nothing is allocated.

    Where sizes vary from step to step, a buffer that is too small for all requests makes way for a larger one, so there
    are never more of them than were lent at once. `settle` waits until nothing is copied from or to a buffer.
    """

    def __init__(self, pin: bool, settle: Callable[[], None]) -> None:
        self._pin = pin
        self._settle = settle
        self._free: list[HostBuffer] = []  # by size
        # The garbage collector may bring one back at any moment; they are put in order when one is asked for.
        self._returned: deque[HostBuffer] = deque()
        self.held_bytes = self.peak_bytes = 0

    @property
    def lent_bytes(self) -> int:
        return self.held_bytes - sum(buffer.num_bytes for buffer in (*self._free, *self._returned))

    def lend(self, num_bytes: int) -> HostBuffer:
        """At least so many bytes."""
        while self._returned:
            buffer = self._returned.popleft()
            self._free.insert(bisect_left(self._free, buffer.num_bytes, key=_size), buffer)
        found = bisect_left(self._free, num_bytes, key=_size)
        if found < len(self._free):
            return self._free.pop(found)
        if self._free:
            self._settle()
            self.held_bytes -= self._free.pop().num_bytes
        buffer = HostBuffer(num_bytes, self._pin)
        self.held_bytes += buffer.num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return buffer

    def bring_back(self, buffer: HostBuffer) -> None:
        self._returned.append(buffer)


def _size(buffer: HostBuffer) -> int:
    return buffer.num_bytes
