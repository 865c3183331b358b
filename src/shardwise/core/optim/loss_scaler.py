"""Dynamic loss scaling for fp16: gradients are made large enough to be seen, and small again before the step."""

import torch
from torch import Tensor


class LossScaler:
    """The scale halves when a gradient overflows, and doubles after `growth_interval` steps without one."""

    def __init__(self, device: torch.device, initial: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.scale: Tensor = torch.full((), initial, dtype=torch.float32, device=device)
        self._growth_interval = growth_interval
        self._good_steps = 0
        self.num_skipped = 0

    def after_step(self, overflowed: bool) -> None:
        # In place: the hooks on the model's output hold this tensor.
        if overflowed:
            self.num_skipped += 1
            self._good_steps = 0
            self.scale.mul_(0.5).clamp_(min=1.0)
            return
        self._good_steps += 1
        if self._good_steps == self._growth_interval:
            self._good_steps = 0
            self.scale.mul_(2.0).clamp_(max=2.0**24)

    def state(self) -> dict[str, float]:
        """What the next steps depend on, as plain numbers."""
        return {"scale": float(self.scale), "good_steps": self._good_steps, "num_skipped": self.num_skipped}

    def restore(self, state: dict[str, float]) -> None:
        self.scale.fill_(state["scale"])
        self._good_steps, self.num_skipped = int(state["good_steps"]), int(state["num_skipped"])
