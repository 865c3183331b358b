"""Reductions of gradients: from where a backward writes them to where the optimizer reads them.

A reduction is opened (its gradients get memory), written, started and finished. It is opened when a layer of the unit
writes the first gradient there directly. If no layer does, or the unit is late, it is opened when it is started.
Starting and finishing have a lane each, so that the start of a reduction never waits for the one before. On a GPU the
finish is queued at once. On a CPU it would block the caller: there the last hop, the one between nodes, stays in flight
until the slot is needed again or the backward ends. Gradients that the host reads are copied to it on a third lane;
then their slot is free. The update of masters has a fourth lane and waits for the reductions that it needs. An early
update runs during the backward.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...base.errors import ConfigurationError, StateError
from ..mesh import Mesh
from ..schedule.step_schedule import MAX_HELD_BYTES, NUM_LATE, NUM_OFFLOADED_GRADS, NUM_REDUCTIONS, Schedule
from ..schedule.unit_status import UnitStatus
from ..unit.gradient import Room
from ..unit.state import FlatState, Unit
from ..wire.collectives import all_reduce
from .gathers import cut
from .streams import Lane, Mark, PendingHostCopy, host_waits_for
from .updates import HostJobs


class Started(NamedTuple):
    """Started reductions of one unit. `is_sync`: of the last micro-batch. `mark`: the lane's point after the start."""

    states: list[FlatState]
    is_sync: bool
    slot: int | None
    mark: Mark


class Reductions:
    def __init__(
        self, schedule: Schedule, statuses: list[UnitStatus], units: list[Unit], mesh: Mesh, host_jobs: HostJobs
    ) -> None:
        self._statuses = statuses
        self._units = units
        self._states = [state for unit in units for state in unit.trainable_states]
        self._channels = mesh.channels["reduce"]
        self._device = device = mesh.device
        # Waits until the host's update has read a flat's gradient, because the next gradient overwrites it.
        self._await_update, self._drop_update = host_jobs.await_update_of, host_jobs.drop
        self.memory = ReductionMemory(schedule, device)
        for unit in units:
            for state in unit.trainable_states:
                state.gradient.ask_to_open = partial(self._open_for_compute, unit.index)
        self.lanes = tuple(Lane(device) for _ in range(4))
        self._lane, self._finish_lane, self._leave_lane, self._update_lane = self.lanes
        # The point after which a gradient is on the host; flats whose device memory is released after their points.
        self.arrived: dict[FlatState, Mark] = {}
        self._left: deque[tuple[FlatState, tuple[Mark, ...]]] = deque()
        # The slot that was opened last, and the number of units that have had one in this backward.
        self._slot = self._num_opened = 0
        # Units that are not reduced yet in this backward, in the schedule's order.
        self._due: deque[int] = deque()
        # Units whose gradients are being written, and their slots.
        self._opened: dict[int, int | None] = {}
        self._started: deque[Started] = deque()
        # The tensors in which autograd left gradients, held until the point at which they have been read.
        self._taken: tuple[list[list[Tensor | None]], Mark] | None = None
        # Gradients that the computation has not waited for yet, and the points at which they are reduced.
        self._finished: dict[FlatState, Mark] = {}
        # Flats whose update the computation has not waited for yet, and the points at which they are updated.
        self.updated: dict[FlatState, Mark] = {}
        # For early updates: a function that updates flats whose gradient is final; the point where this step's forward
        # began; True if weights were updated and optimizer.step() was not called yet.
        self.update_early: Callable[[list[FlatState]], None] | None = None
        # Functions that may let the host update flats whose gradient is final, ahead of optimizer.step().
        self.update_ahead: list[Callable[[list[FlatState]], None]] = []
        self._forward_began: Mark = None
        self._awaits_step = False
        self.all_used: Tensor | None = None
        # Returns a small number for the optimizers' settings; the sum over all ranks, not read yet, and our own number.
        self.settings: Callable[[], int] = lambda: 0
        self._sum: tuple[PendingHostCopy, int] | None = None

    # During a backward.

    def begin_backward(self, order: Iterable[int]) -> None:
        self.refuse_after_early("backward")
        self.wait()
        self._due = deque(order)
        self._slot = self._num_opened = 0

    def start_complete(self, is_sync: bool, all_units: bool = False) -> None:
        """Start the next reductions in the schedule's order, up to the first unit whose gradients are not complete."""
        while self._due and (all_units or self._statuses[self._due[0]].is_complete):
            self._start(self._due.popleft(), is_sync)

    def _open_for_compute(self, index: int, num_tokens: int) -> bool:
        """Give a unit's gradients memory when its backward is about to write the first of them there, unless the unit
        is late. Only the next unit to be reduced gets it: any other could take the slot that the next one needs."""
        if not self._due or self._due[0] != index:
            return False
        if not (self._may_be_late and self._statuses[index].plan.is_late(num_tokens)):
            self._opened[index] = self._open(index, is_late=False)
        return True

    @property
    def _may_be_late(self) -> bool:
        return self.memory.gives_back and self._num_opened < NUM_LATE

    def _open(self, index: int, is_late: bool) -> int | None:
        """Give a unit's gradients memory: in the slot of the unit before, if it is late, else in the other slot."""
        unit, num_bytes = self._units[index], self._statuses[index].plan.reduced_bytes
        slot = None
        if num_bytes:
            slot = self._slot = self._slot if is_late else (self._slot + 1) % NUM_REDUCTIONS
            self._num_opened += 1
            while slot in [started.slot for started in self._started]:
                self._finish_oldest()
            # The computation writes the slot, or releases its memory, which may then become an activation.
            self._lane.compute_waits_for(*self.memory.freed.get(slot, ()))
        for state, room in zip(unit.trainable_states, self.memory.rooms(unit, slot, num_bytes), strict=True):
            if state.flat.host_updates and state.gradient.stage == "final":
                # The final gradient becomes a partial sum again, in the same memory.
                self.await_on_host(state)
            elif state.flat.grads_on_host:
                self._lane.compute_waits_for(self.arrived.get(state))
            state.gradient.open(slot, room)
            if state.gradient.late:
                state.gradient.put_late()
        return slot

    def _start(self, index: int, is_sync: bool) -> None:
        unit = self._units[index]
        states = unit.trainable_states
        taken = list(map(FlatState.take_gradients, states))
        # Refused before anything of the unit starts: a collective of another flat would stay in flight.
        for state, grads in zip(states, taken, strict=True):
            for spec, grad in zip(state.flat.params, grads, strict=True):
                if grad is not None and grad.layout != torch.strided:
                    fix = "set sparse=False on its module"
                    raise ConfigurationError(f"parameter {spec.name!r} got a sparse gradient: {fix}")
        # Memory is at its peak: large gradients of autograd do not wait for a second slot, and are not held.
        counted = [grad for grads in taken for grad in grads if grad is not None] if self._may_be_late else []
        is_large = sum([grad.nbytes for grad in counted]) > MAX_HELD_BYTES
        if index in self._opened:
            slot = self._opened.pop(index)
        else:
            slot = self._open(index, is_large or any(state.gradient.late for state in states))
        self._release_taken()
        self._release_left(NUM_OFFLOADED_GRADS - 2)  # one more is reduced now, and one is written
        for state in states:
            state.gradient.fetch()
        if torch.is_grad_enabled():  # create_graph=True: gradients have graphs of their own
            taken = [[None if grad is None else grad.detach() for grad in grads] for grads in taken]
        with self._lane.after_compute(f"reduce {unit.name}"):
            hop_chains = [
                state.gradient.start_reduction(grads, is_sync, self._channels, self.memory.scratch)
                for state, grads in zip(states, taken, strict=True)
            ]
            mark = self._lane.mark()
        self._started.append(Started(states, is_sync, slot, mark))
        self._taken = (taken, mark)
        if is_large:
            self._release_taken()
        if self._finish_lane.queues:
            self._finish_oldest()
        else:
            for hop_chain in hop_chains:
                if hop_chain.at < hop_chain.last:
                    hop_chain.run_to(hop_chain.last)

    def _release_taken(self) -> None:
        """Drop autograd's gradients. Their memory belongs to the compute stream, which waits until they are read."""
        if self._taken is not None:
            self._lane.compute_waits_for(self._taken[1])
            self._taken = None

    def _finish_oldest(self) -> None:
        states, is_sync, slot, mark = self._started.popleft()
        with self._finish_lane.after(mark, *map(self.arrived.get, states)):
            for state in states:
                state.gradient.finish_reduction()
        marks = self._leave(states)
        self._finished |= dict.fromkeys(states, marks[-1])
        if slot is not None:
            self.memory.freed[slot] = marks
        if self.update_early is not None and is_sync:
            self.update_early(states)
            self._awaits_step = True
        for update_ahead in self.update_ahead if is_sync else ():
            update_ahead(states)

    def _leave(self, states: list[FlatState]) -> tuple[Mark, ...]:
        """Copy gradients to the host if the host reads them. Return the points after which their slot is free."""
        mark = self._finish_lane.mark()
        leaving = [state for state in states if state.gradient.leaving is not None]
        if not leaving:
            return (mark,)
        for state in leaving:
            self._await_update(state)
        with self._leave_lane.after(mark, name=f"leave {states[0].unit_name}"):
            for state in leaving:
                state.gradient.leave()
        left = self._leave_lane.mark_for_host()
        # After the copy, which must not wait for these small kernels: they start late while the device is full.
        with self._finish_lane:
            for state in leaving:
                state.gradient.compute_sum_of_squares()
        marks = (left, self._finish_lane.mark())
        for state in leaving:
            self.arrived[state] = left
            if self.memory.gives_back and not state.flat.grads_on_host:
                self._left.append((state, marks))
        return marks

    def _release_left(self, num_waiting: int) -> None:
        """Release all but `num_waiting` gradients that go to the host. The compute stream waits for their copies."""
        while len(self._left) > num_waiting:
            state, marks = self._left.popleft()
            self._lane.compute_waits_for(*marks)
            state.gradient.give_back()

    def finish_all(self) -> None:
        """Finish every started reduction; on a GPU this only queues the work."""
        self._release_taken()
        while self._started:
            self._finish_oldest()

    def wait(self) -> None:
        """Let the computation wait for every update and reduction, then release the memory of reductions."""
        self._update_lane.join()
        self.updated.clear()
        self._wait_for_reductions()

    def are_awaited(self) -> bool:
        """True if the computation has waited for every reduction."""
        return not self._finished

    def _wait_for_reductions(self) -> None:
        if self._finished:
            self._finish_lane.join()
            self._leave_lane.join()
            self._release_left(0)
            self._finished.clear()
            self.memory.give_back()

    def abandon(self) -> None:
        """Finish the reductions of a backward that failed, and forget the gradients being written."""
        self.finish_all()
        self.wait()
        self._opened.clear()
        self.memory.give_back()
        for state in self._states:
            state.take_gradients()
            state.gradient.drop_places()

    # Between backward and optimizer.

    def refuse_late(self) -> None:
        for state in self._states:
            for spec, param in zip(state.flat.params, state.compute_params, strict=True):
                if param.grad is not None:
                    raise StateError(
                        f"parameter {spec.name!r} of unit {state.unit_name!r} got a gradient after its backward: its "
                        "forward recorded something that reaches the loss and that it did not return (return it), "
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
        left_out, settings = not all(used), self.settings()
        is_recorded = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()  # into a CUDA graph
        if not is_recorded:
            self._refuse_other_settings()
        with self._lane.after_compute():
            mine = torch.tensor([*used, 0], dtype=torch.int32) if left_out else self.all_used
            flags = mine.to(self._device, copy=True)
            flags[-1:].fill_(settings)
            all_reduce(self._channels["world"], flags, "which parameters were used", sums=True).run()
            if not is_recorded:
                self._sum = (PendingHostCopy(flags[-1]), settings)
        if self._device.type == "cpu":
            self._refuse_other_settings()
        if left_out:
            self._lane.join()
            answers = iter(flags.tolist())
            for state in self._states:
                state.gradient.used = [next(answers) > 0 for _ in state.gradient.used]

    def _refuse_other_settings(self) -> None:
        """Refuse optimizers whose settings differ between ranks."""
        if self._sum is not None:
            (later, own), self._sum = self._sum, None
            # On an emulated fabric no other rank exists, and the sum is this rank's number. All numbers are positive.
            if later.read()[0] not in (own, self._channels["world"].num_ranks * own):
                differ = "the ranks' optimizers have different settings (optimizer.param_groups)"
                raise StateError(f"{differ}: give every rank the same learning rate and the like")

    def sync(self, states: list[FlatState]) -> None:
        """Reduce the sums of micro-batches to the optimizer's layout, outside a backward."""
        self.wait()
        for state in states:
            with self._finish_lane.after_compute().after(self.arrived.get(state)):
                state.gradient.sync(self._channels)
            self._finished[state] = self._leave([state])[-1]
            # `sync` made a device copy that is freed now. This lane reuses its memory only after the copy to the host.
            self._finish_lane.after(self.arrived.get(state))
        self.wait()
        self.agree_on_use()

    def await_on_host(self, state: FlatState) -> None:
        """Wait until the gradient of a flat is on the host, and no update reads it."""
        self._await_update(state)
        host_waits_for(self.arrived.get(state))

    def forget(self, states: Iterable[FlatState], set_to_none: bool) -> None:
        """Clear gradients. Without `set_to_none` they become zeros; an update with zeros still changes momenta."""
        self.wait()
        for state in states:
            self._drop_update(state)
            state.take_gradients()
            if not set_to_none and state.gradient.stage != "empty" and state.gradient.grads is not None:
                self.await_on_host(state)
            state.gradient.forget(not set_to_none, self.memory.gives_back)

    # Updates on the device.

    def begin_forward(self) -> None:
        self.wait()
        self.refuse_after_early("forward")
        if self.update_early is not None:
            self._forward_began = self._update_lane.mark_compute()

    def refuse_after_early(self, what: str) -> None:
        if self._awaits_step:
            raise StateError(
                f"a {what} after a backward that has updated weights (early_update=True) and before optimizer.step(): "
                "call step() first, and run all micro-batches but the last inside `with sw.accumulate(model):`"
            )

    @contextmanager
    def updating(self, states: list[FlatState], early: bool) -> Iterator[None]:
        """Work inside `with` goes to the lane of updates, which waits for the reductions of `states`, not for others.
        Unless the update is early, it also waits for all work queued on the compute stream so far, because that may
        read weights."""
        lane = self._update_lane.after(self._forward_began) if early else self._update_lane.after_compute()
        with lane.after(*map(self._finished.get, states)):
            yield
        self.updated |= dict.fromkeys(states, lane.mark())

    def close_step(self) -> None:
        """Let the computation wait for the reductions, not yet for the updates."""
        self._wait_for_reductions()
        self._awaits_step = False


class ReductionMemory:
    """The slots in which gradients are reduced, allocated at the first reduction of a backward.

    On a GPU a slot has the size of the unit that uses it, and all are released at the end of the backward. The caching
    allocator reuses their memory for activations. On a CPU they stay, and fit the largest unit: freed blocks of this
    size go back to the system, and fresh pages cost more than writing a gradient.
    """

    def __init__(self, schedule: Schedule, device: torch.device) -> None:
        self._largest = schedule.reduction_slot_bytes
        self._device = device
        self.gives_back = device.type == "cuda"
        # The memory of each slot now, and all tensors for slots, by slot and size. At most one of a slot has memory.
        self.slots: list[Tensor | None] = [None] * NUM_REDUCTIONS
        self._sized: dict[tuple[int, int], Tensor] = {}
        self.peak_bytes = 0
        self._rooms: dict[tuple[int, int], list[Room]] = {}
        # The points after which a slot may be written again.
        self.freed: dict[int | None, tuple[Mark, ...]] = {}
        self.scratch_memory: Tensor | None = None
        self._scratch_bytes = schedule.scratch_bytes

    def rooms(self, unit: Unit, slot: int | None, num_bytes: int) -> list[Room]:
        """The memory in a slot for every trainable flat of a unit, `num_bytes` in all. A unit without elements has no
        slot. The computation has waited until the slot is free."""
        if slot is None:
            return [(None, None)] * len(unit.trainable_states)
        memory = self._fetch(slot, num_bytes if self.gives_back else self._largest)
        key = (unit.index, slot)
        if key not in self._rooms:
            flats = [state.flat for state in unit.trainable_states]
            parts = cut(memory, [size for flat in flats for size in (flat.reduced_bytes, flat.exchanged_bytes)])
            self._rooms[key] = [
                (
                    grads.view(flat.reduce.torch) if flat.reduces_in_slot else None,
                    rows if flat.exchanged_bytes else None,
                )
                for flat, grads, rows in zip(flats, parts[::2], parts[1::2], strict=True)
            ]
        return self._rooms[key]

    def _fetch(self, slot: int, num_bytes: int) -> Tensor:
        memory = self._sized.get((slot, num_bytes))
        if memory is not None and memory is self.slots[slot] and self.num_bytes(slot):
            return memory
        self.release(slot)
        if memory is None:
            memory = self._sized[slot, num_bytes] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        else:
            memory.untyped_storage().resize_(num_bytes)
        self.slots[slot] = memory
        self.peak_bytes = max(self.peak_bytes, sum(map(self.num_bytes, range(NUM_REDUCTIONS))))
        return memory

    def num_bytes(self, slot: int) -> int:
        """Bytes that a slot has now: none, if it is released."""
        memory = self.slots[slot]
        return 0 if memory is None else memory.untyped_storage().nbytes()

    def release(self, slot: int) -> None:
        """Release a slot, once the computation has waited for its reduction. Views of it stay valid."""
        memory = self.slots[slot]
        if memory is not None:
            memory.untyped_storage().resize_(0)

    def scratch(self, num_bytes: int) -> Tensor:
        """Memory for sums of earlier micro-batches, which come back from the host one after the other."""
        if self.scratch_memory is None:
            self.scratch_memory = torch.empty(self._scratch_bytes, dtype=torch.uint8, device=self._device)
        return self.scratch_memory[:num_bytes]

    def give_back(self) -> None:
        """Release all slots, once the computation has waited for all reductions."""
        if self.gives_back:
            self.freed.clear()
            for slot in range(NUM_REDUCTIONS):
                self.release(slot)
