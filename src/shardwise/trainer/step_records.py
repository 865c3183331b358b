"""The record of a run's steps: rows for the metrics, speed, and a check for divergence.

Every rank keeps the same records from the same numbers; one rank writes them. A row covers the steps since the row
before it: its loss is the mean over all their targets.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

NUM_LAST = 50  # steps that the report of a divergence shows
WINDOW = 10  # losses in the mean that is checked for divergence: single batches may be far off
MIN_RISE = 0.5  # nats: a loss near zero may rise to many times its lowest value in a healthy run
MAX_SKIPPED = 50  # overflowed steps in a row

Row = dict[str, float | int]


@dataclass(frozen=True, slots=True)
class StepResult:
    """A finished step. `step` is its number, from 1."""

    step: int
    loss_sum: float
    num_targets: int
    grad_norm: float | None  # None: it was not computed
    learning_rate: float

    @property
    def loss(self) -> float:
        """Mean loss of the targets; 0 for a batch without any."""
        return self.loss_sum / self.num_targets if self.num_targets else 0.0


@dataclass(slots=True)
class Divergence:
    """Checks the losses of all steps. The mean of the last ones may be `ratio` times its lowest value; 0: no check."""

    ratio: float
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    lowest: float = math.inf
    num_skipped: int = 0

    def complaint(self, step: int, loss: float, norm: float | None, may_overflow: bool) -> str:
        """Return how the training diverged at this step, or an empty text.

        With loss scaling (`may_overflow`), a norm that is not finite is a skipped step; too many in a row are not.
        """
        if not self.ratio:
            return ""
        self.num_skipped = 0 if norm is None or math.isfinite(norm) else self.num_skipped + 1
        if not math.isfinite(loss) or self.num_skipped > (MAX_SKIPPED if may_overflow else 0):
            with_norm = "" if norm is None else f" and the gradient's norm {norm:g}"
            return f"step {step}: the loss is {loss:g}{with_norm}"
        self.losses.append(loss)
        mean = sum(self.losses) / len(self.losses)
        if len(self.losses) < WINDOW:
            return ""
        self.lowest = min(self.lowest, mean)
        if mean <= self.ratio * self.lowest or mean <= self.lowest + MIN_RISE:
            return ""
        high = f"{mean:.3f}, more than {self.ratio:g} times its lowest, {self.lowest:.3f}"
        return f"step {step}: the mean loss of {WINDOW} steps is {high}"


@dataclass(slots=True)
class StepRecords:
    tokens_per_step: int
    num_steps: int
    logging_steps: int
    flops_per_token: float
    peak_flops: float | None  # of all ranks together; None: unknown
    divergence: Divergence
    may_overflow: bool
    memory_row: Callable[[], Row]  # further numbers of a row
    write: Callable[[Row], None]
    # Steps and tokens when this start of the run began.
    first_step: int = 0
    first_tokens: int = 0
    # Sums since the last row. Checkpoints have them too, so that a resumed run writes the same rows.
    loss_sum: float = 0.0
    num_targets: int = 0
    first_loss: float = math.nan
    last_loss: float = math.nan
    complaint: str = ""
    last: deque[StepResult] = field(default_factory=lambda: deque(maxlen=NUM_LAST))
    seconds: float = 0.0  # duration of training only, without the first row
    num_timed: int = 0
    _since: float = field(default_factory=time.perf_counter)
    _row_seconds: float = 0.0
    # Steps queued since the last row, for the speed: the numbers of steps arrive late, and several at once at the end.
    num_queued: int = 0
    _has_rows: bool = False

    def add(self, result: StepResult) -> None:
        self.last.append(result)
        self.loss_sum += result.loss_sum
        self.num_targets += result.num_targets
        self.pause()
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
        if self.num_queued:  # 0 if the numbers of several steps arrived at once
            row["tokens_per_s"] = self.num_queued * self.tokens_per_step / max(self._row_seconds, 1e-9)
            if (mfu := self._mfu_at(row["tokens_per_s"])) is not None:
                row["mfu"] = mfu
        self.write({**row, **self.memory_row()})
        if self._has_rows:  # the first row of a start includes the warm-up
            self.seconds += self._row_seconds
            self.num_timed += self.num_queued
        self._has_rows = True
        self._row_seconds, self.num_queued = 0.0, 0
        self.loss_sum, self.num_targets = 0.0, 0

    def num_tokens_after(self, step: int) -> int:
        return self.first_tokens + (step - self.first_step) * self.tokens_per_step

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all ranks, without the first row of this start."""
        return self.num_timed * self.tokens_per_step / self.seconds if self.num_timed else None

    @property
    def mfu(self) -> float | None:
        return None if self.tokens_per_s is None else self._mfu_at(self.tokens_per_s)

    def _mfu_at(self, tokens_per_s: float) -> float | None:
        return None if self.peak_flops is None else tokens_per_s * self.flops_per_token / self.peak_flops

    def pause(self) -> None:
        """Stop the clock of training, for a save or an evaluation."""
        now = time.perf_counter()
        self._row_seconds += now - self._since
        self._since = now

    def go_on(self) -> None:
        self._since = time.perf_counter()

    def to_extra(self) -> dict[str, Any]:
        """Return the part of the records that a checkpoint saves. JSON has no infinity."""
        lowest = None if math.isinf(self.divergence.lowest) else self.divergence.lowest
        sums = {"loss_sum": self.loss_sum, "num_targets": self.num_targets, "first_loss": self.first_loss}
        return {**sums, "lowest": lowest, "losses": list(self.divergence.losses)}

    def from_extra(self, extra: Mapping[str, Any], is_same_data: bool = True) -> None:
        self.loss_sum, self.num_targets = extra["loss_sum"], extra["num_targets"]
        self.first_loss = extra["first_loss"]
        if is_same_data:  # losses of other data may be of another size
            self.divergence.lowest = math.inf if extra["lowest"] is None else extra["lowest"]
            self.divergence.losses.extend(extra["losses"])
