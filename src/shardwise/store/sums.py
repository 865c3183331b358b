"""Checksums that cost little more than to read the memory: about a third of what zlib's CRC does.

The 8-byte words of a page are multiplied with fixed odd numbers and added, and so are the pages of a block, modulo
2**64. What differs in a single word always has another sum, because an odd number has an inverse. What a disk may
return instead (zeros, older bytes, those of another place) has the same one by a chance that is not worth a thought. It
is weakest where nothing but the highest bits of several words of a page differ; and it does not protect from deceit.
"""

from functools import cache

import torch
from torch import Tensor

from ..direct_io import ALIGNMENT

CHECK_BYTES = 1 << 20
_PAGE_BYTES, _WORD_BYTES = ALIGNMENT, 8


def sums_of(content: memoryview) -> list[int]:
    """One number for each `CHECK_BYTES` of some pages; the last block may be shorter."""
    # In few calls, each of which waits for the interpreter's lock; and none that uses torch's own threads, as each of
    # the disk's would bring a set of them.
    words = torch.frombuffer(content, dtype=torch.int64)
    pages = torch.mv(words.view(-1, _PAGE_BYTES // _WORD_BYTES), _factors(_PAGE_BYTES // _WORD_BYTES))
    per_block = CHECK_BYTES // _PAGE_BYTES
    num_whole = pages.numel() // per_block
    whole, rest = pages[: num_whole * per_block], pages[num_whole * per_block :]
    sums: list[int] = torch.mv(whole.view(num_whole, per_block), _factors(per_block)).tolist()
    return [*sums, int(torch.dot(rest, _factors(per_block)[: rest.numel()]))] if rest.numel() else sums


@cache
def _factors(num: int) -> Tensor:
    some = torch.Generator().manual_seed(num)
    return torch.randint(-(2**62), 2**62, (num,), generator=some) * 2 + 1
