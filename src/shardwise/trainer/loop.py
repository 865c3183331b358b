"""The training loop: one page, in the order in which things happen.

The host is one step ahead of the device. While the device computes a step, the host reads the next batch and the loss
of the step before, and starts an exchange in which the ranks agree on what comes next. The host waits for everything
only when a checkpoint or an evaluation is due.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ..api.sharded_model import accumulate
from ..core.engine.streams import PendingHostCopy
from ..core.wire.collectives import Channel, Collective, all_reduce
from .compilation import why_not_compiled
from .data.order import key
from .data.samples import Batch
from .metrics import StepRecords, StepResult
from .objectives import sums
from .optimizers import learning_rate, set_learning_rate
from .run_state import Run
from .settings import interval_of
from .signals import INTERRUPTED, TERMINATED, Requests

# Exit codes of requests to stop. If ranks got different requests, the first of these counts.
STOP_CODES = (TERMINATED, INTERRUPTED)


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of the loop after `step` steps. `stop`: requested exit code; `complaint`: how the training diverged."""

    step: int
    stop: int | None = None
    complaint: str = ""


def run_steps(run: Run, after_step: Callable[[], None]) -> Ending:
    """Train from the step that the run has reached to its last one."""
    records, exchange, first = run.records, _HostExchange(run.hosts, run.requests, run.records), run.step
    eval_every = interval_of(run.settings.eval_steps, run.num_steps)
    save_every = interval_of(run.settings.save_steps, run.num_steps)
    if run.evaluations.is_exhausted():  # a run that has stopped early was started again
        return Ending(first)
    coming = run.micro_batches(first)
    exchange.start(coming, None)
    queued: _QueuedStep | None = None  # the last step, until its loss is sent
    for step in range(first, run.num_steps):
        agreed = exchange.finish()
        evaluates, saves = (every > 0 and step % every == 0 for every in (eval_every, save_every))
        # The run may have been killed between a save and an evaluation of the same step.
        evaluates, saves = evaluates and step > run.evaluations.last_step, saves and step > first
        if evaluates or saves or agreed.save or agreed.stop is not None or records.complaint:
            # One more exchange for the loss of the last queued step. It may bring further requests.
            exchange.start([], queued)
            late, queued = exchange.finish(), None
            stop = agreed.stop if agreed.stop is not None else late.stop
            records.pause()
            if records.complaint:
                return Ending(step, complaint=records.complaint)
            # The save comes first: a process that has to stop may not have much time left.
            if saves or agreed.save or late.save or stop is not None:
                run.save(step)
            if stop is not None:
                return Ending(step, stop=stop)
            if evaluates:
                run.evaluate(step)
                if run.evaluations.is_exhausted():
                    return Ending(step)
            records.go_on()

        before, queued = queued, _take_step(run, coming, step, agreed.num_targets)
        records.num_queued += 1
        if step == first and run.settings.compile == "on" and (why := why_not_compiled()):
            run.progress.say(f"compile on: not all code of the blocks is compiled: {why} (TORCH_LOGS=graph_breaks)")
        after_step()
        run.show(step + 1)
        coming = run.micro_batches(step + 1)
        exchange.start(coming, before)
    exchange.finish()
    exchange.start([], queued)
    exchange.finish()
    records.pause()
    return Ending(run.num_steps, complaint=records.complaint)


def _take_step(run: Run, micro_batches: list[Batch], step: int, num_targets: int) -> "_QueuedStep":
    """Queue one step. The loss sum is divided by the targets of all ranks, so any split of the batch gives the same."""
    rate = learning_rate(run.settings, step, run.num_steps)
    set_learning_rate(run.optimizer, rate)
    # Dropout depends on the step and the rank only, so a resumed run repeats it.
    torch.manual_seed(key(f"dropout of step {step} on rank {run.rank}", run.settings.seed))
    # The engine averages gradients over ranks; the factor num_ranks makes this a sum.
    scale = run.batching.num_ranks / max(num_targets, 1)
    total = torch.zeros(1 + len(run.records.measures), device=run.device)
    for index, batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        with nullcontext() if is_last else accumulate(run.model):
            found = sums(run.model, batch.to(run.device), run.settings)
            (found[0] * scale).backward()
        total += found.detach()
    numbers: list[Tensor] = [total]
    if not run.updates_early:
        numbers.append(run.optimizer.clip_grad_norm(run.settings.max_grad_norm or float("inf"))[None])
    run.optimizer.step()
    run.optimizer.zero_grad()
    return _QueuedStep(step, num_targets, rate, PendingHostCopy(torch.cat(numbers)))


@dataclass(frozen=True, slots=True)
class _QueuedStep:
    """A step whose numbers are being copied to the host: this rank's sums of the loss and of the measures of the
    objective, and the gradient norm if computed."""

    step: int
    num_targets: int
    learning_rate: float
    numbers: PendingHostCopy


@dataclass(frozen=True, slots=True)
class _Agreed:  # result of an exchange, the same on all ranks
    num_targets: int  # of the coming step
    stop: int | None  # the requested exit code
    save: bool


class _HostExchange:
    """One small vector per step, summed over all ranks in host memory while the devices compute.

    An exchange starts after a step was queued and finishes before the next one is, so no device waits for it. It brings
    the number of targets of the coming step, the requests to save or to stop that any rank has received, and the loss
    of an earlier step, which is then recorded. All ranks read the same sums at the same place of the loop, so they
    make the same decisions.
    """

    def __init__(self, channel: Channel, requests: Requests, records: StepRecords) -> None:
        self._channel, self._requests, self._records = channel, requests, records
        self._flight: Collective | None = None
        self._sent: _QueuedStep | None = None

    def start(self, coming: list[Batch], sent: _QueuedStep | None) -> None:
        num_targets = sum(batch.num_targets for batch in coming)
        self._sent = sent
        num_sums = 1 + len(self._records.measures)
        sums = [0.0] * num_sums if sent is None else sent.numbers.read()[:num_sums]
        stop, save = self._requests.read()
        stops = [float(stop == code) for code in STOP_CODES]
        vector = torch.tensor([num_targets, float(save), *stops, *sums], dtype=torch.float64)
        with self._channel.ledger.uncounted():
            self._flight = all_reduce(self._channel, vector, "exchange between the hosts", sums=True)
            self._flight.start()

    def finish(self) -> _Agreed:
        assert self._flight is not None, "start() comes first"
        self._flight.finish()
        num_targets, save, *others = self._flight.buffer.tolist()
        stops, (loss_sum, *measured) = others[: len(STOP_CODES)], others[len(STOP_CODES) :]
        stop = next((code for code, num in zip(STOP_CODES, stops, strict=True) if num), None)
        if self._sent is not None:
            norms = self._sent.numbers.read()[1 + len(measured) :]
            norm = norms[0] if norms else None
            step, rate = self._sent.step + 1, self._sent.learning_rate
            self._records.add(StepResult(step, loss_sum, self._sent.num_targets, norm, rate, tuple(measured)))
        return _Agreed(int(num_targets), stop, bool(save))
