"""The order of samples: a pure function of the seed and the position, without state.

An epoch visits every sample once. Its permutation is computed, not stored: a position is written as two digits
(left, right), and each round adds a hash of one digit to the other. Every round is invertible, whatever the hash is, so
different positions stay different (a Feistel network). The cost does not depend on the number of samples, a resume
computes its position directly, and the order does not depend on the version of any library.
"""

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from math import isqrt

_WORD = 2**64 - 1
_NUM_ROUNDS = 8  # small digits need several rounds until permutations look random


def endless(seed: int, first: int, num: int, count: int) -> Iterator[int]:
    """Yield `num` samples, from position `first` on. Epochs follow each other; each has all `count` samples."""
    for position in range(first, first + num):
        epoch, at = divmod(position, count)
        yield permuted(at, count, key(f"epoch {epoch}", seed))


@lru_cache(maxsize=64)
def key(purpose: str, seed: int) -> int:
    """Return the key of a permutation: a hash. With seed + epoch, epoch 1 of seed 0 would equal epoch 0 of seed 1."""
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
        # The two digits can also express a few numbers from `count` on. Such a result is permuted again.
        # The loop ends: a repeated permutation comes back to its start, which is below `count`.
        if at < count:
            return at


def _mixed(value: int, key: int) -> int:
    """The output function of splitmix64: every bit of the result depends on every bit of the input."""
    word = (value * 0x9E3779B97F4A7C15 + key) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
