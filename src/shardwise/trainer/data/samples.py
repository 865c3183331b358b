"""The samples of a run: the split into training and evaluation, their order, and batches.

A seeded random permutation of all samples begins with those for evaluation; the others are for training. It is
computed, not stored: everything is a function of settings and indices, so all ranks agree without communication.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
_COLUMNS = 64  # the width of a batch of pairs is a multiple of this
_STRETCH = 2**14  # consecutive tokens that are read at once


@dataclass(frozen=True, slots=True)
class Batch:
    tokens: Tensor  # (rows, seq_length) int64; rows are samples, or of pairs the chosen and the rejected answer in turn
    targets: Tensor  # the same shape; -100: not trained on
    positions: Tensor | None  # the same shape, from 0 in each document; None: documents are not isolated
    rows_per_sample: int = 1  # 2: preference pairs

    @property
    def num_targets(self) -> int:
        """The number of tokens to predict, or of pairs in which both answers have some."""
        is_target = self.targets != NOT_TRAINED
        return int((is_target if self.rows_per_sample == 1 else is_target.any(1).view(-1, 2).all(1)).sum())

    def trimmed(self) -> "Batch":
        """The batch of pairs without the columns at its end that only have padding."""
        if self.rows_per_sample == 1:
            return self
        used = int((self.targets != NOT_TRAINED).any(0).nonzero().amax() + 1) if self.num_targets else 1
        width = min(-(-used // _COLUMNS) * _COLUMNS, self.tokens.shape[1])
        return self._each(lambda tensor: tensor[:, :width].contiguous())

    def to(self, device: torch.device) -> "Batch":
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        """The batch in pinned memory, from which a GPU copies asynchronously."""
        return self._each(Tensor.pin_memory)

    def with_first_targets(self, num_samples: int) -> "Batch":
        """The batch with targets in its first `num_samples` samples only."""
        targets = self.targets.clone()
        targets[num_samples * self.rows_per_sample :] = NOT_TRAINED
        return replace(self, targets=targets)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        positions = None if self.positions is None else change(self.positions)
        return Batch(change(self.tokens), change(self.targets), positions, self.rows_per_sample)


@dataclass(frozen=True, slots=True)
class Source:
    """The windows of a source of data at positions `first` to `first + num_samples` of its split."""

    windows: Windows
    first: int
    num_samples: int
    num_tokens: int  # of all samples, without padding


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples for training or evaluation. Those of several sources are numbered one source after the other."""

    sources: tuple[Source, ...]
    seed: int
    draws: tuple[int, ...] = ()  # samples of each source in an epoch; () for one source: all

    @property
    def windows(self) -> Windows:
        """The windows of the first source. All have the same length, isolation and rows per sample."""
        return self.sources[0].windows

    @property
    def num_samples(self) -> int:
        return sum(source.num_samples for source in self.sources)

    @property
    def has_padding(self) -> bool:
        return any(source.windows.has_padding for source in self.sources)

    @property
    def passes(self) -> list[float]:
        """Passes over each source in an epoch."""
        draws = self.draws or (self.num_samples,)
        return [num / source.num_samples for num, source in zip(draws, self.sources, strict=True)]

    @property
    def num_tokens(self) -> int:
        """The number of tokens in an epoch, without padding."""
        parts = zip(self.passes, self.sources, strict=True)
        return round(sum(passes * source.num_tokens for passes, source in parts))

    @property
    def tokens_per_sample(self) -> float:
        """The mean number of tokens, without padding."""
        return self.num_tokens / self.num_samples

    @property
    def padding(self) -> float:
        """Part of all positions that is padding; 0 if only the last sample may have any."""
        num_positions = self.windows.seq_length * len(self.windows.rows(0))
        return 1 - self.tokens_per_sample / num_positions if self.has_padding else 0.0

    def order(self, first: int, count: int) -> list[int]:
        """Return the samples at positions `first` to `first + count` of the random order. Epochs follow each other."""
        if not self.draws:
            return list(order.endless(self.seed, first, count, self.num_samples))
        return list(order.mixed(self.seed, first, count, [source.num_samples for source in self.sources], self.draws))

    def spread(self, count: int) -> list[int]:
        """Return `count` different samples of all sources; of one source, the first ones, which are random."""
        if len(self.sources) == 1:
            return list(range(count))
        return [index * self.num_samples // count for index in range(count)]

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = []
        for index in indices:
            if not 0 <= index < self.num_samples:
                raise IndexError(f"sample {index}: there are {self.num_samples}")
            for source in self.sources:
                if index < source.num_samples:
                    break
                index -= source.num_samples
            at = _split(source.windows, self.seed, source.first + index)
            rows += [source.windows.sample(row) for row in source.windows.rows(at)]
        positions = [positions for _, _, positions in rows if positions is not None]
        return Batch(
            torch.stack([tokens for tokens, _, _ in rows]),
            torch.stack([targets for _, targets, _ in rows]),
            torch.stack(positions) if positions else None,
            len(rows) // len(indices),
        )


def open_samples(
    settings: Settings, tokenizer: Tokenizer, prepared: Prepared, seq_length: int, say: Say
) -> tuple[Samples, Samples | None]:
    """Open the samples for training and for evaluation: eval_file, else eval_fraction of all samples, else None."""
    is_pairs = prepared.train[0].facts["is_pairs"]
    packing = "padded" if is_pairs else settings.packing
    is_isolated = settings.isolate_documents
    if is_isolated is None:
        is_isolated = any(store.facts["is_rows"] for store in prepared.train)
    is_isolated = is_isolated and packing == "packed"

    def opened(store: Store, what: str) -> Windows:
        windows = make_windows(store, seq_length, packing, is_isolated, tokenizer.end_id)
        if windows.num_cut:
            say(
                f"{what}: {windows.num_cut:,} of {store.num_documents:,} documents are longer than seq_length "
                f"{seq_length} and are cut; the rest is not used"
            )
        return windows

    seed, fraction = settings.seed, 0 if settings.eval_file else settings.eval_fraction
    train, held_out = [], []
    for number, store in enumerate(prepared.train, 1):
        name = f"training data{f' of source {number}' if len(prepared.train) > 1 else ''}"
        windows = opened(store, name)
        if windows.num_full == 0:
            raise ConfigurationError(
                f"seq_length {seq_length} is longer than the {name} of {store.num_tokens} tokens; "
                "make it shorter, use more data, or use packing padded"
            )
        num_eval = max(1, round(windows.num_full * fraction)) if fraction else 0
        num_train = windows.num_samples - num_eval
        if num_train == 0:
            raise ConfigurationError(
                f"eval_fraction {fraction:g} of {windows.num_samples} samples leaves none to train on; "
                "make it 0, use more data, or make seq_length shorter"
            )
        num_tokens = num_eval * seq_length
        if windows.has_padding:
            rows = [row for at in range(num_eval) for row in windows.rows(_split(windows, seed, at))]
            num_tokens = sum(sum(count for _, count in windows.pieces(row)) - 1 for row in rows)
        train.append(Source(windows, num_eval, num_train, windows.num_tokens - num_tokens))
        held_out.append(Source(windows, 0, num_eval, num_tokens))
    draws: tuple[int, ...] = ()
    if len(train) > 1:
        draws = order.shares(settings.data_weights, sum(source.num_samples for source in train))
    samples = Samples(tuple(train), seed, draws)
    if prepared.eval is not None:
        windows = opened(prepared.eval, "eval_file")
        if windows.num_samples == 0:
            raise ConfigurationError(f"eval_file {', '.join(settings.eval_file)}: one token is not enough for a sample")
        return samples, Samples((Source(windows, 0, windows.num_samples, windows.num_tokens),), seed)
    return samples, Samples(
        tuple(held_out), seed, tuple(source.num_samples for source in held_out)
    ) if fraction else None


def _split(windows: Windows, seed: int, position: int) -> int:
    """The window at a position of the split. A short last window stays at the end, among those for training."""
    if position >= windows.num_full:
        return position
    return order.permuted(position, windows.num_full, order.key("split", seed))


def unigram_entropy(samples: Samples) -> float:
    """Return the entropy of the token frequencies, in nats. A model with a lower loss makes use of the context.

    Computed from all tokens that are trained on, or from evenly spread stretches of large data.
    """
    counts = torch.zeros(0, dtype=torch.float64)
    for source, passes in zip(samples.sources, samples.passes, strict=True):
        store = source.windows.store
        stride = _STRETCH * math.ceil(store.num_tokens / _ENTROPY_TOKENS)
        for first in range(0, store.num_tokens, stride):
            count = min(_STRETCH, store.num_tokens - first)
            tokens, trained = store.tokens(first, count), store.trained(first, count)
            found = torch.bincount(tokens if trained is None else tokens[trained], minlength=counts.numel()) * passes
            found[: counts.numel()] += counts
            counts = found
    chances = counts[counts > 0].double() / counts.sum()
    return float(-(chances * chances.log()).sum())
