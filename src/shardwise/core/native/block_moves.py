"""Pages between memory and a file, with the checksums of their blocks: in Python, or in C where its library is at hand.

Both give the same numbers. C needs half the processor's time for them, and asks for the interpreter's lock once a call.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...base.direct_io import ALIGNMENT, read_at, write_at
from ...base.errors import StoreError
from ...base.intervals import round_up
from .checksums import CHECK_BYTES, factors_of_pages, factors_of_words, sums_of

Move = Callable[[int, memoryview, int], list[int]]


@dataclass(frozen=True, slots=True)
class Moves:
    """Of a file, memory and the memory's place in the file; each returns one checksum for every `CHECK_BYTES`."""

    write: Move
    read: Move


def moves(library: ctypes.CDLL | None) -> Moves:
    if library is None:
        return Moves(_write, _read)
    # Before threads ask for them: of two that are made at once only one is kept, and C may have the other's address.
    factors_of_words(), factors_of_pages()
    write, read = library.shardwise_write_blocks, library.shardwise_read_blocks
    write.restype = read.restype = ctypes.c_int64
    return Moves(partial(_in_c, write, _write), partial(_in_c, read, _read))


def _write(file: int, memory: memoryview, offset: int) -> list[int]:
    sums = sums_of(memory)
    write_at(file, memory, offset)
    return sums


def _read(file: int, memory: memoryview, offset: int) -> list[int]:
    num = read_at(file, memory, offset)
    if num < len(memory):
        raise StoreError(f"the file ends {len(memory) - num} bytes before them: it was cut short")
    return sums_of(memory)


class _Factors(ctypes.Structure):
    _fields_ = (("of_words", ctypes.c_void_p), ("of_pages", ctypes.c_void_p), ("block_pages", ctypes.c_int64))


def _in_c(function: Any, in_python: Move, file: int, memory: memoryview, offset: int) -> list[int]:
    factors = _Factors(factors_of_words().data_ptr(), factors_of_pages().data_ptr(), CHECK_BYTES // ALIGNMENT)
    sums = (ctypes.c_int64 * (round_up(len(memory), CHECK_BYTES) // CHECK_BYTES))()
    num = function(
        ctypes.c_int32(file),
        ctypes.byref(ctypes.c_char.from_buffer(memory)),
        ctypes.c_int64(len(memory)),
        ctypes.c_int64(offset),
        ctypes.byref(factors),
        sums,
    )
    # Whatever was in the way, Python's way meets it too, and goes around it or says what it is.
    return list(sums) if num == len(memory) else in_python(file, memory, offset)
