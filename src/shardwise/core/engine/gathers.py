"""Units on their way to where they compute, and what is left there of those that did.

A gather is started ahead of the computation that needs it, and finished by it. Before it starts, the host must be
through with the unit's update, another unit may have to leave the slot, and what rests on disk is read into memory
that the copies to the device are made from. Gathers start in the same order on every rank.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ...base.errors import StateError
from ..offload.host_memory import Away, Staging
from ..schedule.flat import Flat, Pass
from ..schedule.offload import NUM_STAGED, is_staged
from ..schedule.step_schedule import FlatGather, Occupancy, Schedule
from ..unit.carrier import Channels
from ..unit.unit import Unit
from ..wire.collectives import Journey
from .calls import Calls
from .gather_memory import GatherMemory
from .host_jobs import HostJobs
from .streams import Lane, Mark, host_waits_for

# The version of compute parameters whose memory does not hold their weights; else it is even.
LOST = 1


@dataclass(slots=True)
class GatherInFlight:
    """`staged` is memory that the copies to the device read from, `row_slot` where encoded parameters are under way."""

    journeys: list[Journey]
    queued: Mark
    staged: Tensor | None
    row_slot: Tensor | None


class Gathers:
    def __init__(
        self,
        schedule: Schedule,
        units: list[Unit],
        channels: Channels,
        device: torch.device,
        staging: Staging,
        host_jobs: HostJobs,
        calls: Calls,
    ) -> None:
        self.schedule = schedule
        self._units = units
        self._channels = channels
        self._staging = staging
        self._host_jobs = host_jobs
        self._calls = calls
        self.occupancy = Occupancy(schedule)
        self.memory = GatherMemory(schedule, units, device)
        self.lane = Lane(device)
        # Where waiting costs the caller time, only the first hop of a gather runs beside the computation, which is the
        # one between nodes; the others follow when it is needed. Not where some ranks may gather later than others.
        self._defers = not self.lane.queues and not any(
            state.flat.host_updates for unit in units for state in unit.states
        )
        # Of each unit's weights, and of compute parameters that hold them: twice the number of their updates.
        self.versions = [0] * len(units)
        self.num_updates = 0
        self.is_captured = False
        # Units whose weights were used outside their forward in this step: they stay gathered.
        self.kept: set[int] = set()
        self._in_flight: dict[int, GatherInFlight] = {}
        # Units to gather before any other: put off while the host updates them.
        self._owed: deque[int] = deque()
        self._row_slots = deque(self.memory.row_slots)
        self._is_staged = [any(is_staged(state.flat) for state in unit.states) for unit in units]
        self._masters_version = self._version_of_masters()
        for unit in units:
            unit.show_resting()
            unit.stamp(LOST)

    def make_ready(self, index: int, pass_: Pass, ahead: Sequence[int] = ()) -> None:
        """Gather a unit, start the gathers of a forward to run behind its computation, show its compute parameters."""
        self.start(index, pass_, needed_now=True)
        self._start_ahead(ahead)
        self.show(index)

    def keep(self, index: int) -> None:
        """Gather a unit for a use outside its forward, into memory of its own, and keep it until the step."""
        if self.schedule.slot_of[index] is not None:
            self._leave_slot(index, "its weights are used outside its forward")
        self.kept.add(index)
        self.start(index, "forward", needed_now=True)
        self.arrive(index)

    def pass_by(self, index: int, ahead: Sequence[int]) -> None:
        """The collectives of `make_ready` in a forward, for a unit that this rank leaves out."""
        self.start(index, "forward", needed_now=True)
        self._start_ahead(ahead)
        self.arrive(index)

    def show(self, index: int) -> None:
        """Wait for a unit's gather, if it is under way, and show its compute parameters."""
        if index in self._in_flight:
            self._finish(index)
        self._units[index].show_compute()

    def arrive(self, index: int) -> None:
        """Wait for a unit's gather, if it is under way."""
        if index in self._in_flight:
            self._finish(index)

    def _start_ahead(self, ahead: Sequence[int]) -> None:
        """As far as the host is through with its updates: whether it is, is no reason to wait for it now. On another
        rank it may be, so what is put off comes before every other gather, and before anybody waits for all of them."""
        for position, other in enumerate(ahead):
            if not self._host_jobs.is_updated(self._units[other]):
                self._owed.extend(unit for unit in ahead[position:] if unit not in self._owed)
                return
            self.start(other, "forward", needed_now=False)

    def start_first(self) -> None:
        """Those of the next step, ahead of it. What the host updates is left to the next forward: it may be through on
        one rank and not on another, and there may be no next one. A captured step leaves out what it would find
        elsewhere each time."""
        for index in self.schedule.after_step:
            if any(state.flat.host_updates for state in self._units[index].trainable_states):
                return
            if not (self.is_captured and self._gives_back(index)):
                self.start(index, "forward", needed_now=False)

    def start_holders(self) -> None:
        """A backward begins. Units that others lie inside are held since the forward, and gathered again if it had them
        rounded: now, on every rank, whichever of them its backward comes to."""
        for index in self.schedule.read_holders:
            if self.occupancy.rounded[index]:
                self.start(index, "backward", needed_now=False)

    def start(self, index: int, pass_: Pass, needed_now: bool) -> None:
        if self.occupancy.is_ready(index, pass_):
            return
        if self._owed:
            # To a forward. Where nothing was put off, a unit may have been gathered for both passes.
            self._start_owed(before=index if pass_ == "forward" else None)
            if self.occupancy.is_ready(index, pass_):
                return
        self._start_in_turn(index, pass_, needed_now)

    def _start_owed(self, before: int | None = None) -> None:
        while self._owed:
            index = self._owed.popleft()
            if index == before:
                return
            if not self.occupancy.is_ready(index, "forward"):
                self._start_in_turn(index, "forward", needed_now=False)

    def _start_in_turn(self, index: int, pass_: Pass, needed_now: bool) -> None:
        unit = self._units[index]
        self._host_jobs.await_updates(unit)
        slot = self.schedule.slot_of[index]
        holder = None if slot is None else self.occupancy.holder.get(slot)
        if holder is not None and holder != index:
            if not self._calls.busy[holder]:
                self._lose(holder)
            elif needed_now:
                self._leave_slot(index, f"{self._units[holder].name!r}, which shares its memory, is computing")
            else:
                return
        if index in self._in_flight:
            self._finish(index)
        todo = self.occupancy.take(index, pass_)
        if not [gather for gather in todo if not unit.states[gather.at].flat.master_is_whole]:
            unit.stamp(self.versions[index])
            return
        row_slot = self._take_row_slot() if any(gather.is_encoded for gather in todo) else None
        with self.lane.after_compute().named(f"gather {unit.name}"):
            self.memory.fetch(index)
            journeys: list[Journey] = []
            place: Tensor | None = None
            staged: dict[Flat, Tensor] = {}
            if self._is_staged[index] and (wanted := self._wanted_from_disk(index, todo)):
                place, staged = self._staging.take(index, wanted)
            rows = [] if row_slot is None else self.memory.rows_in(row_slot, unit)
            for at, is_stale, is_encoded in todo:
                state, flat = unit.states[at], unit.states[at].flat
                if not flat.master_is_whole:
                    under_way = rows[at] if is_encoded else None
                    # A flat has many fields to hash.
                    read = staged.get(flat) if staged else None
                    journeys.append(state.start_gather(is_stale, read, under_way, self._channels))
            if not self._defers:
                for journey in journeys:
                    journey.go_to_last()
            if row_slot is not None and self.lane.queues:
                # Decoding belongs to the lane, not to the computation that waits for it; and the next comes behind it.
                for journey in journeys:
                    journey.finish()
                self._row_slots.append(row_slot)
                journeys, row_slot = [], None
            self._in_flight[index] = GatherInFlight(journeys, self.lane.mark(), place, row_slot)

    def _take_row_slot(self) -> Tensor:
        while not self._row_slots:
            self._finish(next(index for index, gather in self._in_flight.items() if gather.row_slot is not None))
        return self._row_slots.popleft()

    def _finish(self, index: int) -> None:
        gather = self._in_flight.pop(index)
        self.lane.compute_waits_for(gather.queued)
        for journey in gather.journeys:
            journey.go_to_last()
        for journey in gather.journeys:
            journey.finish()
        if gather.row_slot is not None:
            self._row_slots.append(gather.row_slot)
        if gather.staged is not None:
            self._staging.give_back(gather.staged, partial(host_waits_for, gather.queued))
        self._units[index].stamp(self.versions[index])

    def settle(self) -> None:
        """Wait for every gather under way."""
        self._start_owed()
        for index in list(self._in_flight):
            self._finish(index)

    # What rests on disk.

    def read_ahead_in_forward(self, index: int) -> None:
        if self._is_staged[index]:
            order = self.schedule.order
            self._read_ahead(order[order.index(index) + 1 :][:NUM_STAGED], "forward")

    def read_ahead_in_backward(self, index: int) -> None:
        if self._is_staged[index]:
            order = self.schedule.order
            ahead = order[: order.index(index)][::-1][:NUM_STAGED]
            self._read_ahead((other for other in ahead if self.schedule.units[other].backward_reads), "backward")

    def _read_ahead(self, ahead: Iterable[int], pass_: Pass) -> None:
        """Start to read parameters for the next units to compute."""
        for other in ahead:
            wanted = self._wanted_from_disk(other, self.occupancy.todo(other, pass_))
            if wanted and not (self._host_jobs.is_updated(self._units[other]) and self._staging.ask(other, wanted)):
                return

    def _wanted_from_disk(self, index: int, todo: Iterable[FlatGather]) -> list[Away]:
        """What of a unit is read from disk: not a copy at rest that is about to be made anew."""
        found = [(self._units[index].states[gather.at], gather.is_stale) for gather in todo]
        at_rest = [state for state, is_stale in found if state.flat.rest_is_own or not is_stale]
        return [state.away for state in at_rest if state.away is not None and is_staged(state.flat)]

    # Memory that changes hands.

    def drop(self, index: int) -> None:
        """The computation is through with a unit: its own memory goes, if it is not to stay."""
        if self._gives_back(index) and index not in self.kept:
            self._lose(index)
            self.occupancy.release(index)
            self.memory.give_back(index)

    def vacate(self, index: int) -> None:
        """Forget what lies in a unit's slot of it."""
        self._lose(index)
        self.occupancy.vacate(index)

    def _gives_back(self, index: int) -> bool:
        return self.schedule.units[index].layout.gathered_until == "backward"

    def _lose(self, index: int) -> None:
        """A unit's gathered memory is about to be another's, or nobody's."""
        if index in self._in_flight:
            self._finish(index)
        self._units[index].show_resting()
        self._units[index].stamp(LOST)

    def _leave_slot(self, index: int, why: str) -> None:
        """Give a unit memory of its own: the model does not run in the order of its modules."""
        if self._calls.live(index):
            raise StateError(
                f"unit {self._units[index].name!r} must be gathered ({why}), and a backward still needs its old place. "
                "Checkpoint fewer units together, raise memory_budget, or keep these units gathered until the backward"
            )
        slot_of = list(self.schedule.slot_of)
        slot_of[index] = None
        self.schedule = self.occupancy.schedule = replace(self.schedule, slot_of=tuple(slot_of))
        self.occupancy.held[index] = False
        self.memory.give_own(index, self.schedule)

    def refuse_own_weights(self, index: int, outputs: list[Tensor]) -> None:
        """Memory that another unit takes next must not leave the unit it was gathered for."""
        place = self.memory.borrowed.get(index)
        if place is not None and [t for t in outputs if t.layout == torch.strided and _address(t) == place]:
            raise StateError(
                f"unit {self._units[index].name!r} returns one of its own weights (or a view of it), whose memory "
                "other weights take next: return a copy (.clone()), or choose units= so that both uses lie in one"
            )

    # Between steps.

    def was_updated(self, units: Iterable[int]) -> None:
        """Of these, the masters that are trained are newer than every copy of them."""
        self.settle()
        self.count_update(units)
        self._masters_version = self._version_of_masters()
        self.occupancy.masters_changed(units)
        self._staging.forget()

    def count_update(self, units: Iterable[int]) -> None:
        self.num_updates += 1
        for index in units:
            self.versions[index] += 2

    def was_rewritten(self) -> None:
        """Weights were set from outside, frozen ones too."""
        self.was_updated(range(len(self._units)))
        self.occupancy.forget_all()

    def follow_changed_masters(self) -> None:
        """Whole masters may have been changed in place, through tensors that parameters gave out."""
        if self._masters_version != self._version_of_masters():
            self.was_rewritten()

    def _version_of_masters(self) -> int:
        return sum([state.master._version for unit in self._units for state in unit.states])

    def follow(self, schedule: Schedule) -> None:
        """Take over another order of units."""
        self.settle()
        self.schedule = schedule
        self.occupancy = Occupancy(schedule)
        self.memory.rearrange(schedule)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
