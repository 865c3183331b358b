"""What gradients are multiplied by on their way, and where."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GradScale:
    """The mean over ranks. It is taken by the wire, where that can; else while gradients are filled in, where that is
    one pass (the dtypes agree) or their sum could overflow; else after the sum, on the final part alone.

    Under loss scaling the scale is taken out at the same time, so a final gradient is never scaled.
    """

    before: float
    after: float
    wire_averages: bool
    loss_scale: Tensor | None

    @classmethod
    def mean(
        cls,
        num_ranks: int,
        compute: torch.dtype,
        reduce: torch.dtype,
        loss_scale: Tensor | None,
        wire_averages: bool,
    ) -> "GradScale":
        share = 1.0 / num_ranks
        if wire_averages:
            return cls(1.0, 1.0, True, loss_scale)
        if reduce in (compute, torch.float16):
            return cls(share, 1.0, False, loss_scale)
        return cls(1.0, share, False, loss_scale)

    def apply(self, final: Tensor) -> None:
        if self.after != 1.0:
            final.mul_(self.after)
        if self.loss_scale is not None:
            final.mul_(1.0 / self.loss_scale)

    def undo(self, final: Tensor, num_summed: int) -> None:
        """Such that a sync gives `final` again; `num_summed` ranks take part in its hops."""
        final.mul_(float(num_summed) if self.wire_averages else 1.0 / self.after)
        if self.loss_scale is not None:
            final.mul_(self.loss_scale.to(final.device))
