"""How long a step takes: the engine's lanes, played through on the list of events that the engine executes.

The computation runs forwards and backwards in the order of the list. A gather begins when everything before it in the
list has been computed, and its unit waits for it. A reduction begins when its unit's backward is over; two have a place
to travel in, so the backward after the next one waits for it. Updates wait for the gradients of their unit (with
clipping: of all), and the next step's first gathers for all updates on the device; what the host updates comes back
with the gather of its unit. The host queues everything, in order, and the computation cannot overtake it. What lies
beside the computation is in `lanes.py`.

Two steps are played, and the second one counts: it begins where steps in the middle of a run begin.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..events import Event
from ..hardware.efficiency import IDEAL, Wear
from ..hardware.values import Cluster
from ..schedule import NUM_REDUCTIONS, Schedule
from .compute import UnitSeconds
from .lanes import Lanes, Op, Span

SECONDS_PER_DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Timing:
    """`compute_s` is what forwards and backwards take alone, `update_s` what updates on the device do; `exposed_s` is
    the rest: waits for wires and for the host, what collectives take from the computation. `busy_s`: of each wire."""

    step_s: float
    compute_s: float
    update_s: float
    busy_s: dict[str, float]
    spans: tuple[Span, ...]

    def continued(self, fewer: "Timing", num: int) -> "Timing":
        """With `num` more micro-batches, each as this has one more than `fewer`; only the played ones have spans."""
        return Timing(
            self.step_s + num * (self.step_s - fewer.step_s),
            self.compute_s + num * (self.compute_s - fewer.compute_s),
            self.update_s,
            {name: busy + num * (busy - fewer.busy_s.get(name, 0.0)) for name, busy in self.busy_s.items()},
            self.spans,
        )

    @property
    def exposed_s(self) -> float:
        return max(0.0, self.step_s - self.compute_s - self.update_s)


def step_time(
    schedule: Schedule,
    events: Sequence[Event],
    seconds: Mapping[str, UnitSeconds],
    cluster: Cluster,
    wear: Wear = IDEAL,
) -> Timing:
    """`events` are `step_events(schedule, ...)`; `seconds` says what each unit takes by itself."""
    player = _Player(schedule, seconds, Lanes(cluster, wear), wear)
    begin_s = player.play(events)
    player.forget()
    end_s = player.play(events)
    spans = [
        Span(span.lane, span.name, span.begin_s - begin_s, span.end_s - begin_s)
        for span in (*player.spans, *player.lanes.spans)
        if span.end_s > span.begin_s and span.begin_s < end_s
    ]
    spans.sort(key=lambda span: span.begin_s)
    return Timing(end_s - begin_s, player.work_s, player.updates_s, player.lanes.busy_s, tuple(spans))


class _Player:
    """The computation and the host that queues it."""

    def __init__(self, schedule: Schedule, seconds: Mapping[str, UnitSeconds], lanes: Lanes, wear: Wear) -> None:
        self.lanes, self._wear = lanes, wear
        self._seconds = seconds
        self._has_slot = {unit.name: unit.reduced_bytes > 0 for unit in schedule.units}
        self._compute_s = self._host_s = self._stolen_s = 0.0
        self._host_updates: dict[str, Op] = {}
        self.forget()

    def forget(self) -> None:
        """What was noted of the step before."""
        self.spans: list[Span] = []
        self.lanes.spans.clear()
        self.lanes.busy_s.clear()
        self.work_s = self.updates_s = 0.0

    def play(self, events: Sequence[Event]) -> float:
        """One step; returns the instant at which the computation is through with it."""
        self._gathers: dict[str, Op] = {}
        self._reductions: dict[str, Op] = {}
        self._slots: deque[Op | None] = deque([None] * NUM_REDUCTIONS, NUM_REDUCTIONS)
        self._normed_s = self._updated_s = 0.0
        for event in events:
            if event.verb == "gather":
                self._gather(event)
            elif event.verb == "forward":
                unit = self._seconds[event.unit]
                self._compute(event, unit.forward, unit.forward_kernels, 0.0)
            elif event.verb == "backward":
                unit = self._seconds[event.unit]
                slot_s = self.lanes.end_of(self._slots[0]) if self._has_slot[event.unit] else 0.0
                self._compute(event, unit.backward, unit.backward_kernels, slot_s)
            elif event.verb == "reduce":
                self._reduce(event)
            elif event.verb == "update":
                self._update(event)
            else:
                self._meet(event)
        self._compute_s = max(self._compute_s, self._updated_s, self._host_s)
        self.lanes.run_until(self._compute_s)
        return self._compute_s

    def _gather(self, event: Event) -> None:
        self._host_s += self._wear.event_s
        name = f"gather {event.unit}"
        ready_s = max(self._compute_s, self._host_s)
        last = self._host_updates.pop(event.unit, None)
        for move in event.moves:
            last = self.lanes.start_move(name, move, ready_s, last)
        if event.calls:
            # The cast runs beside the computation, and takes from it what it needs.
            cast_s = self._seconds[event.unit].cast
            self._stolen_s += cast_s
            ready_s += cast_s
            last = self.lanes.start_calls("gather", name, event.calls, ready_s, last)
        if last is not None:
            self._gathers[event.unit] = last

    def _compute(self, event: Event, work_s: float, num_kernels: float, not_before_s: float) -> None:
        begin_s = max(self._compute_s, self._host_s, not_before_s)
        self._host_s += num_kernels * self._wear.launch_s
        if event.unit in self._gathers:
            begin_s = max(begin_s, self.lanes.end_of(self._gathers.pop(event.unit)))
        # The last kernel of the unit has to be queued, too.
        self._compute_s = max(self.lanes.computed(begin_s, work_s + self._stolen_s), self._host_s)
        self._stolen_s = 0.0
        self.work_s += work_s
        self.spans.append(Span("compute", f"{event.verb} {event.unit}", begin_s, self._compute_s))

    def _reduce(self, event: Event) -> None:
        self._host_s += self._wear.event_s
        name = f"reduce {event.unit}"
        last = self.lanes.start_calls("reduce", name, event.calls, self._compute_s, None)
        for move in event.moves:
            last = self.lanes.start_move(name, move, self._compute_s, last)
        if self._has_slot[event.unit]:
            self._slots.append(last)
        if last is not None:
            self._reductions[event.unit] = last

    def _meet(self, event: Event) -> None:
        """Numbers that the ranks tell each other: which parameters were used, which nobody waits for, and the norm,
        which needs all gradients, and which all updates need."""
        if event.verb != "norm":
            self.lanes.start_calls("reduce", event.verb, event.calls, self._compute_s, None)
            return
        begin_s = max([self._compute_s, *map(self.lanes.end_of, self._reductions.values())])
        norm_s = sum(self._seconds[name].norm for name in self._reductions)
        self._compute_s = begin_s + norm_s
        last = self.lanes.start_calls("reduce", "norm", event.calls, self._compute_s, None)
        self._compute_s = max(self._compute_s, self.lanes.end_of(last))
        self._normed_s = self._compute_s
        self.updates_s += norm_s
        self.spans.append(Span("compute", "norm", begin_s, self._compute_s))

    def _update(self, event: Event) -> None:
        name = f"update {event.unit}"
        reduced = self._reductions.get(event.unit)
        if event.host_elems:
            last: Op | None = None
            for move in event.moves:
                if move.way == "read":
                    last = self.lanes.start_move(name, move, 0.0, None)
            gradient_s = max(self._normed_s, self.lanes.end_of(reduced))
            last = self.lanes.start_host(name, event.host_elems, gradient_s, last)
            self._host_updates[event.unit] = last
            for move in event.moves:
                if move.way == "write":
                    self.lanes.start_move(name, move, 0.0, last)
        update_s = self._seconds[event.unit].update
        if update_s or not event.host_elems:
            begin_s = max(self._compute_s, self._updated_s, self.lanes.end_of(reduced))
            self._updated_s = self.lanes.computed(begin_s, update_s)
            self.updates_s += update_s
            self.spans.append(Span("compute", name, begin_s, self._updated_s))


def mfu(flops_per_token: float, tokens_per_s: float, peak_flops: float) -> float:
    """The share of a GPU's peak that the model's own FLOP are, as `flops.flops_per_token` counts them."""
    return flops_per_token * tokens_per_s / peak_flops


def days_for(num_tokens: float, tokens_per_s: float) -> float:
    """`tokens_per_s`: of all GPUs together."""
    return num_tokens / tokens_per_s / SECONDS_PER_DAY
