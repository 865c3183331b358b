"""Gathers of units' weights, and the memory that they are gathered into.

A gather starts ahead of the computation that needs it, and that computation waits for it. Before it starts, the host
must have finished the unit's update, another unit may have to leave the slot, and weights on disk are read into staging
memory, from which they are copied to the device. Gathers start in the same order on every rank.

Every transition of a unit's weights (see [Note: states of a unit] in `schedule/unit_status.py`) is made here, together
with its effect on memory: `_start_in_turn`, `_finish`, `lose`, `was_updated`, `_leave_slot`, `follow`.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...base.errors import StateError
from ..mesh import Mesh
from ..offload.host_memory import HostMemory, OffloadedState, staged_views
from ..schedule.flat import Pass
from ..schedule.state_bytes import NUM_STAGED
from ..schedule.step_schedule import NUM_ROW_SLOTS, Schedule, aligned
from ..schedule.unit_status import FlatGather, UnitStatus, Weights
from ..unit.state import FlatState, OnDisk, Unit
from ..wire.collectives import HopChain, Work
from .streams import Lane, Mark, host_waits_for
from .updates import HostJobs

# Version counter of compute parameters whose memory does not hold their weights. Otherwise the version is even.
LOST = 1


@dataclass(slots=True, eq=False)
class Gather:
    """A gather of flats of a unit, prepared once: for each flat this rank's work before it, and its hops. `staged`:
    host memory to be copied to the device. `row_slot`: the number of the memory for encoded rows.

    While it is in flight, `queued` is the point after what was queued, and `is_over` says that this was everything.
    """

    parts: list[tuple[list[Work], HopChain]]
    staged: Tensor | None
    row_slot: int | None
    queued: Mark = None
    is_over: bool = False


class Gathers:
    def __init__(
        self,
        schedule: Schedule,
        statuses: list[UnitStatus],
        units: list[Unit],
        mesh: Mesh,
        host: HostMemory,
        host_jobs: HostJobs,
    ) -> None:
        self.schedule = schedule
        self.statuses = statuses
        self._units = units
        self._channels = mesh.channels["gather"]
        self._host = host
        self._host_jobs = host_jobs
        self.memory = GatherMemory(schedule, statuses, units, mesh.device)
        self.lane = Lane(mesh.device)
        self.wait_for_host = any(state.flat.host_updates for unit in units for state in unit.states)
        # On a CPU, waiting blocks the caller. So only the first hop of a gather, between nodes, overlaps with the
        # computation; the others run when the unit is needed. Off with host updates, which delay ranks differently.
        self._defers = not self.lane.queues and not self.wait_for_host
        # The points where flats are updated, while the computation does not wait for these updates (`Reductions`).
        self.updated: Mapping[FlatState, Mark] = {}
        self.num_updates = 0
        self.is_captured = False
        # The gathers of units that are GATHERING, in the order in which they started.
        self._in_flight: dict[int, Gather] = {}
        # By unit, flats, row slot, and address of the staged memory.
        self._prepared: dict[tuple[int, tuple[FlatGather, ...], int | None, int], Gather] = {}
        # Units to gather before any other: they were postponed while the host updated them.
        self._postponed: deque[int] = deque()
        self._row_slots = deque(range(NUM_ROW_SLOTS))
        self.is_staged = [any(state.flat.is_staged for state in unit.states) for unit in units]
        # By unit and flats: the state to read from disk.
        self._wanted: dict[tuple[int, tuple[FlatGather, ...]], tuple[OffloadedState, ...]] = {}
        self._read_on_host = [[state for state in unit.states if state.offloaded is not None] for unit in units]
        states = [state for unit in units for state in unit.states]
        self._masters = [state.master for state in states if not isinstance(state.master, OnDisk)]
        self._masters_version = self._version_of_masters()
        for unit in units:
            unit.show_user_params(LOST)

    def make_ready(self, index: int, pass_: Pass, ahead: Sequence[int] = (), computes: bool = True) -> None:
        """Gather a unit and start the gathers of the units `ahead`. If this rank runs the unit (`computes`), register
        its compute parameters.

        Gathers start up to the first unit that the host still updates; the others are postponed. On another rank that
        update may be done already, so postponed gathers start before any other, and before `settle` waits.
        """
        statuses = self.statuses
        if not statuses[index].is_ready(pass_):
            self.start(index, pass_, needed_now=True)
        for position, other in enumerate(ahead):
            if self.wait_for_host and not self._host_jobs.is_updated(self._units[other]):
                self._postponed.extend(unit for unit in ahead[position:] if unit not in self._postponed)
                break
            if not statuses[other].is_ready("forward"):
                self.start(other, "forward", needed_now=False)
        self.receive(index, computes)

    def lend(self, index: int) -> None:
        """Gather a unit for a use outside its forward, into memory of its own. It stays until the optimizer's step."""
        status = self.statuses[index]
        if status.slot is not None:
            self._leave_slot(status, "its weights are used outside its forward")
        status.is_lent = True
        self.make_ready(index, "forward", computes=False)

    def receive(self, index: int, computes: bool) -> None:
        """Wait for a unit's gather, if it is in flight. If this rank runs the unit, register its compute parameters."""
        if self.statuses[index].weights is Weights.GATHERING:
            self._finish(index)
        if computes:
            self._units[index].show_compute()

    def start_first(self) -> None:
        """Start the first gathers of the next step, up to the first unit that the host updates. That update may be done
        on one rank and not on another, and it is not awaited, because there may be no next step. A step captured in a
        CUDA graph leaves out units whose memory has another address each time."""
        for index in self.schedule.after_step:
            if any(state.flat.host_updates for state in self._units[index].trainable_states):
                return
            status = self.statuses[index]
            if not (self.is_captured and status.plan.gives_back) and not status.is_ready("forward"):
                self.start(index, "forward", needed_now=False)

    def start(self, index: int, pass_: Pass, needed_now: bool) -> None:
        """Start the gather of a unit that is not ready."""
        status = self.statuses[index]
        if self._postponed:
            # Postponed gathers are for a forward. One of them may be this unit's, and serve a backward as well.
            self._start_postponed(before=index if pass_ == "forward" else None)
            if status.is_ready(pass_):
                return
        self._start_in_turn(status, pass_, needed_now)

    def _start_postponed(self, before: int | None = None) -> None:
        while self._postponed:
            index = self._postponed.popleft()
            if index == before:
                return
            if not self.statuses[index].is_ready("forward"):
                self._start_in_turn(self.statuses[index], "forward", needed_now=False)

    def _start_in_turn(self, status: UnitStatus, pass_: Pass, needed_now: bool) -> None:
        index, unit = status.index, self._units[status.index]
        if self.wait_for_host:
            for state in unit.trainable_states:
                self._host_jobs.await_last_step_of(state)
        blocker = None if status.slot is None else status.slots.get(status.slot)
        if blocker is not None and blocker is not status:
            if not blocker.num_computing:
                self.lose(blocker)
            elif needed_now:
                self._leave_slot(status, f"{blocker.plan.name!r}, which shares its memory, is computing")
            else:
                return
        if status.weights is Weights.GATHERING:
            self._finish(index)
        todo = status.start_gather(pass_)
        moves = needs_rows = False
        for at, _, is_encoded in todo:
            moves = moves or not unit.states[at].flat.master_is_whole
            needs_rows = needs_rows or is_encoded
        if not moves:
            status.finish_gather()
            unit.stamp(status.version)
            return
        row_slot: int | None = None
        if needs_rows:
            while not self._row_slots:
                self._finish(next(index for index, gather in self._in_flight.items() if gather.row_slot is not None))
            row_slot = self._row_slots.popleft()
        lane = self.lane.after_compute(f"gather {unit.name}")
        if self.updated:
            lane.after(*map(self.updated.get, unit.trainable_states))
        with lane:
            if status.slot is None:
                self.memory.fetch(index)
            place: Tensor | None = None
            wanted: tuple[OffloadedState, ...] = ()
            if self.is_staged[index] and (wanted := self._wanted_from_disk(index, todo)):
                place = self._host.take_staged(wanted)
            key = (index, todo, row_slot, 0 if place is None else place.data_ptr())
            gather = self._prepared.get(key)
            if gather is None:
                staged = {} if place is None else dict(staged_views(wanted, place))
                gather = self._prepared[key] = Gather(self._parts(unit, todo, row_slot, staged), place, row_slot)
            for works, hop_chain in gather.parts:
                for work in works:
                    work()
                hop_chain.run_to(hop_chain.first)
            for _, hop_chain in () if self._defers else gather.parts:
                if hop_chain.at < hop_chain.last:
                    hop_chain.run_to(hop_chain.last)
            gather.is_over = False
            if row_slot is not None and self.lane.queues:
                # Decode on the lane, not in the waiting computation. The row slot's next use is queued behind it.
                for _, hop_chain in gather.parts:
                    hop_chain.run_to(hop_chain.end)
                self._row_slots.append(row_slot)
                gather.is_over = True
            gather.queued = self.lane.mark()
            for state in self._read_on_host[index]:
                state.read_on_host = gather.queued
            self._in_flight[index] = gather

    def _parts(
        self, unit: Unit, todo: Iterable[FlatGather], row_slot: int | None, staged: dict[OffloadedState, Tensor]
    ) -> list[tuple[list[Work], HopChain]]:
        """Prepare the gathers of a unit's flats; with normal tensors even inside inference mode, like `_bytes`."""
        sizes = [0 if row_slot is None else state.flat.gathered_row_bytes for state in unit.states]
        parts = []
        with torch.inference_mode(False):
            rows = cut(self.memory.row_slots[row_slot or 0], sizes)
            for at, is_stale, is_encoded in todo:
                state = unit.states[at]
                if not state.flat.master_is_whole:
                    read = None if state.offloaded is None else staged.get(state.offloaded)
                    parts.append(state.gather(is_stale, read, rows[at] if is_encoded else None, self._channels))
        return parts

    def _finish(self, index: int) -> None:
        gather = self._in_flight.pop(index)
        if gather.queued is not None:
            self.lane.compute_waits_for(gather.queued)
        if not gather.is_over:
            for _, hop_chain in gather.parts:
                if hop_chain.at < hop_chain.last:
                    hop_chain.run_to(hop_chain.last)
            for _, hop_chain in gather.parts:
                hop_chain.run_to(hop_chain.end)
            if gather.row_slot is not None:
                self._row_slots.append(gather.row_slot)
        if gather.staged is not None:
            self._host.staging.give_back(gather.staged, wait=partial(host_waits_for, gather.queued))
        status = self.statuses[index]
        status.finish_gather()
        self._units[index].stamp(status.version)

    def settle(self) -> None:
        """Wait for every gather in flight."""
        self._start_postponed()
        for index in list(self._in_flight):
            self._finish(index)

    # Parameters on disk.

    def read_ahead(self, index: int, pass_: Pass) -> None:
        """Start to read parameters for the next units to compute."""
        order, at = self.schedule.order, self.schedule.position_of[index]
        ahead = order[at + 1 :] if pass_ == "forward" else order[:at][::-1]
        for other in ahead[:NUM_STAGED]:
            if pass_ == "forward" or self.schedule.units[other].backward_reads:
                wanted = self._wanted_from_disk(other, self.statuses[other].todo(pass_))
                if wanted and not (self._host_jobs.is_updated(self._units[other]) and self._host.ask_staged(wanted)):
                    return

    def _wanted_from_disk(self, index: int, todo: tuple[FlatGather, ...]) -> tuple[OffloadedState, ...]:
        """The state of a unit to read from disk. A copy at rest that the gather is about to renew is not read."""
        if (index, todo) not in self._wanted:
            gathered = [(self._units[index].states[gather.at], gather.is_stale) for gather in todo]
            read = [state for state, is_stale in gathered if state.flat.rest_is_own or not is_stale]
            wanted = (state.offloaded for state in read if state.offloaded is not None and state.flat.is_staged)
            self._wanted[index, todo] = tuple(wanted)
        return self._wanted[index, todo]

    # Giving memory back.

    def drop(self, status: UnitStatus) -> None:
        """After a unit's computation, release its own memory if its layout says so and the weights are not lent."""
        if status.plan.gives_back and not status.is_lent:
            self.lose(status)
            self.memory.give_back(status.index)

    def lose(self, status: UnitStatus) -> None:
        """Make a unit SHARDED: its gathered memory is about to be used by another unit, or released."""
        if status.weights is Weights.GATHERING:
            self._finish(status.index)
        status.lose()
        self._units[status.index].show_user_params(LOST)

    def _leave_slot(self, status: UnitStatus, why: str) -> None:
        """Move a unit from its slot to memory of its own. `why` is for the error, if that is not possible now."""
        if status.live_forwards():
            raise StateError(
                f"unit {status.plan.name!r} must be gathered ({why}), and a backward still needs its old place. "
                "Checkpoint fewer units together, raise memory_budget, or keep these units gathered until the backward"
            )
        self.lose(status)
        status.move(status.plan, None)
        self.memory.give_own(status)
        self._prepared.clear()

    def refuse_own_weights(self, index: int, outputs: list[Tensor]) -> None:
        """Refuse a unit that returns its own weights: another unit uses their memory next."""
        slot = self.statuses[index].slot
        if slot is None:
            return
        place = self.memory.slots[slot].untyped_storage().data_ptr()
        for tensor in outputs:
            if tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() == place:
                returns = f"unit {self._units[index].name!r} returns one of its own weights, whose memory others take"
                raise StateError(f"{returns}: return a copy (.clone()), or choose units= so that both uses lie in one")

    # Between steps.

    def was_updated(self, units: Iterable[int]) -> None:
        """Make these units STALE, after an update of their trained master weights."""
        self.settle()
        self.count_update(units)
        self._masters_version = self._version_of_masters()
        for index in units:
            self.statuses[index].invalidate()
        self._host.staging.forget()

    def count_update(self, units: Iterable[int]) -> None:
        self.num_updates += 1
        for index in units:
            self.statuses[index].version += 2

    def was_rewritten(self) -> None:
        """Make all units SHARDED, after weights were set from outside, frozen ones too."""
        self.was_updated(range(len(self._units)))
        for status in self.statuses:
            if status.weights is not Weights.SHARDED:
                self.lose(status)

    def follow_masters(self) -> None:
        """Call `was_rewritten` if masters were changed in place, through tensors that the user got from parameters."""
        if self._masters_version != self._version_of_masters():
            self.was_rewritten()

    def _version_of_masters(self) -> int:
        return sum([master._version for master in self._masters])

    def follow(self, schedule: Schedule) -> None:
        """Switch to a schedule with another order of units."""
        self.settle()
        self.schedule = schedule
        for status, plan, slot in zip(self.statuses, schedule.units, schedule.slot_of, strict=True):
            self.lose(status)
            status.invalidate()
            status.rounded.clear()
            status.move(plan, slot)
        self.memory.arrange(schedule)
        self._prepared.clear()


class GatherMemory:
    """Memory for gathered units: slots that units share, and memory of a unit's own.

    Units gathered until the end of the backward release their own memory when they are dropped, by resizing its storage
    to zero: tensors that autograd saved still refer to that storage, and see the weights again once it is refilled.
    """

    def __init__(self, schedule: Schedule, statuses: list[UnitStatus], units: list[Unit], device: torch.device) -> None:
        self._device = device
        self._statuses = statuses
        self._units = units
        self.slots: list[Tensor] = []
        # For rows of encoded parameters in flight.
        self.row_slots = [self._bytes(schedule.row_slot_bytes) for _ in range(NUM_ROW_SLOTS)]
        self.own: dict[int, Tensor] = {}
        self.arrange(schedule)

    def _bytes(self, num_bytes: int) -> Tensor:
        # A normal tensor even inside inference mode: training uses this memory afterwards.
        with torch.inference_mode(False):
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def give_own(self, status: UnitStatus) -> None:
        self.own[status.index] = self._bytes(status.plan.gathered_bytes)
        self._bind(status, self.own[status.index])

    def arrange(self, schedule: Schedule) -> None:
        """Give units the slots of a schedule, or memory of their own. No unit may be gathered or in flight."""
        sizes = schedule.slot_bytes
        old = [*self.slots, *(self._bytes(0) for _ in sizes)][: len(sizes)]
        pairs = zip(old, sizes, strict=True)
        self.slots = [slot if slot.numel() >= size else self._bytes(size) for slot, size in pairs]
        for status in self._statuses:
            if status.slot is not None:
                self.own.pop(status.index, None)
                self._bind(status, self.slots[status.slot])
            elif status.index not in self.own:
                self.give_own(status)
                if status.plan.gives_back:
                    self.give_back(status.index)

    def fetch(self, index: int) -> None:
        """Allocate a unit's own memory again before a gather, if it was released."""
        own = self.own.get(index)
        if own is not None and own.untyped_storage().nbytes() != own.numel():
            own.untyped_storage().resize_(own.numel())

    def give_back(self, index: int) -> None:
        self.own[index].untyped_storage().resize_(0)

    def _bind(self, status: UnitStatus, memory: Tensor) -> None:
        flats = status.plan.flats
        sizes = [0 if flat.master_is_whole else flat.whole_bytes for flat in flats]
        for state, part in zip(self._units[status.index].states, cut(memory, sizes), strict=True):
            state.bind(state.master if state.flat.master_is_whole else part.view(state.flat.compute.torch))


def cut(memory: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Cut memory into aligned parts of these numbers of bytes."""
    parts, start = [], 0
    for num_bytes in sizes:
        parts.append(memory[start : start + num_bytes])
        start += aligned(num_bytes)
    return parts
