"""The embedded text and the order in which it is read.

CPython carries its own manual in `pydoc_data.topics`: about half a million characters of English, present
wherever Python is. Tokens are its bytes, so the vocabulary is 256 and nothing is downloaded.

The order is a function of the seed and of a sample's global index, never of a rank: sample i is the same text
on any world, and a rank reads its share of the global batch. Each pass over the text (an epoch) visits every
window once, in an order of its own.
"""

from functools import cache
from pydoc_data.topics import topics

import torch
from torch import Tensor

from ..errors import ConfigurationError

VOCAB = 256


@cache
def text() -> Tensor:
    """The whole text as bytes, in the order of the topics' names."""
    prose = "\n\n".join(topics[name].strip() for name in sorted(topics))
    return torch.frombuffer(bytearray(prose.encode()), dtype=torch.uint8)


@cache
def _order(num_windows: int, seed: int, epoch: int) -> Tensor:
    # A generator mixes its seed well, but seed + epoch would make epoch 1 of seed 0 epoch 0 of seed 1.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num_windows, generator=generator)


def samples(first: int, count: int, seq: int, seed: int) -> tuple[Tensor, Tensor]:
    """Samples `first` up to `first + count`: tokens and, one byte later, targets, both (count, seq) int64."""
    num_windows = (text().numel() - 1) // seq
    if num_windows == 0:
        raise ConfigurationError(f"data: seq {seq} is longer than the text of {text().numel()} bytes")
    starts = [
        int(_order(num_windows, seed, index // num_windows)[index % num_windows]) * seq
        for index in range(first, first + count)
    ]
    windows = torch.stack([text()[start : start + seq + 1] for start in starts]).long()
    return windows[:, :-1], windows[:, 1:]


def batch(step: int, global_batch: int, seq: int, seed: int) -> tuple[Tensor, Tensor]:
    """The whole global batch of a step: tokens and targets, (global_batch, seq)."""
    return samples(step * global_batch, global_batch, seq, seed)


def share(whole: Tensor, index: int, num_shares: int) -> Tensor:
    """One of equal parts of a batch (a rank's, or a micro-batch): consecutive samples, in order."""
    if whole.shape[0] % num_shares:
        raise ConfigurationError(
            f"data: {whole.shape[0]} samples do not divide into {num_shares} equal shares; "
            f"make the batch a multiple of {num_shares}"
        )
    return whole.chunk(num_shares)[index]
