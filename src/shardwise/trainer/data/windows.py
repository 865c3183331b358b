"""A token store divided into samples of one length.

Packed: sample i is the window of seq_length + 1 tokens that starts at token i * seq_length; its tokens are all but the
last, its targets all but the first. So every token of the store except the first is a target once. If the last window
is short, it is padded. Packed whole, for rows with prompts or messages: a sample has several whole documents. Padded:
sample i is the beginning of document i. Padding is end tokens that are not trained on.

If documents are isolated, the positions of each start at 0, and its last token has no target: that would be the first
token of the next document. A padded sample has one document, so there is nothing to isolate.

Whole documents are packed by best fit: the longest piece first, each into the fullest sample with room for it. A piece
is a document. A row that is longer than a sample is cut, because the rest of its answer would be trained without its
prompt; longer plain text becomes several pieces. The lengths alone decide, so every rank computes the same packing.
Samples whose pieces have the same lengths form a group: a million rows cost a sort, a few thousand groups and 8 MB.
"""

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .token_store import Store

NOT_TRAINED = -100  # the target that torch's cross-entropy ignores


class _Part(NamedTuple):  # the pieces of one length in the samples of a group
    length: int
    first: int  # index in `_WholeDocuments.starts` of the first piece; the others follow, sample by sample
    num: int  # pieces per sample


class _Group(NamedTuple):
    """Samples whose pieces have the same lengths."""

    parts: tuple[_Part, ...]
    num_samples: int


class _WholeDocuments(NamedTuple):
    """Which documents share a sample."""

    starts: Tensor  # first token of each piece in the store; the longest piece first
    groups: list[_Group]
    ends: list[int]  # for each group, the index of the sample after its last one


@dataclass(frozen=True, slots=True)
class Windows:
    store: Store
    seq_length: int
    packing: Literal["packed", "padded"]
    is_isolated: bool
    end_id: int
    num_full: int  # samples (pairs are one), not counting a short last window; if `has_padding`, all samples
    num_samples: int
    num_tokens: int  # of all samples, without padding
    num_cut: int  # documents that are cut because they are longer than a sample
    whole: _WholeDocuments | None  # set if documents are packed whole

    @property
    def is_pairs(self) -> bool:
        """True for preference rows: a sample has two rows, with the chosen and with the rejected answer."""
        return bool(self.store.facts["is_pairs"])

    def rows(self, index: int) -> tuple[int, ...]:
        """Return the rows of a sample, for `pieces` and `sample`."""
        return (2 * index, 2 * index + 1) if self.is_pairs else (index,)

    @property
    def has_padding(self) -> bool:
        """True if any sample may have padding, not only the last."""
        return self.packing == "padded" or self.whole is not None

    def pieces(self, index: int) -> list[tuple[int, int]]:
        """Return (first token in the store, number of tokens) of each piece of a row, with the last target."""
        if self.whole is not None:
            starts, groups, ends = self.whole
            group = bisect_right(ends, index)
            at = index - (ends[group] - groups[group].num_samples)
            return [
                (int(starts[part.first + at * part.num + number]), part.length)
                for part in groups[group].parts
                for number in range(part.num)
            ]
        if self.packing == "padded":
            first, count = self.store.document(index)
        else:
            first = index * self.seq_length
            count = self.store.num_tokens - first
        return [(first, min(count, self.seq_length + 1))]

    def sample(self, index: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens, targets and, if documents are isolated, positions; each (seq_length) int64."""
        window = torch.full((self.seq_length + 1,), self.end_id)
        is_target = torch.zeros(self.seq_length + 1, dtype=torch.bool)
        starts = []  # positions in the window at which documents start
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
        # The padding is one more document, so that its positions are valid.
        begins = torch.tensor([at for at in (*starts, end) if at < self.seq_length])
        origins = torch.zeros(self.seq_length, dtype=torch.int64)
        origins[begins] = begins
        return window[:-1], targets, torch.arange(self.seq_length) - origins.cummax(0).values


def make_windows(
    store: Store, seq_length: int, packing: Literal["packed", "padded"], is_isolated: bool, end_id: int
) -> Windows:
    """Divide a store into samples. If it has rows with prompts or messages, "packed" packs whole documents."""
    whole, num_cut, num_tokens = None, 0, store.num_tokens - 1
    if packing == "padded":
        num_full, num_last, num_tokens = store.num_documents, 0, 0
        for lengths in store.document_lengths():
            num_tokens += int((lengths - 1).clamp(max=seq_length).sum())
            num_cut += int((lengths > seq_length + 1).sum())
    elif store.facts["is_rows"]:
        whole, num_tokens, num_cut = _pack_whole(store, seq_length)
        num_full, num_last = whole.ends[-1], 0
    else:
        num_full, num_last = divmod(num_tokens, seq_length)
    if store.facts["is_pairs"]:
        num_full //= 2
    num_samples = num_full + (num_last > 0)
    return Windows(store, seq_length, packing, is_isolated, end_id, num_full, num_samples, num_tokens, num_cut, whole)


def _pack_whole(store: Store, seq_length: int) -> tuple[_WholeDocuments, int, int]:
    """The packing, its number of tokens, and how many rows are cut because they are longer than a sample."""
    room = seq_length + 1  # the last token of a sample is only a target
    lengths = torch.cat(list(store.document_lengths()))
    starts = lengths.cumsum(0) - lengths
    num_cut = 0
    more_starts, more_lengths = [], []
    for index in (lengths > room).nonzero().flatten().tolist():
        start, length = int(starts[index]), int(lengths[index])
        trained = store.trained(start, length)
        if trained is None or bool(trained.all()):
            for first in range(seq_length, length - 1, seq_length):
                more_starts.append(start + first)
                more_lengths.append(min(room, length - first))
        else:
            num_cut += 1
    starts = torch.cat([starts, torch.tensor(more_starts, dtype=torch.int64)])
    lengths = torch.cat([lengths.clamp(max=room), torch.tensor(more_lengths, dtype=torch.int64)])
    order = lengths.argsort(descending=True, stable=True)
    distinct, counts = lengths.unique(return_counts=True)
    groups = _best_fit(list(zip(distinct.tolist(), counts.tolist(), strict=True))[::-1], room)
    ends = list(accumulate(group.num_samples for group in groups))
    return _WholeDocuments(starts[order], groups, ends), int(lengths.sum()) - ends[-1], num_cut


def _best_fit(lengths: list[tuple[int, int]], room: int) -> list[_Group]:
    """Pack pieces into samples. `lengths`: pairs of a length and the number of its pieces, the longest first."""
    rooms: list[int] = []  # free tokens of samples, ascending, without duplicates
    groups: dict[int, list[_Group]] = {}  # by free tokens

    def put(group: _Group, left: int) -> None:
        if left not in groups:
            groups[left] = []
            insort(rooms, left)
        groups[left].append(group)

    placed = 0
    for length, count in lengths:
        last = placed + count
        while placed < last:
            at = bisect_left(rooms, length)
            if at == len(rooms):
                group, left = _Group((), last - placed), room
            else:
                left = rooms[at]
                group = groups[left].pop()
                if not groups[left]:
                    del groups[left], rooms[at]
            # A sample that got a piece is now the fullest, so it gets as many of this length as fit.
            num = min(left // length, last - placed)
            num_filled = min(group.num_samples, (last - placed) // num)
            put(_Group((*group.parts, _Part(length, placed, num)), num_filled), left - num * length)
            placed += num_filled * num
            if group.parts and num_filled < group.num_samples:
                parts = tuple(part._replace(first=part.first + num_filled * part.num) for part in group.parts)
                put(_Group(parts, group.num_samples - num_filled), left)
    return [group for left in rooms for group in groups[left]]
