"""The samples of a run: the split into training and evaluation, their order, and batches.

A seeded random permutation of all samples begins with those for evaluation; the others are for training. It is
computed, not stored: everything is a function of settings and indices, so all ranks agree without communication.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...base.errors import ConfigurationError
from ..settings import Settings
from . import order
from .prepare import Prepared, Say
from .token_store import Store
from .tokenizer import Tokenizer
from .windows import NOT_TRAINED, Windows, make_windows

_ENTROPY_TOKENS = 2**22  # tokens to count; more would change only the fourth digit of the entropy
_STRETCH = 2**14  # consecutive tokens that are read at once


@dataclass(frozen=True, slots=True)
class Batch:
    tokens: Tensor  # (samples, seq_length) int64
    targets: Tensor  # the same shape; -100: not trained on
    positions: Tensor | None  # the same shape, from 0 in each document; None: documents are not isolated

    @property
    def num_targets(self) -> int:
        return int((self.targets != NOT_TRAINED).sum())

    def to(self, device: torch.device) -> "Batch":
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        """The batch in pinned memory, from which a GPU copies asynchronously."""
        return self._each(Tensor.pin_memory)

    def with_first_targets(self, num_samples: int) -> "Batch":
        """The batch with targets in its first `num_samples` samples only."""
        targets = self.targets.clone()
        targets[num_samples:] = NOT_TRAINED
        return Batch(self.tokens, targets, self.positions)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        positions = None if self.positions is None else change(self.positions)
        return Batch(change(self.tokens), change(self.targets), positions)


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples for training or evaluation: the windows at positions `first` to `first + num_samples` of the split."""

    windows: Windows
    seed: int
    first: int
    num_samples: int
    num_tokens: int  # per epoch, without padding

    @property
    def tokens_per_sample(self) -> float:
        """The mean number of tokens, without padding."""
        return self.num_tokens / self.num_samples

    def order(self, first: int, count: int) -> list[int]:
        """Return the samples at positions `first` to `first + count` of the random order. Epochs follow each other."""
        return list(order.endless(self.seed, first, count, self.num_samples))

    def batch(self, indices: Sequence[int]) -> Batch:
        for index in indices:
            if not 0 <= index < self.num_samples:
                raise IndexError(f"sample {index}: there are {self.num_samples}")
        samples = [self.windows.sample(_split(self.windows, self.seed, self.first + index)) for index in indices]
        positions = [positions for _, _, positions in samples if positions is not None]
        return Batch(
            torch.stack([tokens for tokens, _, _ in samples]),
            torch.stack([targets for _, targets, _ in samples]),
            torch.stack(positions) if positions else None,
        )


def open_samples(
    settings: Settings, tokenizer: Tokenizer, prepared: Prepared, seq_length: int, say: Say
) -> tuple[Samples, Samples | None]:
    """Open the samples for training and for evaluation: eval_file, else eval_fraction of all samples, else None."""
    is_isolated = settings.isolate_documents
    if is_isolated is None:
        is_isolated = prepared.train.facts["is_rows"]
    is_isolated = is_isolated and settings.packing == "packed"

    def opened(store: Store, what: str) -> Windows:
        windows = make_windows(store, seq_length, settings.packing, is_isolated, tokenizer.end_id)
        if windows.num_cut:
            say(
                f"{what}: {windows.num_cut:,} of {store.num_documents:,} documents are longer than seq_length "
                f"{seq_length} and are cut; the rest is not used"
            )
        return windows

    train = opened(prepared.train, "training data")
    if train.num_full == 0:
        raise ConfigurationError(
            f"seq_length {seq_length} is longer than the training data of {train.store.num_tokens} tokens; "
            "make it shorter, use more data, or use packing padded"
        )
    seed = settings.seed
    every = Samples(train, seed, 0, train.num_samples, train.num_tokens)
    if prepared.eval is not None:
        windows = opened(prepared.eval, "eval_file")
        if windows.num_samples == 0:
            raise ConfigurationError(f"eval_file {', '.join(settings.eval_file)}: one token is not enough for a sample")
        return every, Samples(windows, seed, 0, windows.num_samples, windows.num_tokens)
    if settings.eval_fraction == 0:
        return every, None
    num_eval = max(1, round(train.num_full * settings.eval_fraction))
    num_train = train.num_samples - num_eval
    if num_train == 0:
        raise ConfigurationError(
            f"eval_fraction {settings.eval_fraction:g} of {train.num_samples} samples leaves none to train on; "
            "make it 0, use more data, or make seq_length shorter"
        )
    num_tokens = num_eval * seq_length
    if train.has_padding:
        pieces = [train.pieces(_split(train, seed, at)) for at in range(num_eval)]
        num_tokens = sum(sum(count for _, count in sample) - 1 for sample in pieces)
    rest = Samples(train, seed, num_eval, num_train, train.num_tokens - num_tokens)
    return rest, Samples(train, seed, 0, num_eval, num_tokens)


def _split(windows: Windows, seed: int, position: int) -> int:
    """The window at a position of the split. A short last window stays at the end, among those for training."""
    if position >= windows.num_full:
        return position
    return order.permuted(position, windows.num_full, order.key("split", seed))


def unigram_entropy(samples: Samples) -> float:
    """Return the entropy of the token frequencies, in nats. A model with a lower loss makes use of the context.

    Computed from all tokens that are trained on, or from evenly spread stretches of large data.
    """
    store = samples.windows.store
    stride = _STRETCH * math.ceil(store.num_tokens / _ENTROPY_TOKENS)
    counts = torch.zeros(0, dtype=torch.int64)
    for first in range(0, store.num_tokens, stride):
        count = min(_STRETCH, store.num_tokens - first)
        tokens, trained = store.tokens(first, count), store.trained(first, count)
        found = torch.bincount(tokens if trained is None else tokens[trained], minlength=counts.numel())
        found[: counts.numel()] += counts
        counts = found
    chances = counts[counts > 0].double() / counts.sum()
    return float(-(chances * chances.log()).sum())
