"""A check that every rank starts its collectives in the same order, made before each collective.

A communicator pairs the n-th collective of one rank with the n-th of every other, whatever they are: two that differ
end in an abort, a hang, or wrong numbers. So every collective is checked here first. If it is the one that all ranks
started at this place the last time, it starts at once. Any other is announced to the other ranks: it starts when all
of them have announced the same, and raises an error if one of them has started something else.

A place is named by the last phases (a forward, a backward, a step) and the collectives since then, so every step passes
the same places. Each place remembers the collective that came next. A phase without collectives does not count.
"""

from collections import deque
from collections.abc import Callable, Hashable

# (a ledger's call, what it moves, number of the mesh), or (a phase, number of the mesh).
Event = tuple[Hashable, ...]

NUM_PHASES = 3  # that name a place
NUM_RECENT = 64
MOST_PLACES = 50_000


class _Place:
    """A place in the order: `expected` came next the last time, and leads to `then`; `others` are all events so far."""

    __slots__ = ("expected", "others", "then")

    def __init__(self) -> None:
        self.expected: Event | None = None
        self.then = self
        self.others: dict[Event, _Place] = {}


class Order:
    """The order of events on this rank. `announce` returns when every rank has announced the same event here."""

    def __init__(self, announce: Callable[[Event], None]) -> None:
        self._announce = announce
        self._place = _Place()
        self._by_phases: dict[tuple[Event, ...], _Place] = {}
        self._phases: tuple[Event, ...] = ()
        self._begun: Event | None = None
        self._num_places = 0
        self.num_passed = 0
        # The last events with their numbers, counted from 0. Another thread reads them.
        self.recent: deque[tuple[int, Event]] = deque(maxlen=NUM_RECENT)

    @property
    def in_phase(self) -> str:
        """The current phase in brackets, for messages; empty before the first one."""
        phase = self._begun or (self._phases[-1] if self._phases else None)
        return "" if phase is None else f" ({phase[0]})"

    def begin(self, phase: str, mesh: int) -> None:
        """Begin a phase. A phase without collectives does not matter to the other ranks."""
        self._begun = (phase, mesh)

    def take(self, event: Event) -> None:
        """Check an event, and announce it if it is not the expected one; called before a collective is started."""
        if self._begun is not None:
            phase, self._begun = self._begun, None
            self.take(phase)
            if self._num_places > MOST_PLACES:
                self._by_phases.clear()
                self._num_places = 0
            self._phases = (*self._phases, phase)[-NUM_PHASES:]
            self._place = self._by_phases.setdefault(self._phases, _Place())
        place = self._place
        if event != place.expected:
            self._announce(event)
            if event not in place.others:
                place.others[event] = _Place()
                self._num_places += 1
            place.expected, place.then = event, place.others[event]
        self._place = place.then
        self.recent.append((self.num_passed, event))
        self.num_passed += 1

    def stop(self) -> None:
        """Forget the order: from now on every event is announced."""
        self._place = _Place()
        self._by_phases.clear()
