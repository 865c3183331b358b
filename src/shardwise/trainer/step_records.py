"""The book of a run: what each step came to, in rows for the metrics, and whether it still goes anywhere.

Every rank keeps the same book from the same numbers; one of them writes it down. A row covers the steps since the row
before it: its loss is the mean over all their targets.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .divergence import Divergence

NUM_LAST = 50  # steps that are kept for whoever looks into a divergence

Row = dict[str, float | int]


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step that is over: `step` is its number, from 1."""

    step: int
    loss_sum: float
    num_targets: int
    grad_norm: float | None  # None: nobody has taken it
    learning_rate: float

    @property
    def loss(self) -> float:
        """A batch without targets teaches nothing: its loss is 0."""
        return self.loss_sum / self.num_targets if self.num_targets else 0.0


@dataclass(slots=True)
class Book:
    tokens_per_step: int
    num_steps: int
    logging_steps: int
    flops_per_token: float
    peak_flops: float | None  # of all ranks together; None: unknown
    divergence: Divergence
    may_overflow: bool
    more: Callable[[], Row]  # what else belongs into a row: memory
    write: Callable[[Row], None]
    # Where this start of the run began.
    first_step: int = 0
    first_tokens: int = 0
    # Since the last row; in the checkpoint too, so that a run that goes on writes the rows of one that never stopped.
    loss_sum: float = 0.0
    num_targets: int = 0
    first_loss: float = math.nan
    last_loss: float = math.nan
    complaint: str = ""
    last: deque[StepResult] = field(default_factory=lambda: deque(maxlen=NUM_LAST))
    seconds: float = 0.0  # of training alone, for the summary
    num_timed: int = 0
    _since: float = field(default_factory=time.perf_counter)
    _row_seconds: float = 0.0
    _row_steps: int = 0
    _has_rows: bool = False

    def queued(self) -> None:
        """Another step is under way. Speed is counted here: the numbers of steps come late, at the end all at once."""
        self._row_steps += 1

    def note(self, result: StepResult) -> None:
        self.last.append(result)
        self.loss_sum += result.loss_sum
        self.num_targets += result.num_targets
        self._tick()
        if math.isnan(self.first_loss):
            self.first_loss = result.loss
        if result.num_targets:
            self.complaint = self.complaint or self.divergence.complaint(
                result.step, result.loss, result.grad_norm, self.may_overflow
            )
        if result.step % self.logging_steps == 0 or result.step == self.num_steps or self.complaint:
            self._write_row(result)

    def _write_row(self, result: StepResult) -> None:
        self.last_loss = self.loss_sum / self.num_targets if self.num_targets else 0.0
        row: Row = {
            "step": result.step,
            "time": time.time(),
            "loss": self.last_loss,
            **({} if result.grad_norm is None else {"grad_norm": result.grad_norm}),
            "learning_rate": result.learning_rate,
            "tokens": self.num_tokens_after(result.step),
        }
        if result.step <= self.logging_steps:
            row["first_loss"] = self.first_loss
        if self._row_steps:  # none where the numbers of several steps came at once
            row["tokens_per_s"] = self._row_steps * self.tokens_per_step / max(self._row_seconds, 1e-9)
            if self.peak_flops is not None:
                row["mfu"] = row["tokens_per_s"] * self.flops_per_token / self.peak_flops
        self.write({**row, **self.more()})
        if self._has_rows:  # the first row of a start holds its warm-up
            self.seconds += self._row_seconds
            self.num_timed += self._row_steps
        self._has_rows = True
        self._row_seconds, self._row_steps = 0.0, 0
        self.loss_sum, self.num_targets = 0.0, 0

    def num_tokens_after(self, step: int) -> int:
        return self.first_tokens + (step - self.first_step) * self.tokens_per_step

    @property
    def tokens_per_s(self) -> float | None:
        """Of all ranks, over the rows but the first of this start."""
        return self.num_timed * self.tokens_per_step / self.seconds if self.num_timed else None

    @property
    def mfu(self) -> float | None:
        if self.peak_flops is None or self.tokens_per_s is None:
            return None
        return self.tokens_per_s * self.flops_per_token / self.peak_flops

    def pause(self) -> None:
        """What comes now is not training: saving, evaluating."""
        self._tick()

    def go_on(self) -> None:
        self._since = time.perf_counter()

    def _tick(self) -> None:
        now = time.perf_counter()
        self._row_seconds += now - self._since
        self._since = now

    def to_extra(self) -> dict[str, Any]:
        lowest = self.divergence.lowest
        return {
            "loss_sum": self.loss_sum,
            "num_targets": self.num_targets,
            "first_loss": self.first_loss,
            "lowest": None if math.isinf(lowest) else lowest,  # JSON has no infinity
            "losses": list(self.divergence.losses),
        }

    def from_extra(self, extra: Mapping[str, Any], is_same_data: bool = True) -> None:
        self.loss_sum, self.num_targets = extra["loss_sum"], extra["num_targets"]
        self.first_loss = extra["first_loss"]
        if not is_same_data:  # its losses may be of another size
            return
        self.divergence.lowest = math.inf if extra["lowest"] is None else extra["lowest"]
        self.divergence.losses.extend(extra["losses"])
