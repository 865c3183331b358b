"""The engine: executes the schedule on real buffers, driven by the model's own forward and backward.

One step, in numbered phases:

    1. before a unit's forward: start the gathers the schedule names (this unit, and the next ones ahead), wait
       for this unit's, show its compute parameters.
    2. after its forward: show the resting ones again. Its slot may now be taken by another unit.
    3. before its backward: as 1, in reverse order.
    4. after its backward, when that of an earlier unit begins: hand its gradient to the reduce lane, in the schedule's
       order on every rank.
    5. end of the backward: reduce what is left (parameters that got no gradient count as zero).
    6. the optimizer's step, on masters and final gradients as they arrive; then the next step's first gathers.

The engine never asks which preset runs: the schedule, the flats' depths and `Occupancy` hold the answers.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..away import Away, HostMemory
from ..errors import StateError
from ..mesh import Lane as LaneName
from ..mesh import Mesh
from ..optim.host_updates import FlatUpdate
from ..plan.flat import Flat
from ..plan.offload import NUM_STAGED, is_staged
from ..plan.schedule import Occupancy, Schedule, make_schedule
from ..precision import Precision
from ..unit import Channels, FlatState, GradScale, OnHost, Unit
from ..wire.collectives import InFlight, exchange, finish, start_all_reduce
from .activations import HostActivations
from .host_lane import HostLane, Job
from .memory import GatherMemory
from .reductions import Reductions
from .streams import Lane, Later, Mark, has_passed, host_waits_for

if TYPE_CHECKING:
    from ..plan.plan import Plan

# The version of compute parameters whose memory does not hold their weights; 2 * num_updates while it does.
LOST = 1


@dataclass(slots=True, eq=False, weakref_slot=True)
class ForwardCall:
    """One forward of a unit that a backward may come back to, between two ticks of the engine's clock.

    It lives as long as the graph that can lead to it. `closed_in` is the last backward that went through it, and it is
    spent when that backward did not keep the graph.
    """

    unit: int
    began: int
    ended: int
    num_updates: int
    is_open: bool = False
    closed_in: int = -1
    is_spent: bool = False


@dataclass(slots=True)
class GatherInFlight:
    """`staged` is memory that the copies to the device read from."""

    flights: list[InFlight]
    queued: Mark
    staged: Tensor | None


class Engine:
    def __init__(
        self,
        mesh: Mesh,
        schedule: Schedule,
        units: list[Unit],
        precision: Precision,
        budget_bytes: int | None,
        loss_scale: Tensor | None,
        host: HostMemory,
    ) -> None:
        self.mesh = mesh
        self.schedule = schedule
        self.units = units
        self.precision = precision
        self.chosen: Plan | None = None  # where the strategy was the planner's choice
        self.is_sync = True
        self.is_captured = False
        self._replay_state: tuple[object, ...] = ()
        # Inside sw.whole: modules that show whole masters, so that their state dict may be taken.
        self.whole_modules: set[int] = set()
        self.num_updates = 0
        # Told of every step, before it is taken.
        self.at_step: list[Callable[[], None]] = []
        # With early updates: where this step's forward began, and whether weights have changed since.
        self._forward_began: Mark = None
        self._awaits_step = False
        self.scale = GradScale.mean(
            mesh.world_size, precision.compute.torch, precision.reduce.torch, loss_scale, mesh.world.averages
        )
        self.is_loss_scaled = False
        self._budget_bytes = budget_bytes
        self._occupancy = Occupancy(schedule)
        self.memory = GatherMemory(schedule, units, mesh.device)
        self._gather_lane, self._update_lane = Lane(mesh.device), Lane(mesh.device)
        self._gather_channels = channels_of(mesh, "gather")
        self._reduce_channels = channels_of(mesh, "reduce")
        self._gathers: dict[int, GatherInFlight] = {}
        # Units to gather before any other: put off while the host updates them.
        self._owed: deque[int] = deque()
        self.host = host
        self.activations = HostActivations(units, hosted_units(schedule), mesh.device, host)
        self.host_lane = HostLane()
        weakref.finalize(self, self.host_lane.end)
        # Updates on the host that the next gather of their flat waits for.
        self.jobs: dict[FlatState, Job] = {}
        self._is_staged = [any(is_staged(state.flat) for state in unit.states) for unit in units]
        self.reductions = Reductions(
            schedule, units, self._reduce_channels, self.scale, mesh.device, self.await_update_of
        )
        self._clips: dict[Tensor, Later] = {}
        self._in_backward = False
        self._graph_task = -1
        self._num_backwards = 0
        self._busy = [0] * len(units)
        self._calls: list[list[weakref.ref[ForwardCall]]] = [[] for _ in units]
        self._complete = [False] * len(units)
        self._reduce_queue: deque[int] = deque()
        self._clock = 0
        self._began = [0] * len(units)
        self._called = [False] * len(units)
        # Units that run one after the other, and how far this forward and this backward have come among them.
        self._leaves = schedule.leaves
        self._position_of = {unit: position for position, unit in enumerate(self._leaves)}
        self._forward_at = len(self._leaves)
        self._backward_at = 0
        self._open_calls: set[ForwardCall] = set()
        # The order of units in the first forward, until the first step has been taken.
        self._seen_order: list[int] | None = []
        self.all_used: Tensor | None = None
        self._masters_version = self._version_of_masters()
        for unit in units:
            unit.show_resting()
            unit.stamp(LOST)
            for state in unit.trainable_states:
                for param in state.resting_params:
                    if isinstance(param, OnHost):
                        param.await_update = partial(self.await_update_of, state)

    @cached_property
    def update_order(self) -> list[list[FlatState]]:
        """The flats that are trained, unit by unit, in the order in which their gradients are reduced."""
        return [self.units[index].trainable_states for index in self.schedule.reduce_order]

    @cached_property
    def trainable_states(self) -> list[FlatState]:
        return [state for unit in self.units for state in unit.trainable_states]

    # Phases 1 and 3: gather.

    def make_ready(self, index: int, ahead: Sequence[int] = ()) -> None:
        """Gather a unit, start the gathers to run behind its computation, show its compute parameters."""
        self._start_gather(index, needed_now=True)
        self._gather_ahead(ahead)
        if index in self._gathers:
            self._finish_gather(index)
        self.units[index].show_compute()

    def _gather_ahead(self, ahead: Sequence[int]) -> None:
        """As far as the host is through with its updates: whether it is, is no reason to wait for it now. On another
        rank it may be, so what is put off comes before every other gather, and before anybody waits for all of them."""
        for position, other in enumerate(ahead):
            if not self._is_updated(other):
                self._owed.extend(unit for unit in ahead[position:] if unit not in self._owed)
                return
            self._start_gather(other, needed_now=False)

    def _is_updated(self, index: int) -> bool:
        jobs = [self.jobs.get(state) for state in self.units[index].trainable_states] if self.jobs else []
        return all(job is None or job.is_done for job in jobs)

    def _await_updates(self, index: int) -> None:
        for state in self.units[index].trainable_states if self.jobs else ():
            self.await_update_of(state)

    def await_update_of(self, state: FlatState) -> None:
        self.host_lane.wait_for(self.jobs.pop(state, None))

    def _read_ahead(self, ahead: Iterable[int]) -> None:
        """Start to read parameters that rest on disk, for the next units."""
        for other in ahead:
            wanted = self._wanted_from_disk(other, self._occupancy.todo(other))
            if wanted and not (self._is_updated(other) and self.host.staging.ask(other, wanted)):
                return

    def _start_gather(self, index: int, needed_now: bool) -> None:
        if self._occupancy.is_ready(index):
            return
        self._start_owed(before=index)
        self._start_in_turn(index, needed_now)

    def _start_owed(self, before: int | None = None) -> None:
        while self._owed:
            index = self._owed.popleft()
            if index == before:
                return
            if not self._occupancy.is_ready(index):
                self._start_in_turn(index, needed_now=False)

    def _start_in_turn(self, index: int, needed_now: bool) -> None:
        occupancy = self._occupancy
        self._await_updates(index)
        slot = self.schedule.slot_of[index]
        holder = None if slot is None else occupancy.holder.get(slot)
        if holder is not None and holder != index:
            if not self._busy[holder]:
                self._lose(holder)
            elif needed_now:
                self._leave_slot(index, holder)
            else:
                return
        if index in self._gathers:
            self._finish_gather(index)
        unit = self.units[index]
        todo = occupancy.take(index)
        if not [flat for flat, _ in todo if not flat.master_is_whole]:
            unit.stamp(2 * self.num_updates)
            return
        with self._gather_lane.after_compute().named(f"gather {unit.name}"):
            self.memory.fetch(index)
            flights: list[InFlight] = []
            place: Tensor | None = None
            staged: dict[Flat, Tensor] = {}
            if wanted := self._wanted_from_disk(index, todo):
                place, staged = self.host.staging.take(index, wanted)
            for state in unit.states:
                for flat, is_stale in todo:
                    if flat is state.flat:
                        flights += state.start_gather(is_stale, staged.get(flat), self._gather_channels)
            self._gathers[index] = GatherInFlight(flights, self._gather_lane.mark(), place)

    def _wanted_from_disk(self, index: int, todo: Iterable[tuple[Flat, bool]]) -> list[Away]:
        """What of a unit is read from disk: not a copy at rest that is about to be made anew."""
        wanted = [flat for flat, is_stale in todo if is_staged(flat) and (flat.rest_is_own or not is_stale)]
        states = self.units[index].states if wanted else ()
        return [state.away for state in states if state.away is not None and any(state.flat is flat for flat in wanted)]

    def _lose(self, index: int) -> None:
        """A unit's gathered memory is about to be another's, or nobody's."""
        if index in self._gathers:
            self._finish_gather(index)
        self.units[index].show_resting()
        self.units[index].stamp(LOST)

    def _finish_gather(self, index: int) -> None:
        gather = self._gathers.pop(index)
        for flight in gather.flights:
            finish(flight)
        self._gather_lane.compute_waits_for(gather.queued)
        if gather.staged is not None:
            self.host.staging.give_back(gather.staged, partial(host_waits_for, gather.queued))
        self.units[index].stamp(2 * self.num_updates)

    def _leave_slot(self, index: int, holder: int) -> None:
        """Two units that share a slot are needed at once: the model does not run in the order of its modules."""
        if self._live_calls(index):
            raise StateError(
                f"unit {self.units[index].name!r} must be gathered while {self.units[holder].name!r}, which shares its "
                "memory, is computing, and a backward still needs its old place. Checkpoint fewer units together, "
                "raise memory_budget, or keep these units gathered until the backward"
            )
        slot_of = list(self.schedule.slot_of)
        slot_of[index] = None
        self.schedule = self._occupancy.schedule = replace(self.schedule, slot_of=tuple(slot_of))
        self._occupancy.held[index] = False
        self.memory.give_own(index, self.schedule)

    # Phases 1 to 4 as the hooks report them.

    def before_forward(self, index: int) -> None:
        if self.whole_modules:
            raise StateError("a forward inside `with sw.whole(...)`: leave the context first")
        if self._seen_order is not None and index not in self._seen_order:
            self._seen_order.append(index)
        if self._busy[index]:
            # Called from inside its own forward, such as a module that owns parameters of the root.
            self.make_ready(index)
        else:
            self._clock += 1
            self._began[index] = self._clock
            self._called[index] = True
            self._pass_over_in_forward(index)
            self.make_ready(index, self.schedule.before_forward[index])
            self._read_ahead(self._after(index, 1))
        self._busy[index] += 1

    def _after(self, index: int, step: int) -> tuple[int, ...]:
        """The next units to compute, in the forward (1) or in the backward (-1)."""
        if not self._is_staged[index]:
            return ()
        order = self.schedule.order
        position = order.index(index)
        return order[position + 1 :][:NUM_STAGED] if step > 0 else order[:position][::-1][:NUM_STAGED]

    def after_forward(self, index: int, leads_to_backward: bool) -> ForwardCall | None:
        self._busy[index] -= 1
        if self._busy[index]:
            return None
        unit = self.units[index]
        unit.show_resting()
        if unit.was_written(2 * self.num_updates):
            raise StateError(
                f"the forward of unit {unit.name!r} changed its own weights (an embedding's max_norm, a moving "
                "average), which would be lost: use a layout that leaves parameters and optimizer whole, in fp32"
            )
        if leads_to_backward:
            self._clock += 1
            call = ForwardCall(index, self._began[index], self._clock, self.num_updates)
            self._calls[index].append(weakref.ref(call))
            return call
        if not self._live_calls(index):
            self._drop(index)
        return None

    def _live_calls(self, index: int) -> list[ForwardCall]:
        """Forwards of a unit that a backward may still come to."""
        found = [call for call in [ref() for ref in self._calls[index]] if call is not None and not call.is_spent]
        self._calls[index] = [weakref.ref(call) for call in found]
        return found

    def refuse_own_weights(self, index: int, outputs: list[Tensor]) -> None:
        """Memory that another unit takes next must not leave the unit it was gathered for."""
        place = self.memory.borrowed.get(index)
        if place is not None and [t for t in outputs if t.layout == torch.strided and _address(t) == place]:
            raise StateError(
                f"unit {self.units[index].name!r} returns one of its own weights (or a view of it), whose memory other "
                "weights take next: return a copy (.clone()), or choose units= so that both uses lie in one"
            )

    def before_backward(self, call: ForwardCall, grad: Tensor) -> None:
        if self._in_backward and torch._C._current_graph_task_id() != self._graph_task:
            self._abandon_backward()
        # An input that a unit hands through unchanged gets its gradient after the unit is done.
        if call.is_open or (self._in_backward and call.closed_in == self._num_backwards):
            return
        index = call.unit
        unit, plan = self.units[index], self.schedule.units[index]
        if call.num_updates != self.num_updates:
            raise StateError(
                f"backward through a forward of unit {unit.name!r} that ran before optimizer.step(): its weights have "
                "changed since; run the forward again"
            )
        if torch.is_grad_enabled() and plan.layout.gathered_until != "always":
            raise StateError(
                f"create_graph=True: a second backward would read weights of unit {unit.name!r} that are gone by then; "
                "use a layout whose parameters are whole"
            )
        if not self._in_backward:
            if self.scale.loss_scale is not None and not self.is_loss_scaled:
                raise StateError(
                    "fp16: this backward did not come through an output of the sharded model, so its gradients are not "
                    "scaled; call the model itself, not its parts, or use bf16"
                )
            self._begin_backward()
        self._close_calls_after(call)
        call.is_open = True
        self._open_calls.add(call)
        self._busy[index] += 1
        self._pass_over_in_backward(self._position_of.get(index, len(self._leaves)))
        for other in self.schedule.before_backward[index]:
            self._start_gather(other, needed_now=other == index)
        self._read_ahead(other for other in self._after(index, -1) if self.schedule.units[other].backward_reads)
        self._start_ready_reductions()
        if plan.backward_reads:
            if index in self._gathers:
                self._finish_gather(index)
            unit.show_compute()
        if unit.writes_directly and self._reduce_queue and self._reduce_queue[0] == index:
            self.reductions.open_for_compute(index)

    def _close_calls_after(self, call: ForwardCall) -> None:
        """Everything recorded after `call` has run backward."""
        for later in [other for other in self._open_calls if other.began > call.ended]:
            self._close(later)

    def _close(self, call: ForwardCall) -> None:
        index = call.unit
        self._open_calls.discard(call)
        call.is_open = False
        call.closed_in = self._num_backwards
        call.is_spent = not torch._C._autograd._get_current_graph_task_keep_graph()
        self._busy[index] -= 1
        live = self._live_calls(index)
        if not self._busy[index] and not [other for other in live if other.closed_in != self._num_backwards]:
            self.units[index].show_resting()
            if not live:
                self._drop(index)
            self._complete[index] = True

    def unit_in_backward(self) -> int | None:
        """Of the units that run one after the other, the one whose backward was begun last and has not ended."""
        begun = [call for call in self._open_calls if call.unit in self._position_of]
        return min(begun, key=lambda call: call.began).unit if begun else None

    # Units that this rank leaves out, and others may not: their collectives come in the schedule's order all the same.

    def _pass_over_in_forward(self, index: int) -> None:
        position = self._position_of.get(index)
        if position is not None:
            for other in self._leaves[self._forward_at : position]:
                self._start_gather(other, needed_now=False)
            self._forward_at = max(self._forward_at, position + 1)

    def _pass_over_in_backward(self, position: int) -> None:
        """Left out are the units behind `position` that the last forward of this rank did not call."""
        for other in reversed(self._leaves[position + 1 : self._backward_at]):
            if not (self._called[other] or self._complete[other] or self._live_calls(other)):
                if self.schedule.units[other].backward_reads:
                    self._start_gather(other, needed_now=False)
                self._complete[other] = True
        self._backward_at = min(self._backward_at, max(position, 0))

    def _begin_backward(self) -> None:
        self.refuse_after_early_update("backward")
        self.await_gradients()
        self._in_backward = True
        self._graph_task = torch._C._current_graph_task_id()
        self._num_backwards += 1
        self._complete = [False] * len(self.units)
        self._reduce_queue = deque(self.schedule.reduce_order)
        self._backward_at = len(self._leaves)
        torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def _drop(self, index: int) -> None:
        if self.schedule.units[index].layout.gathered_until == "backward":
            self._lose(index)
            self._occupancy.release(index)
            self.memory.give_back(index)

    # Phases 4 and 5: reduce.

    def _start_ready_reductions(self) -> None:
        while self._reduce_queue and self._complete[self._reduce_queue[0]]:
            self.reductions.start(self._reduce_queue.popleft(), self.is_sync)

    def update_early(self, update: Callable[[list[FlatState]], None]) -> None:
        """Have `update` called with flats as soon as their gradient is final."""

        def on_final(states: list[FlatState]) -> None:
            update(states)
            self._awaits_step = True

        self.reductions.on_final = on_final

    def await_gradients(self) -> None:
        """Let the computation wait for reductions and updates under way."""
        self._update_lane.join()
        self.reductions.wait()

    def end_backward(self) -> None:
        for call in list(self._open_calls):
            self._close(call)
        self._pass_over_in_backward(-1)
        while self._reduce_queue:
            self.reductions.start(self._reduce_queue.popleft(), self.is_sync)
        self.reductions.finish_all()
        self._refuse_late_gradients()
        self._in_backward = self.is_loss_scaled = False
        if self.is_sync:
            self._agree_on_use()

    def _refuse_late_gradients(self) -> None:
        for state in self.trainable_states:
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

    def _agree_on_use(self) -> None:
        """A parameter that no rank used gets no gradient at all, as with one process.

        Every rank joins; only one that left something out itself has to read, and wait for, the answer.
        """
        states = self.trainable_states
        used = [flag for state in states for flag in state.used]
        if self.all_used is None:
            self.all_used = torch.ones(len(used), dtype=torch.int32, device=self.mesh.device)
        left_out = not all(used)
        with self.reductions.lane.after_compute():
            mine = torch.tensor(used, dtype=torch.int32) if left_out else self.all_used
            flags = mine.to(self.mesh.device, copy=True)
            finish(start_all_reduce(self._reduce_channels["world"], flags, "which parameters were used", sums=True))
        if left_out:
            self.reductions.lane.join()
            answers = iter(flags.tolist())
            for state in states:
                state.used = [next(answers) > 0 for _ in state.used]

    # Phase 6: the step.

    def begin_step(self) -> None:
        """An update is asked for: what works beside the training may have something to say."""
        for say in tuple(self.at_step):
            say()

    def finish_gradients(self) -> None:
        """Bring every gradient to the optimizer's layout, also when no micro-batch was the last."""
        self._abandon_backward()
        self._refuse_late_gradients()
        local = [state for state in self.trainable_states if state.grad_state == "local"]
        if local:
            self.await_gradients()
            for state in local:
                self.reductions.sync(state)
            self.reductions.wait()
            self._agree_on_use()

    def updating(self, states: list[FlatState], early: bool) -> Lane:
        """Inside, work goes to a lane of its own, behind the reductions of `states`; others may still be on their way.
        Unless it is early, it also comes behind all that the computation has been given, which may read weights."""
        lane = self._update_lane.after(self._forward_began) if early else self._update_lane.after_compute()
        for state in states:
            lane.after(self.reductions.reduced_at(state))
        return lane

    def update_on_host(self, updates: Iterable[FlatUpdate]) -> None:
        """Let the host update flats when their gradients have arrived, those first that the next forward needs first.
        Gradients count as clipped as they are now."""
        position_of = {unit: position for position, unit in enumerate(self.schedule.order)}
        urgency = {state: position_of[unit.index] for unit in self.units for state in unit.trainable_states}
        for update in sorted(updates, key=lambda update: urgency[update.state]):
            state = update.state
            clip = None
            if state.clipped_by is not None:
                clip = self._clips.get(state.clipped_by) or Later(state.clipped_by)
                self._clips[state.clipped_by] = clip
            arrived = self.reductions.arrived.get(state)
            run, is_ready = partial(_run_update, update, arrived, clip), partial(has_passed, arrived)
            name = f"host update {state.unit_name}"
            self.jobs[state] = self.host_lane.give(Job(urgency[state], name, run, update.ask, is_ready))

    def await_host_of(self, state: FlatState) -> None:
        """Until the gradient of a flat is on the host, and no update reads it."""
        self.await_update_of(state)
        host_waits_for(self.reductions.arrived.get(state))

    def forget_gradients(self, set_to_none: bool = True) -> None:
        """Start anew; without `set_to_none` with gradients of zero, which still move momenta."""
        self._abandon_backward()
        self.await_gradients()
        for state in self.trainable_states:
            state.take_gradients()
            is_zero = not set_to_none and state.grad_state != "empty"
            state.square = state.clipped_by = None
            if is_zero and state.grads is not None:
                self.await_host_of(state)
                state.fetch_grads()
                state.grads.zero_()
                state.final_at_hand.zero_()
            elif self.reductions.memory.gives_back:
                state.give_back_grads()
            state.grad_state = "final" if is_zero else "empty"
            state.used = state.used if is_zero else [False] * len(state.used)

    def was_updated(self) -> None:
        """The masters that are trained are newer than every copy of them."""
        self.settle()
        self.num_updates += 1
        self._masters_version = self._version_of_masters()
        self._occupancy.masters_changed()
        self.host.staging.forget()

    def _version_of_masters(self) -> int:
        return sum([state.master._version for unit in self.units for state in unit.states])

    def was_rewritten(self) -> None:
        """Weights were set from outside, frozen ones too."""
        self.was_updated()
        self._occupancy.forget_all()

    def close_step(self, updated: bool) -> None:
        self.await_gradients()
        self._awaits_step = False
        if updated:
            self.was_updated()
            # Forwards before the update can no longer lead to a backward.
            self._calls = [[] for _ in self.units]
        self.mesh.ledger.close_step()
        self.host.close_step()
        self._clips.clear()
        if self._seen_order:
            self._follow(self._seen_order)
            self._seen_order = None
        self._gather_first_units()

    def _gather_first_units(self) -> None:
        """Those of the next step, ahead of it. What the host updates is left to the next forward: it may be through on
        one rank and not on another, and there may be no next one. A captured step leaves out what it would find
        elsewhere each time."""
        for index in self.schedule.after_step:
            if any(state.flat.host_updates for state in self.units[index].trainable_states):
                return
            if not (self.is_captured and self.schedule.units[index].layout.gathered_until == "backward"):
                self._start_gather(index, needed_now=False)

    def _follow(self, seen: list[int]) -> None:
        """Plan for the order in which the units really ran, when all ranks saw the same one."""
        order = seen + [index for index in self.schedule.order if index not in seen]
        if any(other != order for other in exchange(self.mesh.world, order)) or order == list(self.schedule.order):
            return
        self.settle()
        self.schedule = make_schedule(self.schedule.units, order, self._budget_bytes)
        self._leaves = self.schedule.leaves
        self._position_of = {unit: position for position, unit in enumerate(self._leaves)}
        self._occupancy = Occupancy(self.schedule)
        self.memory.rearrange(self.schedule)
        del self.update_order

    def settle(self) -> None:
        """Wait for every gather under way."""
        self._start_owed()
        for index in list(self._gathers):
            self._finish_gather(index)

    def join_lanes(self) -> None:
        """Let the computation wait for everything that is queued beside it."""
        self.settle()
        self.activations.join()
        for lane in (self._gather_lane, *self.reductions.lanes, self._update_lane):
            lane.join()

    def ready_to_replay(self) -> None:
        """Be where every captured step begins and ends: no gradients, the first units gathered, all others stale.

        What has been gathered besides, by an evaluation, counts as stale: a recording that relied on it would never
        gather it again. Nothing is gathered into memory that the step gives back and finds elsewhere the next time.
        """
        self.begin_step()
        self._abandon_backward()
        if any(state.grad_state != "empty" for state in self.trainable_states):
            raise StateError("there are gradients already: a captured step begins and ends with none (zero_grad)")
        if self._occupancy.state() != self._replay_state:
            self.settle()
            self._occupancy.masters_changed()
            self._gather_first_units()
            self.join_lanes()
            self._forget_what_is_left()
            self._replay_state = self._occupancy.state()

    def was_replayed(self) -> None:
        """Forwards before it can no longer lead to a backward; the first units hold the new weights."""
        self.num_updates += 1
        for index, unit in enumerate(self.units):
            if self._occupancy.is_ready(index):
                unit.stamp(2 * self.num_updates)

    def _forget_what_is_left(self) -> None:
        """Of units besides the first, in slots and in memory that is given back: the next to run will be others."""
        for index, slot in enumerate(self.schedule.slot_of):
            self._drop(index)
            if slot is not None and index not in self.schedule.after_step:
                self._lose(index)
                self._occupancy.vacate(index)

    def close_recording(self) -> None:
        """The end of a captured step, which must be its beginning."""
        self.join_lanes()
        self._forget_what_is_left()
        if self._occupancy.state() != self._replay_state:
            raise StateError(
                "this step does not end as it began, so it cannot be replayed: it must run the whole model, forward "
                "and backward, then optimizer.step() and zero_grad()"
            )

    def rest(self) -> None:
        """Nothing under way, and every module shows its part of the masters."""
        if self.whole_modules:
            raise StateError("this cannot be done inside `with sw.whole(...)`: leave the context first")
        self._abandon_backward()
        self.settle()
        self.finish_updates()
        for unit in self.units:
            unit.show_resting()

    def finish_updates(self) -> None:
        """Nothing is left to the host to do."""
        self.host_lane.drain()
        self.jobs.clear()
        self.host.windows.flush()

    def begin_forward(self, leads_to_backward: bool) -> None:
        self.host_lane.raise_failure()
        self._abandon_backward()
        self.activations.abandon_forward()
        self.await_gradients()
        self.refuse_after_early_update("forward")
        if self.reductions.on_final is not None:
            self._forward_began = self._update_lane.mark_compute()
        if self._masters_version != self._version_of_masters():
            raise StateError(
                "parameters were changed in place between steps, where copies of them may be in use already: change "
                "them inside `with sw.whole(model, write=True):`"
            )
        self._busy = [0] * len(self.units)
        self._called = [False] * len(self.units)
        self._forward_at = 0 if leads_to_backward else len(self._leaves)

    def refuse_after_early_update(self, what: str) -> None:
        if self._awaits_step:
            raise StateError(
                f"a {what} after a backward that has updated weights (early_update=True) and before optimizer.step(): "
                "call step() first, and run all micro-batches but the last inside `with sw.accumulate(model):`"
            )

    def end_forward(self) -> None:
        for other in self._leaves[self._forward_at :]:
            self._start_gather(other, needed_now=False)
        self._forward_at = len(self._leaves)

    def _abandon_backward(self) -> None:
        """Forget a backward that was broken off by an error; what it had reduced until then stays in the gradients."""
        if not self._in_backward:
            return
        self.reductions.abandon()
        self._in_backward = self.is_loss_scaled = False
        self._busy = [0] * len(self.units)
        self._calls = [[] for _ in self.units]
        self._open_calls.clear()
        for state in self.trainable_states:
            state.take_gradients()
            state.places = None


def _run_update(update: FlatUpdate, arrived: Mark, clip: Later | None, ask_ahead: Callable[[], None]) -> None:
    host_waits_for(arrived)
    factor = 1.0 if clip is None else clip.read()[0]
    update.run(factor, ask_ahead)


def hosted_units(schedule: Schedule) -> list[int]:
    """Whose activations rest on the host; those of a unit that holds others do not."""
    return [unit for unit in schedule.leaves if schedule.units[unit].layout.activations_on == "host"]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def channels_of(mesh: Mesh, lane: LaneName) -> Channels:
    return {axis: channel for (name, axis), channel in mesh.channels.items() if name == lane}
