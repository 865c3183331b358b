"""The engine: executes the schedule on real buffers, driven by the model's own forward and backward.

One step, in numbered phases:

    1. before a unit's forward: start the gathers that the schedule lists (of this unit and the next ones), wait for
       this unit's, register its compute parameters in the modules.
    2. after its forward: register the user's parameters again. Another unit may now take its slot.
    3. before its backward: as 1, in reverse order.
    4. after its backward, when that of an earlier unit begins: start the reduction of its gradient, in the schedule's
       order on every rank.
    5. end of the backward: reduce the remaining gradients (parameters without one count as zero).
    6. the optimizer's step, on masters and final gradients; then the next step's first gathers, as soon as their units
       are updated.

`UnitStatus` (schedule/unit_status.py) says where a unit's weights are and who uses them; `Gathers`, `Reductions` and
`HostJobs` hold what is in flight. The engine does not know the preset.

A rank may leave out units that other ranks compute. Their collectives keep the schedule's order: when a rank reaches a
unit, it takes part in the collectives of the units that it has skipped, as if it had computed them. A clock numbers the
begins and ends of the units' forwards. Autograd runs in the reverse order of recording, so these numbers tell which
forwards a backward has been through.
"""

import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ...base.dtypes import FP16
from ...base.errors import StateError
from ..mesh import Mesh
from ..offload.host_memory import HostMemory
from ..optim.host_updates import FlatUpdate
from ..precision import Precision
from ..schedule.step_schedule import Schedule, make_schedule
from ..schedule.unit_status import ForwardCall, UnitStatus, statuses_of
from ..unit.gradient import GradScale
from ..unit.state import FlatState, Unit
from ..wire.collectives import exchange
from .activation_offload import HostActivations
from .gathers import Gathers
from .reductions import Reductions
from .streams import host_waits_for
from .updates import HostJobs

Hook = Callable[..., Any]


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
        self.mesh, self.device, self.precision, self.host = mesh, mesh.device, precision, host
        self.units = units
        self.all_states = [state for unit in units for state in unit.states]  # frozen ones too
        self.trainable_states = [state for unit in units for state in unit.trainable_states]
        self._budget_bytes = budget_bytes
        share = 1.0 if mesh.world.averages else 1.0 / mesh.world_size
        is_first = precision.reduce in (precision.compute, FP16)
        factors = (share, 1.0) if is_first else (1.0, share)
        self.scale = GradScale(*factors, mesh.world.averages, loss_scale)
        for state in self.trainable_states:
            state.gradient.scale = self.scale
        self.is_loss_scaled = False
        self.is_sync = True
        # Inside sw.whole: modules whose parameters are whole masters, so that their state dict may be taken.
        self.whole_modules: set[int] = set()
        # Hooks before and after a forward of a module; those of the whole model are under None.
        self.entries: dict[nn.Module | None, list[tuple[Hook, Hook]]] = {}
        # Called at the beginning of every optimizer step.
        self.at_step: list[Callable[[], None]] = []
        self.schedule = schedule
        self.statuses = statuses_of(schedule)
        # How far the forward and the backward have come in the schedule's order; the clock; the number of backwards.
        self._forward_at = self._backward_at = len(units)
        self._clock = self._num_backwards = 0
        # Forwards whose backward has begun and not ended.
        self._opened: set[ForwardCall] = set()
        self.host_jobs = jobs = HostJobs(units, host)
        self.gathers = Gathers(schedule, self.statuses, units, mesh, host, jobs)
        # The activations of a unit that holds others stay on the device.
        hosted = [unit for unit in schedule.leaves if schedule.units[unit].layout.activations_on == "host"]
        self.activations = HostActivations(units, hosted, mesh.device, host)
        self.reductions = Reductions(schedule, self.statuses, units, mesh, jobs)
        self.gathers.updated = self.reductions.updated
        # Optimizers and the user's parameters call these.
        self.await_gradients, self.has_gradients = self.reductions.wait, self.reductions.are_awaited
        self.updating = self.reductions.updating
        self.drop_update_of, self.await_last_step_of = jobs.drop, jobs.await_last_step_of
        self.was_updated, self.was_rewritten = self.gathers.was_updated, self.gathers.was_rewritten
        # The flats that are trained, unit by unit, in the order in which their gradients are reduced.
        self.update_order = [units[index].trainable_states for index in schedule.reduce_order]
        self._unit_of = {state: unit for unit in units for state in unit.states}
        self._num_forwards = 0  # of the model: begun and not ended
        # Parameters that were used outside the forward of their unit (`lend`): their gradients may come at any time.
        self._lent: set[nn.Parameter] = set()
        self._in_backward = False
        # True if a forward has run whose backward may follow.
        self._awaits_backward = False
        self._graph_task = -1
        # Recorded in the first step: the order of the units' forwards (None after this step), and the units in the
        # graph. After it, a frozen unit that was in no rank's graph counts as one that no backward reaches.
        self._seen_order: list[int] | None = []
        self._seen_recorded: set[int] = set()
        self._is_in_backward = [True] * len(units)

    # Called by the user's parameters.

    @property
    def is_computing(self) -> bool:
        """True inside a forward of the model, or a backward."""
        return self._num_forwards > 0 or torch._C._current_graph_task_id() != -1

    def lend(self, state: FlatState, index: int) -> nn.Parameter:
        """Return a compute parameter for a use outside the forward of its unit; its gradient is reduced, too."""
        unit, param = self._unit_of[state], state.compute_params[index]
        if self.scale.loss_scale is not None and not self.is_computing:
            name = state.flat.params[index].name
            raise StateError(
                f"fp16: {name!r} has no scaled gradient outside the model's forward: use it inside, or bf16"
            )
        if not self.statuses[unit.index].num_computing:
            self.gathers.lend(unit.index)
        if param not in self._lent and param.requires_grad:
            self._lent.add(param)
            param.register_post_accumulate_grad_hook(self._begin_backward)
        return param

    def _begin_phase(self, name: str) -> None:
        # Gathers that wait for the host may run in different phases on different ranks: hosts are not equally fast.
        if not self.gathers.wait_for_host:
            self.mesh.begin(name)

    # Phases 1 and 2: the forward, as the hooks report it.

    def begin_forward(self, leads_to_backward: bool) -> None:
        self.host_jobs.raise_failure()
        self._begin_phase("a forward with gradients" if leads_to_backward else "a forward without gradients")
        self.abandon_backward()
        self.activations.abandon_forward()
        self.reductions.begin_forward()
        self.gathers.follow_masters()
        self._num_forwards += 1
        self._forward_at = 0
        for status in self.statuses:
            status.num_computing = 0  # also of forwards that an error has interrupted
        self._awaits_backward = self._awaits_backward or leads_to_backward

    def before_forward(self, index: int) -> None:
        if self.whole_modules:
            raise StateError("a forward inside `with sw.whole(...)`: leave the context first")
        if self._seen_order is not None and index not in self._seen_order:
            self._seen_order.append(index)
        status = self.statuses[index]
        if status.num_computing:
            # Called inside the unit's own forward, for example for a module that owns parameters of the root.
            self.gathers.make_ready(index, "forward")
        else:
            self._clock += 1
            status.began = self._clock
            self._pass_in_forward(self.schedule.position_of[index])
            self.gathers.make_ready(index, "forward", self.schedule.before_forward[index])
            if self.gathers.is_staged[index]:
                self.gathers.read_ahead(index, "forward")
        status.num_computing += 1

    def after_forward(self, index: int, leads_to_backward: bool) -> ForwardCall | None:
        status = self.statuses[index]
        status.num_computing -= 1
        if status.num_computing:
            return None
        unit = self.units[index]
        unit.show_user_params()
        if unit.was_written(status.version):
            raise StateError(
                f"the forward of unit {unit.name!r} changed its own weights (an embedding's max_norm, a mean) on "
                "this rank alone: change weights between steps, on all ranks alike"
            )
        if leads_to_backward:
            if self._seen_order is not None:
                self._seen_recorded.add(index)
            self._clock += 1
            call = ForwardCall(index, status.began, self._clock, status.version)
            status.forwards.append(weakref.ref(call))
            return call
        self._drop_after_forward(status)
        return None

    def _drop_after_forward(self, status: UnitStatus) -> None:
        """Drop a unit unless the next backward needs it. Ranks that did not run the unit decide the same."""
        if not (self._awaits_backward and self._is_in_backward[status.index]) and not status.live_forwards():
            self.gathers.drop(status)

    def _pass_in_forward(self, position: int) -> None:
        """Take part in the collectives of the units before this position that this rank has not run."""
        passed = self.schedule.order[self._forward_at : position]
        self._forward_at = max(self._forward_at, position + 1)
        for index in passed:
            self.gathers.make_ready(index, "forward", self.schedule.before_forward[index], computes=False)
            self._drop_after_forward(self.statuses[index])

    def end_forward(self, failed: bool) -> None:
        self._num_forwards = max(self._num_forwards - 1, 0)
        if not failed:
            self._pass_in_forward(len(self.units))

    # Phases 3 and 4: the backward, as the hooks report it.

    def before_backward(self, call: ForwardCall, grad: Tensor) -> None:
        if self._in_backward and torch._C._current_graph_task_id() != self._graph_task:
            self.abandon_backward()
        # An input that a unit returns unchanged gets its gradient after the unit's backward has ended.
        if call in self._opened or (self._in_backward and call.closed_in == self._num_backwards):
            return
        index, status = call.unit, self.statuses[call.unit]
        self._refuse_backward(call)
        if not self._in_backward:
            self._begin_backward()
        self._advance_backward(call)
        self._opened.add(call)
        status.num_computing += 1
        if status.plan.holds_units:
            # Its backward begins before that of the units inside it. Its weights are gathered, or being gathered.
            if status.plan.backward_reads:
                self.gathers.make_ready(index, "backward")
            return
        self._enter_backward(index, computes=True)

    def _advance_backward(self, call: ForwardCall | None) -> None:
        """Bring the backward to `call` (None: to its end). Close the forwards whose backward has run, and run the
        collectives of units that this rank skipped. A unit that holds others comes after those inside it."""
        units = self.schedule.units
        ended = []
        for other in self._opened:
            if call is None or other.began > call.ended:
                ended.append(other)
        ended.sort(key=attrgetter("began"), reverse=True)
        for other in ended:
            if not units[other.unit].holds_units:
                self._close(other)
        if call is None or not units[call.unit].holds_units:
            position = -1 if call is None else self.schedule.position_of[call.unit]
            passed = self.schedule.order[position + 1 : self._backward_at]
            self._backward_at = min(self._backward_at, max(position, 0))
            for index in reversed(passed):
                status = self.statuses[index]
                if status.is_complete:
                    continue
                if not status.num_computing and not self._may_still_reach(status, call):
                    # Take part in the collectives of a unit that this rank does not run; other ranks may run it.
                    if self._is_in_backward[status.index] and not status.plan.holds_units:
                        self._enter_backward(status.index, computes=False)
                    self._end_unit(status)
                for other in ended:
                    if other.unit == status.index and other in self._opened:
                        self._close(other)
        for other in ended:
            if other in self._opened:
                self._close(other)

    def _may_still_reach(self, status: UnitStatus, call: ForwardCall | None) -> bool:
        """Return True if a backward that is at `call` (None: at its end) may still reach a forward of this unit: one
        that began before `call` ended (`call` may have called the unit) and that this backward has not been through."""
        return call is not None and any(
            other.began < call.ended and other.closed_in != self._num_backwards for other in status.live_forwards()
        )

    def _enter_backward(self, index: int, computes: bool) -> None:
        """Start the collectives before a unit's backward: the same on a rank that computes it and one that does not."""
        for other in self.schedule.before_backward[index]:
            if not self.statuses[other].is_ready("backward"):
                self.gathers.start(other, "backward", needed_now=other == index)
        if self.gathers.is_staged[index]:
            self.gathers.read_ahead(index, "backward")
        self.reductions.start_complete(self.is_sync)
        if self.schedule.units[index].backward_reads:
            self.gathers.receive(index, computes)

    def _refuse_backward(self, call: ForwardCall) -> None:
        status = self.statuses[call.unit]
        name, until = status.plan.name, status.plan.gathered_until
        if call.version != status.version:
            ran = f"a forward of unit {name!r} that ran before optimizer.step()"
            raise StateError(f"backward through {ran}: its weights have changed since; run the forward again")
        if torch.is_grad_enabled() and until != "always":
            gone = f"a second backward would read weights of unit {name!r} that are gone by then"
            raise StateError(f"create_graph=True: {gone}; use a layout whose parameters are whole")
        if not self._in_backward and self.scale.loss_scale is not None and not self.is_loss_scaled:
            unscaled = "this backward, which did not come through an output of the sharded model, is not scaled"
            raise StateError(f"fp16: {unscaled}; call the model itself, not its parts, or use bf16")

    def _begin_backward(self, _: Tensor | None = None) -> None:
        if self._in_backward:
            return
        self.reductions.begin_backward(self.schedule.reduce_order)
        self._begin_phase("a backward" if self.is_sync else "a backward of a micro-batch that is not the last")
        self._in_backward = True
        self._graph_task = torch._C._current_graph_task_id()
        self._num_backwards += 1
        self._backward_at = len(self.units)
        for status in self.statuses:
            status.is_complete = False
        # Units that hold others and whose weights were encoded for the forward are gathered again. Every rank does it
        # now, because the ranks' backwards may not reach the same units.
        for index in self.schedule.read_holders:
            if self.statuses[index].rounded:
                self.gathers.start(index, "backward", needed_now=False)
        torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def _close(self, call: ForwardCall) -> None:
        """End the backward of one forward, and of its unit, if no other forward of the unit awaits this backward."""
        status = self.statuses[call.unit]
        self._opened.remove(call)
        call.closed_in = self._num_backwards
        call.is_spent = not torch._C._autograd._get_current_graph_task_keep_graph()
        status.num_computing -= 1
        for other in status.live_forwards():
            if other.closed_in != self._num_backwards:
                return
        if not status.num_computing:
            self.units[call.unit].show_user_params()
            self._end_unit(status)

    def _end_unit(self, status: UnitStatus) -> None:
        """Drop a unit after its backward. No more gradients come to it, unless its weights were lent."""
        if not status.live_forwards():
            self.gathers.drop(status)
        status.is_complete = status.is_complete or not status.is_lent

    def unit_in_backward(self) -> int | None:
        """The unit whose backward began last and has not ended, among units that hold no others."""
        begun = [call for call in self._opened if not self.statuses[call.unit].plan.holds_units]
        return min(begun, key=lambda call: call.began).unit if begun else None

    def abandon_backward(self) -> None:
        """Forget a backward that an error has ended; what it had reduced until then stays in the gradients."""
        if not self._in_backward:
            return
        self.reductions.abandon()
        self._in_backward = self._awaits_backward = self.is_loss_scaled = False
        self._opened.clear()
        for status in self.statuses:  # none of the recorded forwards can lead to another backward
            status.num_computing = 0
            status.forwards = []

    # Phase 5: the end of the backward.

    def end_backward(self) -> None:
        self._advance_backward(None)
        self.reductions.start_complete(self.is_sync, all_units=True)
        self.reductions.finish_all()
        self.reductions.refuse_late()
        self._in_backward = self._awaits_backward = self.is_loss_scaled = False
        if self.is_sync:
            self.reductions.agree_on_use()

    # Phase 6: the step, called by the optimizer.

    def begin_step(self) -> None:
        """Refuse replaced parameters, then run the step callbacks. A failed background save raises here."""
        for unit in self.units:
            if name := unit.replaced():
                raise StateError(
                    f"unit {unit.name!r} has another parameter {name!r} than at sw.shard, which would not be trained: "
                    "replace parameters before sw.shard, change values inside `with sw.whole(model, write=True):`"
                )
        for callback in tuple(self.at_step):
            callback()

    def finish_gradients(self, states: Container[FlatState] | None = None) -> None:
        """Reduce gradients, all or those of `states`, to the optimizer's layout, if `accumulate` left them local. Loss
        scaling needs all of them reduced, because the scale may change with a step."""
        self.abandon_backward()
        self.reductions.refuse_late()
        local = [state for state in self.trainable_states if state.gradient.stage == "local"]
        if states is not None and self.scale.loss_scale is None:
            local = [state for state in local if state in states]
        if local:
            self.reductions.sync(local)

    def update_on_host(self, updates: Iterable[FlatUpdate]) -> None:
        """Let the host update flats when their gradients have arrived, with their present clipping factors."""
        self.host_jobs.give(updates, self.schedule.position_of, self.reductions.arrived)

    @property
    def runs_ahead(self) -> bool:
        return self.host_jobs.runs_ahead

    def update_ahead(self, updates: Iterable[FlatUpdate]) -> None:
        """Let the host compute updates that a step will probably ask for, in spare memory."""
        self.host_jobs.run_ahead(updates, self.schedule.position_of, self.reductions.arrived)

    def forget_gradients(self, states: Iterable[FlatState], set_to_none: bool = True) -> None:
        self.abandon_backward()
        self.reductions.forget(states, set_to_none)

    def units_changed_by(self, states: Iterable[FlatState]) -> list[int]:
        """Return the units that an update of these flats changes. Frozen units count as changed by every step."""
        own = set(states)
        return [unit.index for unit in self.units if not unit.trainable_states or own & set(unit.trainable_states)]

    def close_step(self, updated: bool, changed: Sequence[int]) -> None:
        """End the step of an optimizer that changes these units."""
        if self.gathers.wait_for_host:
            self.gathers.settle()
        self.mesh.begin("optimizer.step()")
        self.reductions.close_step()
        if updated:
            self.gathers.was_updated(changed)
            # Forwards before the update can no longer lead to a backward.
            for index in changed:
                self.statuses[index].forwards = []
            self._awaits_backward = self._awaits_backward and len(changed) < len(self.units)
        self.mesh.ledger.close_step()
        self.host.close_step()
        if self._seen_order:
            # Not if other units' forwards may still lead to a backward: their weights must stay where they are.
            if len(changed) == len(self.units):
                self._follow(self._seen_order)
            self._seen_order = None
        for status in self.statuses:
            status.is_lent = False
        # Each after the update of its unit; then the computation waits for the other updates, too.
        self.gathers.start_first()
        self.reductions.wait()

    def _follow(self, seen: list[int]) -> None:
        """Make a schedule for the order in which the units really ran, if the ranks' orders agree; a rank may have
        skipped units. A unit whose weights were used outside its forward stays gathered from now on, and is reduced
        last, like a unit that holds others."""
        lent = [status.index for status in self.statuses if status.is_lent]
        orders, recorded, lents = zip(*exchange(self.mesh.world, (seen, self._seen_recorded, lent)), strict=True)
        for index in set().union(*orders).difference(*recorded):
            self._is_in_backward[index] = self.schedule.units[index].trainable
        kept = sorted(set().union(*lents))
        longest = max(orders, key=len)
        is_one = all(order == [index for index in longest if index in order] for order in orders)
        order = [*kept, *(index for index in dict.fromkeys((*longest, *self.schedule.order)) if index not in kept)]
        if not is_one or (order == list(self.schedule.order) and not kept):
            return
        units = [replace(unit, holds_units=True) if at in kept else unit for at, unit in enumerate(self.schedule.units)]
        self.schedule = make_schedule(units, order, self._budget_bytes)
        self.gathers.follow(self.schedule)
        self.update_order = [self.units[index].trainable_states for index in self.schedule.reduce_order]

    # Between steps.

    def join_lanes(self) -> None:
        """Let the computation wait for all lanes."""
        self.gathers.settle()
        self.activations.join()
        for lane in (self.gathers.lane, *self.reductions.lanes):
            lane.join()

    def rest(self) -> None:
        """Finish everything in flight, and register the user's parameters in every module."""
        if self.whole_modules:
            raise StateError("this cannot be done inside `with sw.whole(...)`: leave the context first")
        self.abandon_backward()
        self.gathers.settle()
        self.finish_updates()
        for state in self.all_states:
            host_waits_for(state.read_on_host)
        for unit in self.units:
            unit.show_user_params()

    def await_host_of(self, state: FlatState) -> None:
        """Wait until nothing uses this flat's memory on the host: no update, no gather, no gradient on its way."""
        self.reductions.await_on_host(state)
        host_waits_for(state.read_on_host)

    def finish_updates(self) -> None:
        """Wait for all updates on the host."""
        self.host_jobs.finish_all()
        self.host.windows.flush()
