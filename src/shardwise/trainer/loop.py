"""The loop: one page, in the order in which things happen.

The host is one step ahead of the device. While the device computes a step, the host reads the next batch, takes in the
loss of the step before, and starts a round in which the ranks agree on what comes next (rounds.py). Only where a
checkpoint or an evaluation is due does it wait for everything.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..api import accumulate
from ..core.engine.streams import Later
from .batching import Batching
from .data.order import key
from .data.samples import Batch, Samples
from .host_exchange import Agreed, Rounds
from .learning_rate import learning_rate
from .models.headloss import loss_sum
from .optimizers import set_learning_rate
from .profile import Profile
from .settings import Settings, interval_of
from .step_records import Book, StepResult


@dataclass(frozen=True, slots=True)
class Job:
    """All that a step needs."""

    settings: Settings
    model: nn.Module
    optimizer: Any
    samples: Samples
    batching: Batching
    rank: int
    device: torch.device
    num_steps: int
    # Units are updated inside the backward, so that nobody knows the norm of all gradients before.
    updates_early: bool = False
    # Where this start of the run began: so many steps, and so many samples of the endless order.
    first_step: int = 0
    first_sample: int = 0

    def num_samples_before(self, step: int) -> int:
        return self.first_sample + (step - self.first_step) * self.batching.global_size

    def samples_of(self, step: int) -> list[int]:
        return self.samples.order(self.num_samples_before(step), self.batching.global_size)

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's part of a step, on the host, ready to go to the device without waiting for it."""
        shares = self.batching.share(self.samples_of(step), self.rank)
        batches = [self.samples.batch(share) for share in shares]
        return [batch.pinned() for batch in batches] if self.device.type == "cuda" else batches


@dataclass(frozen=True, slots=True)
class Ending:
    """`step` steps are done. `stop` is the exit code that was asked for; `complaint` says how it diverged."""

    step: int
    stop: int | None = None
    complaint: str = ""


@dataclass(frozen=True, slots=True)
class Between:
    """What happens when so many steps are done; all ranks do it together."""

    evaluate: Callable[[int], None]
    save: Callable[[int], None]
    show: Callable[[int], None]

    def is_due(self, step: int, job: Job) -> tuple[bool, bool]:
        intervals = [interval_of(steps, job.num_steps) for steps in (job.settings.eval_steps, job.settings.save_steps)]
        evaluates, saves = (bool(interval) and step % interval == 0 for interval in intervals)
        return evaluates, saves


def run_steps(job: Job, book: Book, rounds: Rounds, between: Between, first: int, profile: Profile) -> Ending:
    coming = job.micro_batches(first) if first < job.num_steps else []
    rounds.start(num_targets(coming), 0.0)
    queued: _Queued | None = None  # the last step, until its loss has come
    handed_in: _Queued | None = None  # the one before it, whose loss is in the round
    for step in range(first, job.num_steps):
        agreed = rounds.finish()
        if handed_in is not None:
            book.note(handed_in.result(agreed.loss_sum))
            handed_in = None
        evaluates, saves = between.is_due(step, job) if step > first else (False, False)
        if evaluates or saves or agreed.save or agreed.stop is not None or book.complaint:
            late = settle(queued, rounds, book)
            queued = None
            stop = agreed.stop if agreed.stop is not None else late.stop
            book.pause()
            if book.complaint:
                return Ending(step, complaint=book.complaint)
            # First what must not be lost: whoever asks to stop may not wait for long.
            if saves or agreed.save or late.save or stop is not None:
                between.save(step)
            if stop is not None:
                return Ending(step, stop=stop)
            if evaluates:
                between.evaluate(step)
            book.go_on()

        before, queued = queued, take_step(job, coming, step, agreed.num_targets)
        book.queued()
        profile.step()
        between.show(step + 1)
        coming = job.micro_batches(step + 1) if step + 1 < job.num_steps else []
        handed_in = before
        rounds.start(num_targets(coming), 0.0 if before is None else before.loss_sum())
    agreed = rounds.finish()
    if handed_in is not None:
        book.note(handed_in.result(agreed.loss_sum))
    settle(queued, rounds, book)
    book.pause()
    return Ending(job.num_steps, complaint=book.complaint)


@dataclass(frozen=True, slots=True)
class _Queued:
    """A step whose numbers are on their way: this rank's sum of losses, and the norm if it was taken."""

    step: int
    num_targets: int
    learning_rate: float
    numbers: Later

    def loss_sum(self) -> float:
        return self.numbers.read()[0]

    def result(self, loss_sum_of_all: float) -> StepResult:
        _, *norms = self.numbers.read()
        norm = norms[0] if norms else None
        return StepResult(self.step + 1, loss_sum_of_all, self.num_targets, norm, self.learning_rate)


def settle(queued: _Queued | None, rounds: Rounds, book: Book) -> Agreed:
    """Wait for the last step's numbers, in a round of their own, in which more may be asked for."""
    if queued is None:
        return Agreed(0, 0.0, None, False)
    rounds.start(0, queued.loss_sum())
    agreed = rounds.finish()
    book.note(queued.result(agreed.loss_sum))
    return agreed


def take_step(job: Job, micro_batches: list[Batch], step: int, num_targets: int) -> _Queued:
    """Queue one step. The loss of a rank is its sum over the targets of all ranks, so any split gives the same."""
    rate = learning_rate(job.settings, step, job.num_steps)
    set_learning_rate(job.optimizer, rate)
    # Dropout depends on the step and the rank, not on how the run came here.
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
    return _Queued(step, num_targets, rate, Later(torch.stack(numbers)))


def num_targets(batches: list[Batch]) -> int:
    return sum(batch.num_targets for batch in batches)
