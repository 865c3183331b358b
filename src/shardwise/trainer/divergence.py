"""Whether the training still goes anywhere, from the losses of all steps: the same on every rank."""

import math
from collections import deque
from dataclasses import dataclass, field

WINDOW = 10  # steps whose mean counts: single batches may be far off
LEAST_RISE = 0.5  # nats: a loss near zero may be many times its lowest, and all is well
MOST_SKIPPED = 50  # steps in a row that overflowed


@dataclass(slots=True)
class Divergence:
    """`ratio`: the mean of the last losses may be so many times its lowest value; 0: anything may happen."""

    ratio: float
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    lowest: float = math.inf
    num_skipped: int = 0

    def complaint(self, step: int, loss: float, norm: float | None, may_overflow: bool) -> str:
        """What is wrong after this step, in a sentence; nothing if all is well.

        With loss scaling (`may_overflow`) a norm that is not finite is a step that was left out; many in a row are not.
        """
        if not self.ratio:
            return ""
        self.num_skipped = 0 if norm is None or math.isfinite(norm) else self.num_skipped + 1
        most_skipped = MOST_SKIPPED if may_overflow else 0
        if not math.isfinite(loss) or self.num_skipped > most_skipped:
            of_norm = "" if norm is None else f" and the gradient's norm {norm:g}"
            return f"step {step}: the loss is {loss:g}{of_norm}"
        self.losses.append(loss)
        mean = sum(self.losses) / len(self.losses)
        if len(self.losses) < WINDOW:
            return ""
        self.lowest = min(self.lowest, mean)
        if mean > self.ratio * self.lowest and mean > self.lowest + LEAST_RISE:
            return (
                f"step {step}: the mean loss of {WINDOW} steps is {mean:.3f}, more than {self.ratio:g} times its "
                f"lowest, {self.lowest:.3f}"
            )
        return ""
