"""Gradients between the backward and the optimizer: complete, agreed on by the ranks, and forgotten again."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ...base.errors import StateError
from ..unit.state import FlatState
from ..wire.collectives import Channel, finish, start_all_reduce
from .reductions import Reductions
from .streams import Later, host_waits_for, is_capturing
from .updates import HostJobs


class Gradients:
    def __init__(
        self,
        states: list[FlatState],
        reductions: Reductions,
        host_jobs: HostJobs,
        channel: Channel,
        device: torch.device,
    ) -> None:
        self._states = states
        self._reductions = reductions
        self._host_jobs = host_jobs
        self._channel = channel
        self._device = device
        self.all_used: Tensor | None = None
        # A small number that stands for the optimizers' settings; and the last sum of the ranks' numbers, to be read.
        self.settings: Callable[[], int] = lambda: 0
        self._sum: tuple[Later, int] | None = None

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
        """A parameter that no rank used gets no gradient at all, as with one process.

        Every rank joins; only one that left something out itself has to read, and wait for, the answer. With it goes
        a number for the optimizers' settings, whose sum a GPU's rank reads when it has long arrived.
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
                self._sum = (Later(flags[-1]), settings)
        if self._device.type == "cpu":
            self._refuse_other_settings()
        if left_out:
            self._reductions.lane.join()
            answers = iter(flags.tolist())
            for state in self._states:
                state.gradient.used = [next(answers) > 0 for _ in state.gradient.used]

    def _refuse_other_settings(self) -> None:
        """Where the ranks' numbers are not all this rank's own."""
        if self._sum is not None:
            later, own = self._sum
            self._sum = None
            # It is this rank's own where no other rank is there: on an emulated fabric. All numbers are above zero.
            if later.read()[0] not in (own, self._channel.num_ranks * own):
                raise StateError(
                    "the ranks' optimizers have different settings, so their weights would drift apart: give every "
                    "rank the same learning rate and the like (optimizer.param_groups)"
                )

    @property
    def local(self) -> list[FlatState]:
        """Flats of which micro-batches have left parts to be brought to the optimizer's layout."""
        return [state for state in self._states if state.gradient.stage == "local"]

    def sync(self, states: list[FlatState]) -> None:
        for state in states:
            self._reductions.sync(state)
        self._reductions.wait()
        self.agree_on_use()

    def await_on_host(self, state: FlatState) -> None:
        """Until the gradient of a flat is on the host, and no update reads it."""
        self._host_jobs.await_update_of(state)
        host_waits_for(self._reductions.arrived.get(state))

    def forget(self, states: Iterable[FlatState], set_to_none: bool) -> None:
        """Start anew; without `set_to_none` with gradients of zero, which still move momenta."""
        for state in states:
            state.take_gradients()
            if not set_to_none and state.gradient.stage != "empty" and state.gradient.grads is not None:
                self.await_on_host(state)
            state.gradient.forget(not set_to_none, self._reductions.memory.gives_back)
