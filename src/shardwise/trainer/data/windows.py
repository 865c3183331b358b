"""A token store cut into samples of one length.

Packed: sample i is the window of seq_length + 1 tokens from token i * seq_length on; its tokens are all but the last,
its targets all but the first. So every token but the store's first is a target once. The last window may be short, and
is padded. Packed whole, for rows with prompts or messages: the documents of a sample are those that `whole.py` put
there, end to end. Padded: sample i is the beginning of document i. Padding is end tokens that are not trained on.

Isolated documents have positions that start again with each of them, and the last token of one has no target, which
would be the first token of the next. A padded sample has one document, so there is nothing to isolate it from.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .token_store import Store
from .whole_documents import Whole

NOT_TRAINED = -100  # what torch's cross-entropy ignores


@dataclass(frozen=True, slots=True)
class Windows:
    store: Store
    seq_length: int
    packing: Literal["packed", "padded"]
    is_isolated: bool
    end_id: int
    whole: Whole | None = None  # where documents are packed whole

    @property
    def has_padding(self) -> bool:
        """In any sample, not in the last alone."""
        return self.packing == "padded" or self.whole is not None

    @property
    def num_full(self) -> int:
        """All samples but a short last window; samples that have padding all count as full."""
        if self.whole is not None:
            return self.whole.num_samples
        if self.packing == "padded":
            return self.store.num_documents
        return (self.store.num_tokens - 1) // self.seq_length

    @property
    def num_last(self) -> int:
        """Tokens of the short last window, 0 if there is none."""
        return 0 if self.has_padding else (self.store.num_tokens - 1) % self.seq_length

    @property
    def num_samples(self) -> int:
        return self.num_full + (self.num_last > 0)

    @property
    def num_tokens(self) -> int:
        """That all samples read, without padding."""
        if self.whole is not None:
            return self.whole.num_tokens
        if self.packing == "packed":
            return self.store.num_tokens - 1
        return sum(int((lengths - 1).clamp(max=self.seq_length).sum()) for lengths in self.store.document_lengths())

    @property
    def num_cut(self) -> int:
        """Documents of which only the beginning is read, because they are longer than a sample."""
        if self.whole is not None:
            return self.whole.num_cut
        if self.packing == "packed":
            return 0
        return sum(int((lengths > self.seq_length + 1).sum()) for lengths in self.store.document_lengths())

    def pieces(self, index: int) -> list[tuple[int, int]]:
        """Of a sample: where each starts in the store, and its tokens; with the last target at most seq_length + 1."""
        if self.whole is not None:
            return self.whole.pieces(index)
        if self.packing == "padded":
            first, count = self.store.document(index)
        else:
            first = index * self.seq_length
            count = self.store.num_tokens - first
        return [(first, min(count, self.seq_length + 1))]

    def num_tokens_of(self, index: int) -> int:
        """That a sample reads, without padding."""
        return sum(count for _, count in self.pieces(index)) - 1

    def sample(self, index: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens, targets and, where documents are isolated, positions; each (seq_length) int64."""
        window = torch.full((self.seq_length + 1,), self.end_id)
        is_target = torch.zeros(self.seq_length + 1, dtype=torch.bool)
        starts = []  # of documents
        end = 0
        for first, count in self.pieces(index):
            starts += [end, *(end + at - first for at in self.store.starts_within(first, count))]
            window[end : end + count] = self.store.tokens(first, count)
            trained = self.store.trained(first, count)
            is_target[end : end + count] = True if trained is None else trained
            end += count
        if self.is_isolated:
            is_target[starts] = False
        targets = torch.where(is_target, window, NOT_TRAINED)[1:]
        if not self.is_isolated:
            return window[:-1], targets, None
        # The padding is one more document, so that its positions stay those of a document.
        begins = torch.tensor([at for at in (*starts, end) if at < self.seq_length])
        return window[:-1], targets, _positions(begins, self.seq_length)


def _positions(starts: Tensor, seq_length: int) -> Tensor:
    """From 0 again at each of `starts`."""
    origins = torch.zeros(seq_length, dtype=torch.int64)
    origins[starts] = starts
    return torch.arange(seq_length) - origins.cummax(0).values
