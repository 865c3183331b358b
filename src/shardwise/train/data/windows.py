"""A token store cut into samples of one length.

Packed: sample i is the window of seq_length + 1 tokens from token i * seq_length on; its tokens are all but the last,
its targets all but the first. So every token but the store's first is a target once. The last window may be short, and
is padded. Padded: sample i is the beginning of document i. Padding is end tokens that are not trained on.

Isolated documents have positions that start again with each of them, and the last token of one has no target, which
would be the first token of the next. A padded sample has one document, so there is nothing to isolate it from.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .store import Store

NOT_TRAINED = -100  # what torch's cross-entropy ignores


@dataclass(frozen=True, slots=True)
class Windows:
    store: Store
    seq_length: int
    packing: Literal["packed", "padded"]
    is_isolated: bool
    end_id: int

    @property
    def num_full(self) -> int:
        """All samples but a short last window; padded samples all count as full."""
        if self.packing == "padded":
            return self.store.num_documents
        return (self.store.num_tokens - 1) // self.seq_length

    @property
    def num_last(self) -> int:
        """Tokens of the short last window, 0 if there is none."""
        return 0 if self.packing == "padded" else (self.store.num_tokens - 1) % self.seq_length

    @property
    def num_samples(self) -> int:
        return self.num_full + (self.num_last > 0)

    @property
    def num_tokens(self) -> int:
        """That all samples read, without padding."""
        if self.packing == "packed":
            return self.store.num_tokens - 1
        return sum(int((lengths - 1).clamp(max=self.seq_length).sum()) for lengths in self.store.document_lengths())

    @property
    def num_cut(self) -> int:
        """Documents that are longer than a sample; packed ones go on in the next."""
        if self.packing == "packed":
            return 0
        return sum(int((lengths > self.seq_length + 1).sum()) for lengths in self.store.document_lengths())

    def where(self, index: int) -> tuple[int, int]:
        """The first token of a sample, and how many it has with its last target: at most seq_length + 1."""
        if self.packing == "padded":
            first, count = self.store.document(index)
        else:
            first = index * self.seq_length
            count = self.store.num_tokens - first
        return first, min(count, self.seq_length + 1)

    def sample(self, index: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens, targets and, where documents are isolated, positions; each (seq_length) int64."""
        first, count = self.where(index)
        window = torch.full((self.seq_length + 1,), self.end_id)
        window[:count] = self.store.tokens(first, count)
        targets = window[1:].clone()
        targets[count - 1 :] = NOT_TRAINED
        trained = self.store.trained(first, count)
        if trained is not None:
            targets[: count - 1][~trained[1:]] = NOT_TRAINED
        if not self.is_isolated:
            return window[:-1], targets, None
        # The padding is one more document, so that its positions stay those of a document.
        starts = torch.tensor([*(at - first for at in self.store.starts_within(first, count)), count])
        targets[starts[starts <= self.seq_length] - 1] = NOT_TRAINED
        return window[:-1], targets, _positions(starts[starts < self.seq_length], self.seq_length)


def _positions(starts: Tensor, seq_length: int) -> Tensor:
    """From 0 again at each of `starts`."""
    origins = torch.zeros(seq_length, dtype=torch.int64)
    origins[starts] = starts
    return torch.arange(seq_length) - origins.cummax(0).values
