"""Whether the training still goes anywhere, from the losses of all steps: the same on every rank."""

import math
from collections import deque
from dataclasses import dataclass, field

WINDOW = 10  # steps whose mean counts: single batches may be far off


@dataclass(slots=True)
class Divergence:
    """`ratio`: the mean of the last losses may be so many times its lowest value; 0: anything may happen."""

    ratio: float
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    lowest: float = math.inf

    def complaint(self, step: int, loss: float, norm: float, may_overflow: bool) -> str:
        """What is wrong after this step, in a sentence; nothing if all is well.

        With loss scaling (`may_overflow`) a norm that is not finite is a step that was left out, not the end.
        """
        if not self.ratio:
            return ""
        if not math.isfinite(loss) or not (math.isfinite(norm) or may_overflow):
            return f"step {step}: the loss is {loss:g} and the gradient's norm {norm:g}"
        self.losses.append(loss)
        mean = sum(self.losses) / len(self.losses)
        if len(self.losses) < WINDOW:
            return ""
        self.lowest = min(self.lowest, mean)
        if mean > self.ratio * self.lowest:
            return (
                f"step {step}: the mean loss of {WINDOW} steps is {mean:.3f}, more than {self.ratio:g} times its "
                f"lowest, {self.lowest:.3f}"
            )
        return ""
