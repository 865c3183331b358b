"""A whole training step as one CUDA graph: no Python and no launches between its kernels.

The first calls run as usual, so that optimizer state, communicators and the order of units exist. Then one call is
recorded: gathers, forward, backward, reductions, update and the gathers for the next step, on all lanes. From then on a
call copies its inputs to where the recording reads them, and replays. Slots have constant addresses, and every step
begins in the state in which the last one ended, with the first units gathered, so the recording is right for every
later step. If something else (an evaluation) has used the slots in between, the next call first gathers the first units
again, and makes the other units SHARDED or STALE.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import ConfigurationError, StateError
from ..core.engine.guards import engine_of
from ..core.engine.runtime import Engine
from ..core.engine.streams import Lane
from ..core.optim.groups import plain_settings
from ..core.schedule.unit_status import Weights, snapshot

NUM_EAGER_CALLS = 3


class Replay:
    """Restores the state in which a captured step begins and ends: no gradients, first units gathered, others stale."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._gathers = engine.gathers
        engine.gathers.is_captured = True
        self._begins_with: list[tuple[object, ...]] = []
        self._held_at_first: list[bool] = []

    def begin(self) -> None:
        """Bring all units to the state of the recording. Units that an evaluation has gathered count as stale: a
        recording that relied on them would never gather them again. No unit is gathered into memory that the step
        releases, because it would have another address the next time."""
        self._engine.begin_step()
        self._engine.abandon_backward()
        if any(state.gradient.stage != "empty" for state in self._engine.trainable_states):
            raise StateError("there are gradients already: a captured step begins and ends with none (zero_grad)")
        statuses = self._engine.statuses
        if snapshot(statuses) != self._begins_with:
            self._gathers.settle()
            # Encoded frozen weights are rounded in a forward. Gather them exactly, as a backward leaves them.
            for index in self._gathers.schedule.after_step:
                is_rounded = any(flat.rounds_forwards and not flat.trainable for flat in statuses[index].plan.flats)
                if is_rounded and statuses[index].plan.backward_reads and not statuses[index].is_ready("backward"):
                    self._gathers.start(index, "backward", needed_now=False)
            for status in statuses:
                status.invalidate()
            self._gathers.start_first()
            # Gather frozen weights that were dropped since: the recording expects them, and does not gather them.
            for status, was_held in zip(statuses, self._held_at_first, strict=False):
                is_frozen = any(not flat.trainable for flat in status.plan.flats)
                if was_held and is_frozen and status.weights is Weights.SHARDED:
                    self._gathers.start(status.index, "forward", needed_now=False)
            self._engine.join_lanes()
            self._lose_the_rest()
            self._begins_with = snapshot(statuses)
            self._held_at_first = self._held_at_first or [status.weights is not Weights.SHARDED for status in statuses]

    def end_recording(self) -> None:
        """Check that a captured step ends as it began."""
        self._engine.join_lanes()
        self._lose_the_rest()
        if snapshot(self._engine.statuses) != self._begins_with:
            raise StateError(
                "this step does not end as it began, so it cannot be replayed: it must run the whole model, forward "
                "and backward, then optimizer.step() and zero_grad()"
            )

    def end(self) -> None:
        """Count the update, so that a backward of an older forward raises. Mark the units that hold the new weights."""
        self._gathers.count_update(range(len(self._engine.units)))
        for status in self._engine.statuses:
            if status.is_ready("forward"):
                self._engine.units[status.index].stamp(status.version)

    def _lose_the_rest(self) -> None:
        """Make units SHARDED: those whose memory the step releases, and those in slots that are not first in a step."""
        after_step = self._gathers.schedule.after_step
        for status in self._engine.statuses:
            self._gathers.drop(status)
            if status.slot is not None and status.index not in after_step:
                self._gathers.lose(status)


class CapturedStep:
    """A step that replays a CUDA graph. Call it with the tensors of a batch. Each call overwrites the last outputs."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> None:
        self._replay = Replay(engine)
        self._optimizer = optimizer
        self._step = step
        self._compute = Lane(engine.mesh.device)
        self._num_calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._outputs: Any = None
        self._settings: list[dict[str, Any]] = []

    def __call__(self, *inputs: Tensor) -> Any:
        if self._num_calls < NUM_EAGER_CALLS:
            self._num_calls += 1
            with self._compute.after_compute():
                outputs = self._step(*inputs)
            self._compute.compute_waits_for(self._compute.mark())
            return outputs
        with self._compute.after_compute():
            self._replay.begin()
        self._compute.compute_waits_for(self._compute.mark())
        if self._graph is None:
            self._record(inputs)
        # Hyper-parameters that are plain numbers are constants in the recorded kernels.
        for number, (now, recorded) in enumerate(zip(plain_settings(self._optimizer), self._settings, strict=True)):
            for key, value in now.items():
                if value != recorded.get(key):
                    raise StateError(
                        f"{key} of the optimizer's group {number} was {recorded.get(key)} when the step was recorded "
                        f"and is {value} now, which a recording does not see: make it a tensor on the GPU "
                        "(lr=torch.tensor(..., device='cuda')) and change it in place, as torch's schedulers do"
                    )
        for index, (own, given) in enumerate(zip(self._inputs, inputs, strict=True)):
            if own.shape != given.shape or own.dtype != given.dtype:
                raise StateError(
                    f"input {index} of the captured step is {tuple(given.shape)} {given.dtype}, and was recorded as "
                    f"{tuple(own.shape)} {own.dtype}: a recording has constant shapes"
                )
            own.copy_(given, non_blocking=True)
        assert self._graph is not None
        self._graph.replay()
        self._replay.end()
        return self._outputs

    def _record(self, inputs: tuple[Tensor, ...]) -> None:
        self._inputs = tuple(tensor.clone() for tensor in inputs)
        self._settings = plain_settings(self._optimizer)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # The recording has a memory pool of its own. The memory of the calls before it is not needed again.
        torch.cuda.empty_cache()
        try:
            with self._compute.capture(graph):
                self._outputs = self._step(*self._inputs)
                self._replay.end_recording()
        except RuntimeError as error:
            raise StateError(
                f"this step cannot be recorded as a CUDA graph: {error}. Nothing in it may wait for the GPU (.item(), "
                "printing a tensor), read the CPU, or leave out parameters"
            ) from error
        self._graph = graph


def capture(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> CapturedStep:
    """Turn `step`, a function of a batch's tensors that trains for one step, into one that replays a CUDA graph.

    `step` must run everything: forward, backward, clipping, `optimizer.step()` and `zero_grad()`. The optimizer
    must be capturable (`AdamW(..., capturable=True)`).
    """
    engine = engine_of(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError("sw.capture records the step of one optimizer: leave it out where there are several")
    if engine.mesh.device.type != "cuda":
        raise ConfigurationError(f"sw.capture records a CUDA graph, and the model is on {engine.mesh.device}")
    for unit in engine.schedule.units:
        if unit.layout.places != {"device"}:
            raise ConfigurationError(
                f"sw.capture: the host takes part in unit {unit.name!r} ({unit.layout}): keep everything on the device"
            )
    if engine.scale.loss_scale is not None:
        raise ConfigurationError("sw.capture with fp16: a step that overflowed is skipped by the host; use bf16")
    if not all(group.get("capturable", True) for group in optimizer.param_groups):
        raise ConfigurationError("sw.capture: the optimizer counts steps on the host; build it with capturable=True")
    return CapturedStep(engine, optimizer, step)
