"""Reads and writes of whole pages between memory and a file, with a checksum for each block of them.

They run in C where the library is available, else in Python; both give the same numbers. C needs half the processor
time, and takes the interpreter's lock once per call.

The checksum costs little more than reading the memory, about a third of zlib's CRC. The 8-byte words of a page are
multiplied by fixed odd numbers and added, and so are the pages of a block, modulo 2**64. A change in a single word
always changes the sum, because an odd number has an inverse. Wrong data from a disk (zeros, older bytes, bytes of
another place) is detected, except with negligible probability. The sum is weakest if only the highest bits of several
words of a page differ. It does not protect against deliberate changes.
"""

import ctypes
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ...base.errors import StoreError
from ...base.files import ALIGNMENT, read_at, write_at
from ...base.intervals import round_up
from .library import struct_fields

CHECK_BYTES = 1 << 20

# Arguments: a file descriptor, memory, and its offset in the file. Returns one checksum for every `CHECK_BYTES`.
Transfer = Callable[[int, memoryview, int], list[int]]


class _Factors(ctypes.Structure):
    _fields_ = struct_fields(c_void_p="of_words of_pages", c_int64="block_pages")


def checked_io(library: ctypes.CDLL | None) -> tuple[Transfer, Transfer]:
    """Return the function that writes and the one that reads."""
    if library is None:
        return _write, _read
    # Computed before threads need them: in two threads `cache` may compute a value twice and free one that C reads.
    factors()
    write, read = library.shardwise_write_blocks, library.shardwise_read_blocks
    write.restype = read.restype = ctypes.c_int64
    return partial(_run_in_c, write, _write), partial(_run_in_c, read, _read)


def _write(file: int, memory: memoryview, offset: int) -> list[int]:
    sums = checksums(memory)
    write_at(file, memory, offset)
    return sums


def _read(file: int, memory: memoryview, offset: int) -> list[int]:
    num = read_at(file, memory, offset)
    if num < len(memory):
        raise StoreError(f"the file ends {len(memory) - num} bytes before them: it was cut short")
    return checksums(memory)


def _run_in_c(function: Any, in_python: Transfer, file: int, memory: memoryview, offset: int) -> list[int]:
    of_words, of_pages = factors()
    struct = _Factors(of_words.data_ptr(), of_pages.data_ptr(), of_pages.numel())
    sums = (ctypes.c_int64 * (round_up(len(memory), CHECK_BYTES) // CHECK_BYTES))()
    num = function(
        ctypes.c_int32(file),
        ctypes.byref(ctypes.c_char.from_buffer(memory)),
        ctypes.c_int64(len(memory)),
        ctypes.c_int64(offset),
        ctypes.byref(struct),
        sums,
    )
    # If C fails, Python meets the same problem, and works around it or reports it.
    return list(sums) if num == len(memory) else in_python(file, memory, offset)


def checksums(content: memoryview) -> list[int]:
    """Return one number for each `CHECK_BYTES` of some pages; the last block may be shorter."""
    # Few calls, because each waits for the interpreter's lock; and none that uses torch's own threads, because each of
    # the disk's threads would start a set of them.
    of_words, of_pages = factors()
    words = torch.frombuffer(content, dtype=torch.int64)
    pages = torch.mv(words.view(-1, of_words.numel()), of_words)
    num_whole = pages.numel() // of_pages.numel() * of_pages.numel()
    whole, rest = pages[:num_whole], pages[num_whole:]
    sums: list[int] = torch.mv(whole.view(-1, of_pages.numel()), of_pages).tolist()
    return [*sums, int(torch.dot(rest, of_pages[: rest.numel()]))] if rest.numel() else sums


def factors() -> tuple[Tensor, Tensor]:
    """Return the odd factors of the checksum: one for each word of a page, and one for each page of a block."""
    return _factors(ALIGNMENT // 8), _factors(CHECK_BYTES // ALIGNMENT)


@cache
def _factors(num: int) -> Tensor:
    generator = torch.Generator().manual_seed(num)
    return torch.randint(-(2**62), 2**62, (num,), generator=generator) * 2 + 1
