"""The training loop: one page, in the order in which things happen.

The host is one step ahead of the device. While the device computes a step, the host reads the next batch, takes in the
loss of the step before, and starts an exchange in which the ranks agree on what comes next. Only when a checkpoint or
an evaluation is due does the host wait for everything.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ..api.sharded_model import accumulate
from ..core.engine.streams import PendingHostCopy
from ..core.wire.collectives import Channel, InFlight, finish, start_all_reduce
from .data.order import key
from .data.samples import Batch
from .job import Job
from .models.headloss import loss_sum
from .optimizers import learning_rate, set_learning_rate
from .profile import Profile
from .settings import interval_of
from .signals import INTERRUPTED, TERMINATED, Requests
from .step_records import StepRecords, StepResult

# Exit codes of requests to stop. If ranks got different requests, the first of these counts.
STOP_CODES = (TERMINATED, INTERRUPTED)


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of the loop after `step` steps. `stop`: requested exit code; `complaint`: how the training diverged."""

    step: int
    stop: int | None = None
    complaint: str = ""


@dataclass(frozen=True, slots=True)
class StepCallbacks:
    """Actions between two steps, with the number of steps that are done. All ranks call them together."""

    evaluate: Callable[[int], None]
    save: Callable[[int], None]
    show: Callable[[int], None]


def run_steps(
    job: Job, records: StepRecords, exchange: "HostExchange", callbacks: StepCallbacks, first: int, profile: Profile
) -> Ending:
    coming = job.micro_batches(first) if first < job.num_steps else []
    exchange.start(num_targets(coming), 0.0)
    queued: _QueuedStep | None = None  # the last step, until its loss has arrived
    handed_in: _QueuedStep | None = None  # the step before it, whose loss is in the exchange
    for step in range(first, job.num_steps):
        agreed = exchange.finish()
        if handed_in is not None:
            records.add(handed_in.result(agreed.loss_sum))
            handed_in = None
        evaluates, saves = _is_due(step, job) if step > first else (False, False)
        if evaluates or saves or agreed.save or agreed.stop is not None or records.complaint:
            late = _settle(queued, exchange, records)
            queued = None
            stop = agreed.stop if agreed.stop is not None else late.stop
            records.pause()
            if records.complaint:
                return Ending(step, complaint=records.complaint)
            # The save comes first: a process that has to stop may not have much time left.
            if saves or agreed.save or late.save or stop is not None:
                callbacks.save(step)
            if stop is not None:
                return Ending(step, stop=stop)
            if evaluates:
                callbacks.evaluate(step)
            records.go_on()

        before, queued = queued, _take_step(job, coming, step, agreed.num_targets)
        records.count_step()
        profile.step()
        callbacks.show(step + 1)
        coming = job.micro_batches(step + 1) if step + 1 < job.num_steps else []
        handed_in = before
        exchange.start(num_targets(coming), 0.0 if before is None else before.loss_sum())
    agreed = exchange.finish()
    if handed_in is not None:
        records.add(handed_in.result(agreed.loss_sum))
    _settle(queued, exchange, records)
    records.pause()
    return Ending(job.num_steps, complaint=records.complaint)


def _is_due(step: int, job: Job) -> tuple[bool, bool]:
    """Return whether an evaluation, and whether a save, is due after `step` steps."""
    intervals = [interval_of(steps, job.num_steps) for steps in (job.settings.eval_steps, job.settings.save_steps)]
    evaluates, saves = (bool(interval) and step % interval == 0 for interval in intervals)
    return evaluates, saves


def _take_step(job: Job, micro_batches: list[Batch], step: int, num_targets: int) -> "_QueuedStep":
    """Queue one step. A rank's loss is its sum divided by the targets of all ranks, so any split gives the same."""
    rate = learning_rate(job.settings, step, job.num_steps)
    set_learning_rate(job.optimizer, rate)
    # Dropout depends on the step and the rank only, so a resumed run repeats it.
    torch.manual_seed(key(f"dropout of step {step} on rank {job.rank}", job.settings.seed))
    # The engine takes the mean over ranks.
    scale = job.batching.num_ranks / max(num_targets, 1)
    total = torch.zeros((), device=job.device)
    for index, batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        with nullcontext() if is_last else accumulate(job.model):
            loss = loss_sum(job.model, batch.to(job.device))
            (loss * scale).backward()
        total += loss.detach()
    numbers: list[Tensor] = [total]
    if not job.updates_early:
        numbers.append(job.optimizer.clip_grad_norm(job.settings.max_grad_norm or float("inf")))
    job.optimizer.step()
    job.optimizer.zero_grad()
    return _QueuedStep(step, num_targets, rate, PendingHostCopy(torch.stack(numbers)))


@dataclass(frozen=True, slots=True)
class _QueuedStep:
    """A step whose numbers are on their way to the host: this rank's loss sum, and the norm if it was taken."""

    step: int
    num_targets: int
    learning_rate: float
    numbers: PendingHostCopy

    def loss_sum(self) -> float:
        return self.numbers.read()[0]

    def result(self, loss_sum_of_all: float) -> StepResult:
        _, *norms = self.numbers.read()
        norm = norms[0] if norms else None
        return StepResult(self.step + 1, loss_sum_of_all, self.num_targets, norm, self.learning_rate)


def _settle(queued: _QueuedStep | None, exchange: "HostExchange", records: StepRecords) -> "Agreed":
    """Wait for the last step's numbers, in an exchange of their own, which may bring further requests."""
    if queued is None:
        return Agreed(0, 0.0, None, False)
    exchange.start(0, queued.loss_sum())
    agreed = exchange.finish()
    records.add(queued.result(agreed.loss_sum))
    return agreed


def num_targets(batches: list[Batch]) -> int:
    return sum(batch.num_targets for batch in batches)


@dataclass(frozen=True, slots=True)
class Agreed:
    num_targets: int  # of the coming step
    loss_sum: float  # of the step that was handed in
    stop: int | None  # the requested exit code
    save: bool


class HostExchange:
    """One small vector per step, summed over the hosts of all ranks while the devices compute.

    An exchange starts after a step was queued and finishes before the next one is, so no device waits for it. It brings
    the number of targets of the coming step, the requests to save or to stop that any rank has received, and the loss
    of an earlier step. All ranks read the same sums at the same place of the loop, so they decide alike.
    """

    def __init__(self, channel: Channel, requests: Requests) -> None:
        self._channel = channel
        self._requests = requests
        self._flight: InFlight | None = None

    def start(self, num_targets: int, loss_sum: float) -> None:
        stop, save = self._requests.stop, self._requests.save
        stops = [float(stop == code) for code in STOP_CODES]
        vector = torch.tensor([num_targets, loss_sum, float(save), *stops], dtype=torch.float64)
        with self._channel.ledger.uncounted():
            self._flight = start_all_reduce(self._channel, vector, "exchange between the hosts", sums=True)

    def finish(self) -> Agreed:
        assert self._flight is not None, "start() comes first"
        finish(self._flight)
        num_targets, loss_sum, save, *stops = self._flight.buffer.tolist()
        stop = next((code for code, num in zip(STOP_CODES, stops, strict=True) if num), None)
        return Agreed(int(num_targets), loss_sum, stop, bool(save))
