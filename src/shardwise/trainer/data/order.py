"""The order of samples: a pure function of the seed and the position, without state.

An epoch visits every sample once. Its permutation is computed, not stored: a position is written as two digits
(left, right), and each round adds a hash of one digit to the other. Every round is invertible, whatever the hash is, so
different positions stay different (a Feistel network). The cost does not depend on the number of samples, a resume
computes its position directly, and the order does not depend on the version of any library.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

_WORD = 2**64 - 1
_NUM_ROUNDS = 8  # small digits need several rounds until permutations look random


def endless(seed: int, first: int, num: int, count: int) -> Iterator[int]:
    """Yield `num` samples, from position `first` on. Epochs follow each other; each has all `count` samples."""
    for position in range(first, first + num):
        epoch, at = divmod(position, count)
        yield permuted(at, count, key(f"epoch {epoch}", seed))


def mixed(seed: int, first: int, num: int, counts: Sequence[int], draws: Sequence[int]) -> Iterator[int]:
    """Yield `num` samples of several sources, numbered one source after the other, from position `first` on.

    An epoch has `draws` of each source, in random order. A source continues in the next epoch where it stopped, and
    begins again, in another order, when all of its `counts` samples were there.
    """
    for position in range(first, first + num):
        epoch, at = divmod(position, sum(draws))
        at = permuted(at, sum(draws), key(f"epoch {epoch}", seed))
        source = 0
        while at >= draws[source]:
            at -= draws[source]
            source += 1
        (sample,) = endless(seed, epoch * draws[source] + at, 1, counts[source])
        yield sum(counts[:source]) + sample


def shares(weights: Sequence[float], total: int) -> tuple[int, ...]:
    """Divide a number of samples by weights: the sum is exact, and each share is off by less than one."""
    exact = [weight * total / sum(weights) for weight in weights]
    largest = sorted(range(len(exact)), key=lambda index: math.floor(exact[index]) - exact[index])
    missing = total - sum(map(math.floor, exact))
    return tuple(math.floor(share) + (index in largest[:missing]) for index, share in enumerate(exact))


@lru_cache(maxsize=64)
def key(purpose: str, seed: int) -> int:
    """Return the key of a permutation: a hash. With seed + epoch, epoch 1 of seed 0 would equal epoch 0 of seed 1."""
    return int.from_bytes(hashlib.blake2b(f"{purpose} of {seed}".encode(), digest_size=8).digest(), "little")


def permuted(at: int, count: int, key: int) -> int:
    """Element `at` of the permutation of `range(count)` with this key."""
    left_base = math.isqrt(count - 1) + 1 if count > 1 else 1
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
