"""Whole gradients: their norms, and reading and changing them inside `sw.whole`. Every rank calls these together."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ..optim.clip import norms_by_param, require_norm_type
from ..unit.stand_ins import NotShown
from ..unit.state import FlatState
from ..wire.collectives import broadcast_from_first
from .guards import engine_of
from .runtime import Engine, channels_of

# A user's parameter, and the object that is registered in its place at the end of `sw.whole`.
Found = Iterable[tuple[nn.Parameter, nn.Parameter | None]]
# The parameters that `sw.whole` shows in the place of the user's.
Views = Mapping[nn.Parameter, nn.Parameter]


def grad_norms(model: nn.Module, norm_type: float = 2.0) -> dict[str, float]:
    """The norm of each whole gradient by its parameter's name, the same on every rank.

    Parameters that no rank has a gradient of are left out.
    """
    order, engine = require_norm_type(norm_type), engine_of(model)
    complete(engine, engine.trainable_states)
    return norms_by_param(engine.trainable_states, channels_of(engine.mesh, "reduce"), engine.mesh.device, order)


def complete(engine: Engine, states: Iterable[FlatState]) -> None:
    """Finish gradients: the mean over all ranks, clipped, and where the optimizer reads them."""
    engine.finish_gradients()
    engine.await_gradients()
    for state in states:
        if state.flat.host_updates and state.gradient.stage == "final":
            engine.await_host_of(state)
            state.gradient.apply_clip()


class HiddenGradients:
    """Gradients inside `sw.whole(model)`, which shows weights only: stand-ins for gradients that exist."""

    def __init__(self, states: Iterable[FlatState]) -> None:
        self.shown = {
            user: NotShown.like(spec.shape, state.flat.master.torch, state.device)
            for state in states
            if state.flat.trainable and state.gradient.stage != "empty"
            for user, spec, used in zip(state.user_params, state.flat.params, state.gradient.used, strict=True)
            if used or state.gradient.stage == "local"
        }

    def complaint(self, views: Views, write: bool) -> str:
        if any(view.grad is not self.shown.get(user) for user, view in views.items()):
            return "gradients were set inside sw.whole(...), which shows weights: use grads=True and write=True"
        return ""

    def write(self, views: Views, found: Found) -> None:
        """Do nothing: no gradient was shown that could have changed."""


class WholeGradients:
    """Gradients inside `sw.whole(model, grads=True)`, in the masters' precision, which the optimizer reads."""

    def __init__(self, engine: Engine, states: Iterable[FlatState]) -> None:
        self._engine = engine
        self._states = [state for state in states if state.flat.trainable]
        complete(engine, self._states)
        self._buffers = {state: self._gather(state) for state in self._states if state.gradient.stage == "final"}
        self.shown = {
            user: buffer[interval.start : interval.stop].view(spec.shape)
            for state, buffer in self._buffers.items()
            for user, interval, spec, used in zip(
                state.user_params, state.flat.intervals, state.flat.params, state.gradient.used, strict=True
            )
            if used
        }

    def _gather(self, state: FlatState) -> Tensor:
        """All of a flat's gradient, in memory of its own."""
        flat = state.flat
        own = flat.spans[flat.depth_of_master]
        buffer = torch.zeros(flat.num_elems, dtype=flat.reduce.torch, device=state.device)
        buffer[own.start : own.stop].copy_(state.gradient.final_at_hand)
        with self._engine.mesh.ledger.uncounted():
            state.carrier.run(buffer, 0, flat.master_hops, channels_of(self._engine.mesh, "gather"))
        return buffer.to(flat.master.torch)

    def complaint(self, views: Views, write: bool) -> str:
        trained = {user for state in self._states for user in state.user_params}
        if any(view.grad is not None for user, view in views.items() if user not in trained):
            return "a frozen parameter was given a gradient inside sw.whole(...), which nobody would read"
        if any(view.grad is not None and view.grad.layout != torch.strided for view in views.values()):
            return "a parameter was given a sparse gradient inside sw.whole(...): make it dense (.to_dense())"
        same = all(view.grad is self.shown.get(user) for user, view in views.items())
        if not write and not (same and all(self._is_unchanged(*each) for each in self._buffers.items())):
            return "gradients were changed inside sw.whole(...), which was for reading: use write=True"
        return ""

    @staticmethod
    def _is_unchanged(state: FlatState, buffer: Tensor) -> bool:
        own = state.flat.spans[state.flat.depth_of_master]
        final = state.gradient.final_at_hand.to(buffer.device, buffer.dtype)
        return torch.equal(buffer[own.start : own.stop].view(torch.uint8), final.view(torch.uint8))

    def write(self, views: Views, found: Found) -> None:
        """Set the gradients of all ranks to those that rank 0 has left in `param.grad`, or to None.

        If a parameter was replaced by another, the gradient of the new one counts, if it has one.
        """
        world, device = self._engine.mesh.world, self._engine.mesh.device
        left = {user: view.grad for user, view in views.items()}
        left |= {user: new.grad for user, new in found if new is not None and new.grad is not None}
        flags = torch.tensor(
            [left.get(user) is not None for state in self._states for user in state.user_params],
            dtype=torch.int32,
            device=device,
        )
        broadcast_from_first(world, flags)
        answers = iter(flags.tolist())
        for state in self._states:
            used = [bool(next(answers)) for _ in state.user_params]
            if any(used) or state in self._buffers:
                self._set(state, [left.get(user) for user in state.user_params], used)

    def _set(self, state: FlatState, grads: list[Tensor | None], used: list[bool]) -> None:
        flat = state.flat
        own = flat.spans[flat.depth_of_master]
        buffer = torch.zeros(flat.num_elems, dtype=flat.reduce.torch, device=state.device)
        for grad, interval in zip(grads, flat.intervals, strict=True):
            if grad is not None:
                buffer[interval.start : interval.stop].copy_(grad.detach().reshape(-1))
        broadcast_from_first(self._engine.mesh.world, buffer)
        state.gradient.set_final(buffer[own.start : own.stop], used)
