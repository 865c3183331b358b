"""Reductions of gradients: from where a backward writes them to where the optimizer reads them.

A reduction is opened (its gradients get memory), written, started and finished. It is opened before the unit's backward
if layers of the unit write their gradients there directly, else when it is started. Starting and finishing have a lane
each, so that the start of a reduction never waits for the one before. On a GPU the finish is queued at once. On a CPU
it would block the caller: there the last hop, the one between nodes, runs on until the slot is needed again or the
backward ends. Gradients that the host reads are copied to it on a third lane; then their slot is free.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...base.errors import StateError
from ..schedule.step_schedule import NUM_LEAVING, NUM_REDUCTIONS, Schedule, aligned
from ..unit.carrier import Channels
from ..unit.gradient import GradScale, ReductionInFlight, SlotViews
from ..unit.state import FlatState, Unit
from ..wire.collectives import Channel, finish, start_all_reduce
from .streams import Lane, Mark, PendingHostCopy, host_waits_for, is_capturing


@dataclass(frozen=True, slots=True)
class Opened:
    """The slot of a unit whose gradients are being written, if it needs one, and each flat's part of it."""

    slot: int | None
    rooms: list[SlotViews]


@dataclass(frozen=True, slots=True)
class Started:
    """The reductions of a unit's flats that were started; `mark` is the point on the lane behind their start."""

    states: list[FlatState]
    reductions: list[ReductionInFlight]
    is_sync: bool
    slot: int | None
    mark: Mark


@dataclass(frozen=True, slots=True)
class Fill:
    """The tensors in which autograd left gradients, held until the point at which they have been read."""

    taken: list[list[Tensor | None]]
    read: Mark


class Reductions:
    def __init__(
        self,
        schedule: Schedule,
        units: list[Unit],
        channels: Channels,
        scale: GradScale,
        device: torch.device,
        await_update: Callable[[FlatState], None],
    ) -> None:
        self._units = units
        self._channels = channels
        # Waits until the host's update has read a flat's gradient, because the next gradient overwrites it.
        self.await_update = await_update
        self._scale = scale
        self.memory = ReductionMemory(schedule, device)
        self.lane, self._finish_lane, self._leave_lane = Lane(device), Lane(device), Lane(device)
        # Points at which gradients are on the host; and flats whose device memory can be released after these points.
        self.arrived: dict[FlatState, Mark] = {}
        self._left: deque[tuple[FlatState, tuple[Mark, ...]]] = deque()
        self._needs_slot = [plan.reduced_bytes > 0 for plan in schedule.units]
        self._next_slot = 0
        self._opened: dict[int, Opened] = {}
        self._started: deque[Started] = deque()
        self._fill: Fill | None = None
        # Gradients that the computation has not waited for yet, and the points at which they are reduced.
        self._finished: dict[FlatState, Mark] = {}
        # With early updates: called with flats whose gradient is final.
        self.on_final: Callable[[list[FlatState]], None] | None = None

    @property
    def lanes(self) -> tuple[Lane, Lane, Lane]:
        return self.lane, self._finish_lane, self._leave_lane

    def open_for_compute(self, index: int) -> None:
        """Give a unit's gradients memory before its backward, which writes them there.

        Call this only for the next unit to be reduced: any other could take the slot that the next one needs.
        """
        if index not in self._opened:
            opened = self._opened[index] = self._open(index)
            if opened.slot is not None:
                for mark in self.memory.freed[opened.slot]:
                    self.lane.compute_waits_for(mark)

    def _open(self, index: int) -> Opened:
        unit = self._units[index]
        slot = self._next_slot if self._needs_slot[index] else None
        if slot is not None:
            self._next_slot = (slot + 1) % NUM_REDUCTIONS
            while slot in [started.slot for started in self._started]:
                self._finish_oldest()
        rooms = self.memory.rooms(unit, slot)
        for state, room in zip(unit.trainable_states, rooms, strict=True):
            if state.flat.host_updates and state.gradient.stage == "final":
                # The final gradient becomes a partial sum again, in the same memory.
                self.await_update(state)
                host_waits_for(self.arrived.get(state))
            elif state.flat.grads_on_host:
                self.lane.compute_waits_for(self.arrived.get(state))
            state.gradient.open(slot, room.grads, self._scale)
        return Opened(slot, rooms)

    def start(self, index: int, is_sync: bool) -> None:
        unit = self._units[index]
        opened = self._opened.pop(index) if index in self._opened else self._open(index)
        self._release_fill()
        self._release_left(NUM_LEAVING - 2)  # two more are being written and reduced
        states = unit.trainable_states
        taken = [state.take_gradients() for state in states]
        if torch.is_grad_enabled():  # create_graph=True: gradients have graphs of their own
            taken = [[None if grad is None else grad.detach() for grad in grads] for grads in taken]
        lane = self.lane.after_compute()
        for freed in () if opened.slot is None else self.memory.freed[opened.slot]:
            lane.after(freed)
        with lane.named(f"reduce {unit.name}"):
            reductions = [
                state.gradient.start_reduction(grads, room, is_sync, self._channels, self._scale, self.memory.scratch)
                for state, grads, room in zip(states, taken, opened.rooms, strict=True)
            ]
            mark = self.lane.mark()
        self._started.append(Started(states, reductions, is_sync, opened.slot, mark))
        self._fill = Fill(taken, mark)
        if self._finish_lane.queues:
            self._finish_oldest()
        else:
            for reduction in reductions:
                reduction.journey.go_to_last()

    def _release_fill(self) -> None:
        """Drop autograd's gradients. Their memory belongs to the compute stream, which waits until they were read."""
        if self._fill is not None:
            self.lane.compute_waits_for(self._fill.read)
            self._fill = None

    def _finish_oldest(self) -> None:
        started = self._started.popleft()
        states = started.states
        lane = self._finish_lane.after(started.mark)
        for state in states:
            lane.after(self.arrived.get(state))
        with lane:
            for reduction in started.reductions:
                reduction.gradient.finish_reduction(reduction, self._scale)
        marks = self._leave(states)
        self._finished |= dict.fromkeys(states, marks[-1])
        if started.slot is not None:
            self.memory.freed[started.slot] = marks
        if self.on_final is not None and started.is_sync:
            self.on_final(states)

    def _leave(self, states: list[FlatState]) -> tuple[Mark, ...]:
        """Copy gradients to the host if the host reads them. Return the points after which their slot is free."""
        mark = self._finish_lane.mark()
        leaving = [state for state in states if state.gradient.leaving is not None]
        if not leaving:
            return (mark,)
        for state in leaving:
            self.await_update(state)
        with self._leave_lane.after(mark).named(f"leave {states[0].unit_name}"):
            for state in leaving:
                state.gradient.leave()
        left = self._leave_lane.mark_for_host()
        # Queued after the copy: when the computation fills the device, these small kernels wait for a long time.
        with self._finish_lane:
            for state in leaving:
                state.gradient.take_square()
        marks = (left, self._finish_lane.mark())
        for state in leaving:
            self.arrived[state] = left
            if self.memory.gives_back and not state.flat.grads_on_host:
                self._left.append((state, marks))
        return marks

    def sync(self, state: FlatState) -> None:
        """Reduce the sums of micro-batches to the optimizer's layout, outside a backward."""
        with self._finish_lane.after_compute().after(self.arrived.get(state)):
            num_bytes = state.flat.exchanged_bytes
            rows = torch.empty(num_bytes, dtype=torch.uint8, device=state.device) if num_bytes else None
            state.gradient.sync(rows, self._channels, self._scale)
        self._finished[state] = self._leave([state])[-1]
        # The device copy that `sync` made is freed now: this lane may reuse its memory after the copy to the host.
        self._finish_lane.after(self.arrived.get(state))

    def _release_left(self, num_kept: int) -> None:
        """Release all but `num_kept` gradients that go to the host. The compute stream waits for their copies first."""
        while len(self._left) > num_kept:
            state, marks = self._left.popleft()
            for mark in marks:
                self.lane.compute_waits_for(mark)
            state.gradient.give_back()

    def finish_all(self) -> None:
        """Finish every started reduction; on a GPU this only queues the work."""
        self._release_fill()
        while self._started:
            self._finish_oldest()

    def wait(self) -> None:
        """Let the computation wait for every reduction, then release their memory."""
        if self._finished:
            self._finish_lane.join()
            self._leave_lane.join()
            self._release_left(0)
            self._finished.clear()
            self.memory.give_back()

    def reduced_at(self, state: FlatState) -> Mark:
        """The point at which a gradient is final; None when the computation has waited for it."""
        return self._finished.get(state)

    def abandon(self) -> None:
        """Finish the reductions of a backward that failed, and forget the gradients being written."""
        self.finish_all()
        self.wait()
        self._opened.clear()
        self.memory.give_back()


class ReductionMemory:
    """The slots in which gradients are reduced, allocated at the first reduction of a backward.

    On a GPU they are released at its end, and the caching allocator reuses them for activations of the next forward. On
    a CPU they stay: freed blocks of this size go back to the system, and fresh pages cost more than writing a gradient.
    """

    def __init__(self, schedule: Schedule, device: torch.device) -> None:
        self._num_bytes = schedule.reduction_slot_bytes
        self._device = device
        self.gives_back = device.type == "cuda"
        self.slots: list[Tensor | None] = [None] * NUM_REDUCTIONS
        self._views: dict[tuple[int, int | None], list[SlotViews]] = {}
        # The points after which a slot may be written again.
        self.freed: list[tuple[Mark, ...]] = [()] * NUM_REDUCTIONS
        self._scratch: Tensor | None = None
        self._scratch_bytes = schedule.scratch_bytes

    def rooms(self, unit: Unit, slot: int | None) -> list[SlotViews]:
        """The memory in a slot for every trainable flat of a unit."""
        memory = None if slot is None else self._fetch(slot)
        key = (unit.index, slot)
        if key not in self._views:
            found: list[SlotViews] = []
            start = 0

            def take(num_bytes: int) -> Tensor:
                nonlocal start
                assert memory is not None
                start += aligned(num_bytes)
                return memory[start - aligned(num_bytes) :][:num_bytes]

            for state in unit.trainable_states:
                flat = state.flat
                in_slot = slot is not None and flat.reduces_in_slot  # a unit without elements has no slot
                grads = take(flat.num_elems * flat.reduce.itemsize) if in_slot else None
                rows = take(flat.exchanged_bytes) if flat.exchanged_bytes else None
                found.append(SlotViews(None if grads is None else grads.view(flat.reduce.torch), rows))
            self._views[key] = found
        return self._views[key]

    def _fetch(self, index: int) -> Tensor:
        memory = self.slots[index]
        if memory is None:
            memory = self.slots[index] = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
        elif memory.untyped_storage().nbytes() == 0:
            memory.untyped_storage().resize_(self._num_bytes)
        return memory

    @property
    def lent(self) -> list[Tensor]:
        """The slots and the scratch memory that have been allocated so far."""
        return [memory for memory in (*self.slots, self._scratch) if memory is not None]

    @property
    def has_scratch(self) -> bool:
        return self._scratch is not None

    def scratch(self, num_bytes: int) -> Tensor:
        """Memory for sums of earlier micro-batches, which come back from the host one after the other."""
        if self._scratch is None:
            self._scratch = torch.empty(self._scratch_bytes, dtype=torch.uint8, device=self._device)
        return self._scratch[:num_bytes]

    def give_back(self) -> None:
        """Release the slots, once the computation has waited for all reductions. Their views see the next memory."""
        if self.gives_back:
            self.freed = [()] * NUM_REDUCTIONS
            for memory in self.slots:
                if memory is not None:
                    memory.untyped_storage().resize_(0)


class Gradients:
    """Gradients between backward and optimizer: completes them, agrees with other ranks on their use, clears them."""

    def __init__(self, states: list[FlatState], reductions: Reductions, channel: Channel, device: torch.device) -> None:
        self._states = states
        self._reductions = reductions
        self._channel = channel
        self._device = device
        self.all_used: Tensor | None = None
        # A small number computed from the optimizers' settings; and the last sum of all ranks' numbers, not yet read.
        self.settings: Callable[[], int] = lambda: 0
        self._sum: tuple[PendingHostCopy, int] | None = None

    def refuse_late(self) -> None:
        for state in self._states:
            late = [
                spec.name
                for spec, param in zip(state.flat.params, state.compute_params, strict=True)
                if param.grad is not None
            ]
            if late:
                raise StateError(
                    f"parameter {late[0]!r} of unit {state.unit_name!r} got a gradient after the unit's backward had "
                    "ended: its forward recorded something that reaches the loss beside what it returned (return it), "
                    "or ran in a reentrant checkpoint (use use_reentrant=False)"
                )

    def agree_on_use(self) -> None:
        """Exchange which parameters were used: one that no rank used gets no gradient, as with one process.

        Every rank takes part, but only a rank with unused parameters has to wait for the result. The same all-reduce
        sums a number for the optimizers' settings. On a GPU that sum is read at the next call, so nothing waits for it.
        """
        used = [flag for state in self._states for flag in state.gradient.used]
        if self.all_used is None:
            self.all_used = torch.ones(len(used) + 1, dtype=torch.int32, device=self._device)
        left_out, settings, is_recorded = not all(used), self.settings(), is_capturing(self._device)
        if not is_recorded:
            self._refuse_other_settings()
        with self._reductions.lane.after_compute():
            mine = torch.tensor([*used, 0], dtype=torch.int32) if left_out else self.all_used
            flags = mine.to(self._device, copy=True)
            flags[-1:].fill_(settings)
            finish(start_all_reduce(self._channel, flags, "which parameters were used", sums=True))
            if not is_recorded:
                self._sum = (PendingHostCopy(flags[-1]), settings)
        if self._device.type == "cpu":
            self._refuse_other_settings()
        if left_out:
            self._reductions.lane.join()
            answers = iter(flags.tolist())
            for state in self._states:
                state.gradient.used = [next(answers) > 0 for _ in state.gradient.used]

    def _refuse_other_settings(self) -> None:
        """Refuse optimizers whose settings differ between ranks."""
        if self._sum is not None:
            later, own = self._sum
            self._sum = None
            # On an emulated fabric no other rank exists, and the sum is this rank's number. All numbers are positive.
            if later.read()[0] not in (own, self._channel.num_ranks * own):
                raise StateError(
                    "the ranks' optimizers have different settings, so their weights would drift apart: give every "
                    "rank the same learning rate and the like (optimizer.param_groups)"
                )

    @property
    def local(self) -> list[FlatState]:
        """Flats whose gradients are sums of micro-batches, not in the optimizer's layout yet."""
        return [state for state in self._states if state.gradient.stage == "local"]

    def sync(self, states: list[FlatState]) -> None:
        for state in states:
            self._reductions.sync(state)
        self._reductions.wait()
        self.agree_on_use()

    def await_on_host(self, state: FlatState) -> None:
        """Wait until the gradient of a flat is on the host, and no update reads it."""
        self._reductions.await_update(state)
        host_waits_for(self._reductions.arrived.get(state))

    def forget(self, states: Iterable[FlatState], set_to_none: bool) -> None:
        """Clear gradients. Without `set_to_none` they become zeros, with which momenta still change."""
        for state in states:
            state.take_gradients()
            if not set_to_none and state.gradient.stage != "empty" and state.gradient.grads is not None:
                self.await_on_host(state)
            state.gradient.forget(not set_to_none, self._reductions.memory.gives_back)
