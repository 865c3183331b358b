"""The order of samples: a pure function of the seed and the position, without state.

An epoch visits every sample once. Its permutation is computed, not stored: a position is written as two digits
(left, right), and each round adds a hash of one digit to the other. Such a round can be undone for any hash, so
different positions stay different (a Feistel network). Half a billion samples cost as little as ten, a resume needs no
search, and no version of any library changes the order.
"""

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from math import isqrt

_WORD = 2**64 - 1
_NUM_ROUNDS = 8  # small digits need several rounds until permutations look random


def endless(seed: int, first: int, num: int, count: int) -> Iterator[int]:
    """The samples at positions `first` to `first + num`, with epochs of `count` samples."""
    for position in range(first, first + num):
        epoch, at = divmod(position, count)
        yield permuted(at, count, key(f"epoch {epoch}", seed))


@lru_cache(maxsize=64)
def key(purpose: str, seed: int) -> int:
    """The key of a permutation. A hash: with seed + epoch, one seed's second epoch would be the next seed's first."""
    return int.from_bytes(hashlib.blake2b(f"{purpose} of {seed}".encode(), digest_size=8).digest(), "little")


def permuted(at: int, count: int, key: int) -> int:
    """Element `at` of the permutation of `range(count)` with this key."""
    left_base = isqrt(count - 1) + 1 if count > 1 else 1
    right_base = -(-count // left_base)
    while True:
        right, left = divmod(at, left_base)
        for number in range(0, _NUM_ROUNDS, 2):
            left = (left + _mixed(right, key + number)) % left_base
            right = (right + _mixed(left, key + number + 1)) % right_base
        at = right * left_base + left
        # The digits can also express a few numbers past the end. Applying the permutation again follows a cycle that
        # began with a number below `count`, so it reaches another one.
        if at < count:
            return at


def _mixed(value: int, key: int) -> int:
    """The output function of splitmix64: every bit of the result depends on every bit of the input."""
    word = (value * 0x9E3779B97F4A7C15 + key) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
