"""The loss on samples that are not trained on: the mean over all their targets, whatever the number of ranks."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from ..core.wire.collectives import Channel, exchange
from .data.samples import Samples
from .models.headloss import loss_sum


@dataclass(frozen=True, slots=True)
class Evaluation:
    loss: float
    num_targets: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


@torch.no_grad()
def evaluate(
    model: nn.Module, samples: Samples, num_samples: int, batch_size: int, hosts: Channel, device: torch.device
) -> Evaluation:
    """The first `num_samples` samples. All ranks call the model equally often; what is left over counts nothing."""
    was_training = model.training
    model.eval()
    total, num_targets = torch.zeros((), dtype=torch.float64, device=device), 0
    stride = batch_size * hosts.num_ranks
    for first in range(0, num_samples, stride):
        mine = range(first + hosts.index * batch_size, first + (hosts.index + 1) * batch_size)
        batch = samples.batch([min(index, num_samples - 1) for index in mine])
        num_left = min(max(num_samples - mine.start, 0), batch_size)
        batch = batch.with_targets_of(num_left)
        num_targets += batch.num_targets
        total += loss_sum(model, batch.to(device))
    model.train(was_training)
    sums = exchange(hosts, (float(total), num_targets))
    num_targets = sum(number for _, number in sums)
    return Evaluation(math.fsum(part for part, _ in sums) / max(num_targets, 1), num_targets)
