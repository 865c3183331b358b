"""A wrapper of the user's optimizer that updates this rank's part of the masters.

The inner optimizer, which is the user's, has the groups, hyper-parameters and state. Its groups hold the user's
parameters; during an update they hold this rank's parts instead: views of the masters. State belongs to those parts.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, Protocol, overload

import torch
from torch import Tensor

from ...base.errors import ConfigurationError, StateError
from ..unit.carrier import Channels
from ..unit.state import FlatState, OnDisk
from ..wire.collectives import exchange
from .clip import LossScaler, global_norm, require_limit, require_norm_type
from .groups import Part, UserState, check_new_params, cut_into_parts, has_hooks, plain, plain_settings, shard_groups
from .host_updates import FlatUpdate, HostUpdates, rows_of
from .probe import KNOWN_PACKAGES, refuse_unless_elementwise


class Stepper(Protocol):
    """The engine, as its optimizers see it. They call it; it calls them only for early updates."""

    @property
    def device(self) -> torch.device: ...
    @property
    def all_states(self) -> list[FlatState]: ...
    @property
    def update_order(self) -> list[list[FlatState]]: ...
    def units_changed_by(self, states: Iterable[FlatState]) -> list[int]: ...
    def begin_step(self) -> None: ...
    def finish_gradients(self, states: Container[FlatState]) -> None: ...
    def await_gradients(self) -> None: ...
    def has_gradients(self) -> bool: ...
    @property
    def runs_ahead(self) -> bool: ...
    def update_ahead(self, updates: Iterable[FlatUpdate]) -> None: ...
    def drop_update_of(self, state: FlatState) -> None: ...
    def await_last_step_of(self, state: FlatState) -> None: ...
    def await_host_of(self, state: FlatState) -> None: ...
    def update_on_host(self, updates: Iterable[FlatUpdate]) -> None: ...
    def updating(self, states: list[FlatState], early: bool) -> AbstractContextManager[None]: ...
    def forget_gradients(self, states: Iterable[FlatState], set_to_none: bool) -> None: ...
    def was_updated(self, units: Sequence[int]) -> None: ...
    def close_step(self, updated: bool, units: Sequence[int]) -> None: ...


def _refusing(message: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise StateError(message)

    return refuse


def _early_error(what: str, fix: str) -> StateError:
    return StateError(f"{what} with early_update=True, which updates weights during the backward: {fix}")


class ShardedOptimizer(torch.optim.Optimizer):
    """The optimizer that `sw.shard` returns: use it like the original. It also clips and scales sharded gradients."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        stepper: Stepper,
        states: list[FlatState],
        channels: Channels,
        scaler: LossScaler | None,
        early_update: bool,
        host: HostUpdates,
        skip_nonfinite: bool,
    ) -> None:
        # Not super().__init__: groups and state are those of the inner optimizer. Its state belongs to this rank's
        # parts of the parameters.
        self.inner = inner
        for name in ("state_dict", "load_state_dict", "add_param_group"):
            fix = "use the one that sw.shard returned, and sw.save and sw.load for its state"
            inner.__dict__[name] = _refusing(f"optimizer.{name}() of the optimizer that was given to sw.shard: {fix}")
        self._stepper = stepper
        # The flats that this optimizer updates. Its steps invalidate only forwards through their units: after a step of
        # a discriminator, a forward of the generator may still lead to a backward.
        self._states = states
        self._own = frozenset(states)
        self._units = stepper.units_changed_by(states)
        self._channels = channels
        self.scaler = scaler
        self._host = host
        self._skips = skip_nonfinite or scaler is not None
        self._num_skipped = 0
        self._places: dict[Tensor, tuple[FlatState, int]] = {}
        for state in states:
            self._places |= {param: (state, index) for index, param in enumerate(state.resting_params)}
        self._parts: list[Part] = []
        self._parts_are_for: tuple[object, ...] = ()
        self._is_early = early_update
        # In this step: flats whose gradient has arrived (only with early updates), and flats that are updated or that
        # are queued for an update on the host.
        self._arrived: set[FlatState] = set()
        self._updated: set[FlatState] = set()
        self._settings_when_early: list[dict[str, Any]] = []
        # True if the updates of the last step had to wait for the norm of all gradients.
        self._awaits_norm = False

    # Everything not defined here, hooks and hyper-parameters too, is the inner optimizer's.
    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def __repr__(self) -> str:
        return f"Sharded{self.inner!r}"

    def stored_state(self, resting: Tensor, key: str) -> Any:
        """Return one value of the optimizer's state of a parameter; read it if it is on disk."""
        value = self.inner.state[resting][key]
        if isinstance(value, OnDisk):
            state, index = self._places[resting]
            return rows_of(state).part(key, state.held[index]).view(resting.shape)
        return value

    def was_restored(self, resting: Tensor) -> None:
        """Copy a parameter's state, after a user or a checkpoint has set it, to where the host's updates read it."""
        state, _ = self._places[resting]
        if state.flat.host_updates:
            self._stepper.await_host_of(state)
            self._host.take_over([state])

    @property  # type: ignore[override]
    def state(self) -> UserState:
        """The state of this rank's part of each of the user's parameters. Its tensors stay where they are from now on,
        because the user may keep views of them: updates on the host no longer run ahead of the step."""
        self._await_host(self._states)  # the last updates may still run there
        for state in self._states:
            state.is_state_lent = True
        return UserState(self.inner, self.was_restored)

    @state.setter
    def state(self, value: Mapping[Tensor, Any]) -> None:
        shown = self.state
        shown.clear()
        shown.update(value)

    def belongs_to(self, engine: object) -> bool:
        return self._stepper is engine

    @property
    def loss_scale(self) -> float:
        """The current factor of the loss in fp16; 1 in every other precision."""
        return 1.0 if self.scaler is None else float(self.scaler.scale)

    @property
    def num_skipped_steps(self) -> int:
        """Number of steps that were skipped because a gradient was not finite, such as an overflow in fp16."""
        return self._num_skipped if self.scaler is None else self.scaler.num_skipped

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients down so that their norm is at most `max_norm` (above 0); returns the norm before.

        The norm is over all parameters and ranks, and the same on every rank. With `error_if_nonfinite`, a norm that is
        not finite is an error on every rank, and the gradients stay as they are.
        """
        order = require_norm_type(norm_type)
        require_limit("max_norm", max_norm)
        final = self._final_gradients("clip_grad_norm")
        norm = self._norm(order)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            fix = "error_if_nonfinite=False continues, and sw.shard(..., skip_nonfinite=True) leaves such steps out"
            raise StateError(f"the gradients' norm of order {norm_type} is {float(norm)}: {fix}")
        self._multiply(final, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def clip_grad_value(self, clip_value: float) -> None:
        """Clamp every element of the gradients to -clip_value ... clip_value (above 0, the same on every rank)."""
        final = self._final_gradients("clip_grad_value")
        limit = self._agreed("clip_grad_value", clip_value)
        require_limit("clip_value", limit)
        self._stepper.await_gradients()
        self._await_host(final)
        for state in final:
            state.gradient.final_for_optimizer.clamp_(-limit, limit)
            state.gradient.square = None

    def scale_grads(self, factor: float | Tensor) -> None:
        """Multiply all gradients by a number that is the same on every rank, such as 1 / (tokens of the step)."""
        final = self._final_gradients("scale_grads")
        number = self._agreed("scale_grads", factor)
        self._stepper.await_gradients()
        self._multiply(final, torch.full((), number, dtype=torch.float32, device=self._stepper.device))
        self._apply_clips(final)

    def _final_gradients(self, verb: str) -> list[FlatState]:
        """Return the flats that have a gradient, after all reductions and with earlier clipping applied."""
        if self._is_early:
            raise _early_error(f"optimizer.{verb}", "it needs all gradients first; leave out early_update")
        self._stepper.finish_gradients(self._own)
        final = [state for state in self._states if state.gradient.stage == "final"]
        self._apply_clips(final)
        return final

    def _apply_clips(self, states: list[FlatState]) -> None:
        for state in states:
            if state.gradient.clipped_by is not None:
                self._stepper.await_host_of(state)
                state.gradient.apply_clip()

    def _agreed(self, verb: str, value: float | Tensor) -> float:
        values: list[float] = exchange(self._channels["world"], float(value))
        if len({repr(each) for each in values}) > 1:
            fix = "give it one number, summed over the ranks where it counts samples"
            raise StateError(f"optimizer.{verb} was given other numbers by the ranks, from rank 0 on {values}: {fix}")
        return values[0]

    @staticmethod
    def _multiply(states: list[FlatState], factor: Tensor) -> None:
        on_device = [state.gradient.final for state in states if not state.flat.host_updates]
        if on_device:
            torch._foreach_mul_(on_device, factor)
        for state in states:
            if state.flat.host_updates:
                # The host's update multiplies such a gradient when it reads it.
                state.gradient.clipped_by = factor

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        self._stepper.begin_step()
        if closure is not None:
            return self._step_with(closure)
        self._stepper.finish_gradients(self._own)
        overflowed = self._skips and not bool(torch.isfinite(self._norm()))
        self._num_skipped += overflowed
        if not overflowed:
            self._update()
        for state in self._states:
            self._stepper.drop_update_of(state)
        if self.scaler is not None:
            self.scaler.after_step(overflowed)
        self._stepper.close_step(not overflowed, self._units)
        return None

    def _update(self) -> None:
        """Update parts in the order in which their gradients arrive, then start the updates on the host.

        If all gradients are there (they were clipped), the order is that of the next forward, because a unit's gather
        starts as soon as the unit is updated.
        """
        if self._updated and self._settings_when_early != plain_settings(self.inner):
            what = "the optimizer's settings (a learning rate?) were changed between backward() and step()"
            raise _early_error(what, "change them after step()")
        parts = self._current_parts()
        for part in reversed(parts) if self._stepper.has_gradients() else parts:
            if not self._updated.issuperset(part.states):
                self._update_part(part, early=False)
        if not self._is_at_once:
            self._update_on_host([state for state in self._states if state not in self._updated])
        # Schedulers that were built on the inner optimizer check this, and its own `step` may not have been called.
        vars(self.inner)["_opt_called"] = True
        self._arrived.clear()
        self._updated.clear()

    def _update_on_host(self, states: Iterable[FlatState]) -> None:
        ready = [state for state in states if state.flat.host_updates and state.gradient.stage == "final"]
        if not ready:
            return
        for state in ready:
            # The last step's update may still run, if nothing has read its weights since.
            self._stepper.await_last_step_of(state)
        settings = self._host.settings()
        updates = [self._host.prepare(state, settings) for state in ready]
        for update in updates:
            update.begin()
        self._stepper.update_on_host(updates)
        self._updated.update(ready)
        self._awaits_norm = self._skips or any(state.gradient.clipped_by is not None for state in ready)

    def update_ahead(self, states: list[FlatState]) -> None:
        """Called during the backward when the gradients of `states` are final; lets the host compute the updates that a
        step will ask for if its gradients need no clipping. Nothing that a user can see changes before the step."""
        if not self._awaits_norm or self._is_at_once or not self._stepper.runs_ahead:
            return
        # A parameter that this rank did not use may still get a gradient, when the ranks agree.
        own = [state for state in states if state in self._own and state.flat.may_update_ahead]
        ready = [state for state in own if state.gradient.stage == "final" and all(state.gradient.used)]
        if ready:
            settings = self._host.settings()
            self._stepper.update_ahead([self._host.prepare(state, settings) for state in ready])

    @property
    def _is_at_once(self) -> bool:
        """True if the optimizer must see all parameters at once, also those on the host: it has hooks, or may keep more
        than the state of each parameter."""
        return not type(self.inner).__module__.startswith(("torch.optim.", *KNOWN_PACKAGES)) or has_hooks(self.inner)

    def update_early(self, states: list[FlatState]) -> None:
        """Called during the backward when the gradients of `states` are final; updates every part that is complete."""
        if not self._arrived.isdisjoint(states):
            fix = "run the backwards before the last one inside `with sw.accumulate(model):`"
            raise _early_error("a second backward before optimizer.step()", fix)
        if not self._updated:
            self._settings_when_early = plain_settings(self.inner)
        self._arrived.update(states)
        for part in self._current_parts():
            # A parameter that this rank did not use waits until the ranks agree, at the end of the backward.
            is_complete = all(state in self._arrived and all(state.gradient.used) for state in part.states)
            if is_complete and not self._updated.issuperset(part.states):
                self._update_part(part, early=True)
                self._updated.update(part.states)
        if not self._is_at_once:
            self._update_on_host([state for state in states if all(state.gradient.used)])

    def _current_parts(self) -> list[Part]:
        held = [list(map(id, group["params"])) for group in self.inner.param_groups]
        made_for = (self._stepper.update_order, has_hooks(self.inner), held)
        if self._parts_are_for != made_for:
            own = [[state for state in states if state in self._own] for states in made_for[0]]
            self._parts = cut_into_parts(self.inner, own, self._is_at_once)
            self._parts_are_for = made_for
        return self._parts

    def _update_part(self, part: Part, early: bool) -> None:
        self._take_from_host(part.states)
        with self._stepper.updating(part.states, early):
            self._hand_over_gradients(part.states)
            try:
                with self._holding(part.groups):
                    self.inner.step()
            finally:
                self._take_back_gradients(part.states)
        self._publish(part.states)

    @contextmanager
    def _holding(self, shards: list[list[Tensor]]) -> Iterator[None]:
        """Let the groups hold these tensors inside `with`. The list objects stay the same: optimizers may keep them."""
        lists = [group["params"] for group in self.inner.param_groups]
        users = [list(params) for params in lists]
        for params, held in zip(lists, shards, strict=True):
            params[:] = held
        try:
            yield
        finally:
            for params, own in zip(lists, users, strict=True):
                params[:] = own

    def _await_host(self, states: list[FlatState]) -> None:
        for state in states:
            if state.flat.host_updates:
                self._stepper.await_host_of(state)

    def _take_from_host(self, states: list[FlatState]) -> None:
        """Wait until the optimizer itself may update parameters on the host; refuse parameters on disk."""
        on_disk = [state for state in states if state.flat.master_on == "disk"]
        if on_disk:
            raise StateError(
                f"unit {on_disk[0].unit_name!r} is offloaded to disk, and {type(self.inner).__name__} must see all "
                "parameters at once (it is not torch's, has step hooks, or got a closure): put its state on the host"
            )
        self._await_host(states)

    def _publish(self, states: list[FlatState]) -> None:
        """Refresh the host's copies of parameters after the optimizer itself has updated their masters."""
        for state in states:
            if state.offloaded is not None and state.flat.host_updates:
                self._host.take_over([state])
                state.publish(state.offloaded.memory.moves)

    def _step_with(self, closure: Callable[[], float]) -> float:
        """Let the inner optimizer evaluate the loss itself, perhaps several times with weights changed in between."""
        if self.scaler is not None:
            raise StateError("optimizer.step(closure) cannot skip steps that overflow: leave out the closure, or fp16")
        if self._is_early:
            raise _early_error("optimizer.step(closure)", "leave out one of them")
        self._take_from_host(self._states)  # the last updates may still run there

        def evaluate() -> float:
            self._take_back_gradients(self._states)
            self._publish(self._states)
            self._stepper.was_updated(self._units)
            with torch.enable_grad():
                loss = closure()
            self._stepper.finish_gradients(self._own)
            self._stepper.await_gradients()
            self._take_from_host(self._states)
            self._hand_over_gradients(self._states)
            return loss

        with self._holding(shard_groups(self.inner)):
            loss: float = self.inner.step(evaluate)
        self._take_back_gradients(self._states)
        self._publish(self._states)
        self._stepper.close_step(True, self._units)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._updated:
            raise _early_error("optimizer.zero_grad() before optimizer.step()", "call optimizer.step() first")
        self._arrived.clear()
        self._take_back_gradients(self._states)
        self._stepper.forget_gradients(self._states, set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add trained parameters of the model that are in no group yet; every rank must call it."""
        own, groups = self._states, self.inner.param_groups
        params, num_groups = param_group["params"], len(groups)
        params = [params] if isinstance(params, Tensor) else list(params)
        names, complaint = check_new_params(self.inner, params, own, self._stepper.all_states)
        if not complaint:
            try:
                type(self.inner).add_param_group(self.inner, {**param_group, "params": params})
                if any(state.flat.depth_of_master for state in own):
                    refuse_unless_elementwise(self.inner, self._stepper.device)
                self._host.refuse_other_rows()
            except Exception as error:  # noqa: BLE001  of any optimizer: the other ranks wait in the exchange
                complaint = f"{type(error).__name__}: {error}"
        answers = exchange(self._channels["world"], (complaint, names, repr(plain(param_group))))
        complaint = next((each[0] for each in answers if each[0]), "")
        if not complaint and any(each != answers[0] for each in answers):
            complaint = f"the ranks gave other groups: {answers}"
        if complaint:
            del groups[num_groups:]
            raise ConfigurationError(f"optimizer.add_param_group: {complaint}")

    state_dict = _refusing("optimizer.state_dict() has this rank's shards only: call sw.save(path, model, optimizer)")
    load_state_dict = _refusing(
        "optimizer.load_state_dict() knows no shards: call sw.load(path, model, optimizer), or load before sw.shard"
    )
    __deepcopy__ = _refusing("a sharded optimizer cannot be copied: copy it before sw.shard")
    __reduce_ex__ = _refusing("a sharded optimizer cannot be pickled: it holds this rank's shards only")
    # Read by `torch.amp.GradScaler.step`, if the scaler is enabled.
    _step_supports_amp_scaling = property(
        _refusing("leave torch.amp.GradScaler out, or set enabled=False: precision='fp16' scales and skips by itself")
    )

    def _norm(self, norm_type: float = 2.0) -> Tensor:
        self._stepper.await_gradients()
        if norm_type != 2.0:
            self._await_host(self._states)
        return global_norm(self._states, self._channels, self._stepper.device, norm_type)

    @staticmethod
    def _hand_over_gradients(states: list[FlatState]) -> None:
        for state in states:
            gradient = state.gradient
            if gradient.clipped_by is not None:
                gradient.apply_clip()
            grads = gradient.final_by_param() if gradient.stage == "final" else {}
            for index in state.held:
                state.resting_params[index].grad = grads[index] if grads and gradient.used[index] else None

    @staticmethod
    def _take_back_gradients(states: list[FlatState]) -> None:
        for state in states:
            for param in state.resting_params if state.flat.master_on != "disk" else ():
                param.grad = None
