"""Documents packed whole: which of them share a sample, by best fit.

The longest document is placed first. Each goes into the fullest sample that still has room for it, else into a new one.
Nothing but the lengths decides, so every rank computes the same packing, and a resume finds it again. Samples of the
same lengths are kept as one group: a million rows cost a sort, a few thousand groups, and 8 bytes a row.

A row that is longer than a sample is cut there, because the rest of its answer would be trained without its prompt.
Text goes on in another sample.
"""

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .token_store import Store


class _Part(NamedTuple):
    length: int
    first: int  # piece of the group's first sample; the pieces are sorted, so those of the others follow
    num: int  # pieces of each sample


class _Group(NamedTuple):
    """Samples of the same lengths."""

    parts: tuple[_Part, ...]
    num_samples: int

    def after(self, num: int) -> "_Group":
        """Without the first `num` samples."""
        parts = tuple(part._replace(first=part.first + num * part.num) for part in self.parts)
        return _Group(parts, self.num_samples - num)


@dataclass(frozen=True, slots=True)
class Whole:
    num_samples: int
    num_tokens: int  # that all samples read
    num_cut: int  # rows that are longer than a sample
    _pieces: Tensor  # where each starts in the store, the longest first
    _groups: list[_Group]
    _ends: list[int]  # of each group, in samples

    def pieces(self, index: int) -> list[tuple[int, int]]:
        """Where those of a sample start, and how many tokens each has."""
        group = bisect_right(self._ends, index)
        parts, num_samples = self._groups[group]
        at = index - (self._ends[group] - num_samples)
        return [
            (int(self._pieces[first + at * num + number]), length)
            for length, first, num in parts
            for number in range(num)
        ]


def pack_whole(store: Store, seq_length: int) -> Whole:
    room = seq_length + 1  # the last token of a sample is a target only
    lengths = torch.cat(list(store.document_lengths()))
    starts = lengths.cumsum(0) - lengths
    num_cut = 0
    more_starts, more_lengths = [], []
    for index in (lengths > room).nonzero().flatten().tolist():
        start, length = int(starts[index]), int(lengths[index])
        if store.is_all_trained(start, length):
            for first in range(seq_length, length - 1, seq_length):
                more_starts.append(start + first)
                more_lengths.append(min(room, length - first))
        else:
            num_cut += 1
    starts = torch.cat([starts, torch.tensor(more_starts, dtype=torch.int64)])
    lengths = torch.cat([lengths.clamp(max=room), torch.tensor(more_lengths, dtype=torch.int64)])
    order = lengths.argsort(descending=True, stable=True)
    found, counts = lengths.unique(return_counts=True)
    groups = _best_fit(list(zip(found.tolist(), counts.tolist(), strict=True))[::-1], room)
    ends = list(accumulate(group.num_samples for group in groups))
    return Whole(ends[-1], int(lengths.sum()) - ends[-1], num_cut, starts[order], groups, ends)


def _best_fit(lengths: list[tuple[int, int]], room: int) -> list[_Group]:
    """`lengths` are pairs of a length and how many pieces have it, the longest first."""
    rooms: list[int] = []  # that samples have left, ascending, each once
    groups: dict[int, list[_Group]] = {}  # by the room they have left

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
            # A sample that got one piece is now the fullest with room for the next: it is filled before any other.
            num = min(left // length, last - placed)
            num_filled = min(group.num_samples, (last - placed) // num)
            put(_Group((*group.parts, _Part(length, placed, num)), num_filled), left - num * length)
            placed += num_filled * num
            if group.parts and num_filled < group.num_samples:
                put(group.after(num_filled), left)
    return [group for left in rooms for group in groups[left]]
