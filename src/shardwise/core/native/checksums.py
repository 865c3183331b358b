"""Checksums that cost little more than to read the memory: about a third of what zlib's CRC does.

The 8-byte words of a page are multiplied with fixed odd numbers and added, and so are the pages of a block, modulo
2**64. What differs in a single word always has another sum, because an odd number has an inverse. What a disk may
return instead (zeros, older bytes, those of another place) has the same one by a chance that is not worth a thought. It
is weakest where nothing but the highest bits of several words of a page differ; and it does not protect from deceit.
"""

from functools import cache

import torch
from torch import Tensor

from ...base.direct_io import ALIGNMENT

CHECK_BYTES = 1 << 20


def sums_of(content: memoryview) -> list[int]:
    """One number for each `CHECK_BYTES` of some pages; the last block may be shorter."""
    # In few calls, each of which waits for the interpreter's lock; and none that uses torch's own threads, as each of
    # the disk's would bring a set of them.
    words, of_words, of_pages = torch.frombuffer(content, dtype=torch.int64), factors_of_words(), factors_of_pages()
    pages = torch.mv(words.view(-1, of_words.numel()), of_words)
    num_whole = pages.numel() // of_pages.numel() * of_pages.numel()
    whole, rest = pages[:num_whole], pages[num_whole:]
    sums: list[int] = torch.mv(whole.view(-1, of_pages.numel()), of_pages).tolist()
    return [*sums, int(torch.dot(rest, of_pages[: rest.numel()]))] if rest.numel() else sums


def factors_of_words() -> Tensor:
    return _factors(ALIGNMENT // 8)


def factors_of_pages() -> Tensor:
    return _factors(CHECK_BYTES // ALIGNMENT)


@cache
def _factors(num: int) -> Tensor:
    some = torch.Generator().manual_seed(num)
    return torch.randint(-(2**62), 2**62, (num,), generator=some) * 2 + 1
