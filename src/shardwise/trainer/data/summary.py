"""A summary of data as a training would use them: formats, lengths, what is cut or padded, and some samples."""

from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..settings import Settings
from .prepare import Say, prepare
from .token_store import Store
from .tokenizer import Tokenizer
from .windows import make_windows

QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class DataSummary:
    formats: dict[str, int]  # rows or files of each
    num_documents: int
    num_bad_rows: int
    bad_rows: list[str]  # the first ones, with their problems
    tokenizer: str
    num_tokens: int
    num_trained: int  # tokens that are trained on
    lengths: dict[str, int]  # tokens of a document, by quantile
    histogram: dict[int, int]  # documents with at most so many tokens, and more than the entry before
    seq_length: int
    num_cut: int  # documents that are longer than a sample and lose their end
    padding: dict[str, float]  # part of all positions, by packing
    samples: dict[str, list[tuple[str, bool]]]  # by title: texts of a document, and whether they are trained on


def summarise(settings: Settings, tokenizer: Tokenizer, seq_length: int, say: Say) -> DataSummary:
    with TemporaryDirectory(prefix="shardwise-data-") as folder:
        (store,) = prepare(replace(settings, data_weights=()), tokenizer, Path(folder), say).train
        facts: dict[str, Any] = store.facts
        lengths = torch.cat(list(store.document_lengths())).sort().values
        num_trained = sum(
            int(count if (mask := store.trained(first, count)) is None else mask.sum())
            for first in range(0, store.num_tokens, 2**22)
            for count in [min(2**22, store.num_tokens - first)]
        )
        bounds = [2**power for power in range(3, int(lengths[-1] - 1).bit_length() + 1)] or [8]
        below = [int((lengths <= bound).sum()) for bound in bounds]
        num_cut, padding = 0, {}
        for packing in ("packed", "padded"):
            if packing == "padded" or not facts["is_pairs"]:
                windows = make_windows(store, seq_length, packing, False, tokenizer.end_id)
                num_positions = windows.num_samples * len(windows.rows(0)) * seq_length
                padding[packing] = 1 - windows.num_tokens / max(num_positions, 1)
                num_cut = windows.num_cut if packing == "packed" or facts["is_pairs"] else num_cut
        last = store.num_documents - 1
        shown = sorted({0, last // 2, last} if not facts["is_pairs"] else {0, 1, last - 1, last})
        return DataSummary(
            formats=facts["formats"] or {"tokens": store.num_documents},
            num_documents=store.num_documents,
            num_bad_rows=facts["num_bad_rows"],
            bad_rows=facts["bad_rows"],
            tokenizer=tokenizer.name,
            num_tokens=store.num_tokens,
            num_trained=num_trained,
            lengths={f"{part:.0%}": int(lengths[round(part * (len(lengths) - 1))]) for part in QUANTILES},
            histogram={
                bound: num - before for bound, num, before in zip(bounds, below, [0, *below], strict=False) if num
            },
            seq_length=seq_length,
            num_cut=num_cut,
            padding=padding,
            samples=dict(_marked(store, index, tokenizer, seq_length) for index in shown),
        )


def _marked(store: Store, index: int, tokenizer: Tokenizer, most: int) -> tuple[str, list[tuple[str, bool]]]:
    """Return a document's title, and its texts as far as a sample has room for them."""
    first, length = store.document(index)
    count = min(length, most)
    tokens, mask = store.tokens(first, count).tolist(), store.trained(first, count)
    flags = [True] * count if mask is None else mask.tolist()
    runs = groupby(zip(tokens, flags, strict=True), key=lambda pair: pair[1])
    title = f"{index // 2 + 1}, {('chosen', 'rejected')[index % 2]}" if store.facts["is_pairs"] else f"{index + 1}"
    title += f", the first {count:,} of {length:,} tokens" * (count < length)
    return title, [(tokenizer.show([token for token, _ in run]), bool(trained)) for trained, run in runs]
