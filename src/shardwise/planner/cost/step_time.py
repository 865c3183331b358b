"""How long a step takes: what the engine's lanes come to, played through on the list of events that it executes.

Two steps are played (`player.py`), and the second one counts: it begins where steps in the middle of a run begin.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...core.schedule.events import Event
from ...core.schedule.step_schedule import Schedule
from ..hardware.efficiency import IDEAL, Wear
from ..hardware.values import Cluster
from .compute import UnitSeconds
from .lanes import Lanes, Span
from .player import Player

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
    player = Player(schedule, seconds, Lanes(cluster, wear), wear)
    begin_s = player.play(events)
    player.forget()
    end_s = player.play(events)
    spans = [
        Span(span.lane, span.name, span.begin_s - begin_s, span.end_s - begin_s)
        for span in (*player.spans, *player.lanes.spans)
        # A computation that takes no time is one all the same: instants of memory are counted off along them.
        if (span.end_s > span.begin_s or span.lane == "compute") and span.begin_s < end_s
    ]
    spans.sort(key=lambda span: span.begin_s)
    return Timing(end_s - begin_s, player.work_s, player.updates_s, player.lanes.busy_s, tuple(spans))


def mfu(flops_per_token: float, tokens_per_s: float, peak_flops: float) -> float:
    """The share of a GPU's peak that the model's own FLOP are, as `flops.flops_per_token` counts them."""
    return flops_per_token * tokens_per_s / peak_flops


def days_for(num_tokens: float, tokens_per_s: float) -> float:
    """`tokens_per_s`: of all GPUs together."""
    return num_tokens / tokens_per_s / SECONDS_PER_DAY
