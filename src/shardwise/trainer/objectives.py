"""Losses of the next token, and of the preference for a chosen answer over a rejected one.

An objective returns sums over a batch. The loss comes first, then the measures that a row of metrics shows. All sums
are divided by the number of targets (of the next token) or of pairs in the batches of all ranks and micro-batches, so
that any split of the global batch gives the same result.

Preference objectives read the log-probabilities of both answers: the sums over their tokens. Those with a reference
subtract the log-probabilities of the model before the training: the base model without its adapters, so it needs no
second copy of the weights. That forward comes first, without gradients and without dropout.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data.samples import Batch
from .models.headloss import loss_sum, losses
from .models.lora import adapters_disabled
from .settings import WITH_REFERENCE, Objective, Settings

MEASURES = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")


@dataclass(frozen=True, slots=True)
class Scores:
    """The chosen and the rejected answer of each pair: log-probabilities, relative to the reference if there is one,
    and numbers of tokens."""

    chosen: Tensor
    rejected: Tensor
    num_chosen: Tensor
    num_rejected: Tensor

    @property
    def margin(self) -> Tensor:
        return self.chosen - self.rejected

    @property
    def per_token(self) -> "Scores":
        one = torch.ones_like(self.chosen)
        return Scores(self.chosen / self.num_chosen, self.rejected / self.num_rejected, one, one)


def _logistic(margin: Tensor, smoothing: float) -> Tensor:
    return -F.logsigmoid(margin) * (1 - smoothing) - F.logsigmoid(-margin) * smoothing


def _orpo(scores: Scores, settings: Settings) -> Tensor:
    # log(1 - exp(x)) of both. An answer that is certain counts as nearly so.
    chosen, rejected = (torch.log(-torch.expm1(x.clamp(max=-1e-7))) for x in (scores.chosen, scores.rejected))
    return _logistic(scores.margin - chosen + rejected, 0.0) * settings.dpo_beta - scores.chosen


# With a reference: DPO (Rafailov et al. 2023), with smoothed labels as in cDPO; SLiC's hinge; IPO (Azar et al. 2023)
# with log-probabilities per token. Without: SimPO (Meng et al. 2024) and ORPO (Hong et al. 2024), per token.
LOSSES: dict[Objective, Callable[[Scores, Settings], Tensor]] = {  # of each pair
    "dpo": lambda scores, by: _logistic(by.dpo_beta * scores.margin, by.label_smoothing),
    "hinge": lambda scores, by: F.relu(1 - by.dpo_beta * scores.margin),
    "ipo": lambda scores, by: (scores.per_token.margin - 1 / (2 * by.dpo_beta)) ** 2,
    "simpo": lambda scores, by: _logistic(by.dpo_beta * scores.margin - by.simpo_gamma, by.label_smoothing),
    "orpo": _orpo,
}


def measures_of(settings: Settings) -> tuple[str, ...]:
    return MEASURES if settings.objective is not None else ()


def sums(model: nn.Module, batch: Batch, settings: Settings) -> Tensor:
    """Return the sums over the batch: of the loss, and of the measures, which have no gradient."""
    if settings.objective is None:
        return loss_sum(model, batch)[None]
    is_target = batch.targets >= 0
    nums = is_target.sum(1)
    has_reference = settings.objective in WITH_REFERENCE
    reference = reference_of(model, batch) if has_reference else nums.new_zeros(len(nums), dtype=torch.float32)
    logarithms = -losses(model, batch, "none").sum(1) - reference
    is_pair = (nums > 0).view(-1, 2).all(1)
    # A pair without targets, such as one that repeats at the end of an evaluation, must have finite gradients, too.
    logarithms = torch.where(is_pair.repeat_interleave(2), logarithms, -1.0)
    scores = Scores(logarithms[0::2], logarithms[1::2], *nums.clamp(min=1).view(-1, 2).unbind(1))
    scores = scores if has_reference else scores.per_token
    loss = LOSSES[settings.objective](scores, settings)
    rewards = [settings.dpo_beta * side.detach() for side in (scores.chosen, scores.rejected)]
    measured = [*rewards, (rewards[0] > rewards[1]).float(), rewards[0] - rewards[1]]
    return torch.stack([torch.where(is_pair, each, 0.0).sum() for each in (loss, *measured)])


@torch.no_grad()
def reference_of(model: Any, batch: Batch) -> Tensor:
    """Return the log-probabilities of the answers under the base model."""
    was_training = model.training
    model.eval()
    with adapters_disabled(model):
        logarithms = -losses(model, batch, "none").sum(1)
    model.train(was_training)
    return logarithms
