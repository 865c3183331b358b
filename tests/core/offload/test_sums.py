"""A checksum is of what is there: other bytes have another one, wherever they are."""

import random
from ctypes import CDLL
from tempfile import TemporaryFile

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.core.native.checked_io import CHECK_BYTES, checked_io, checksums

PAGE = 4096
BLOCK = random.Random(0).randbytes(CHECK_BYTES)
SUM = checksums(memoryview(bytearray(BLOCK)))


@settings(deadline=None)
@given(st.integers(0, CHECK_BYTES // 8 - 1), st.binary(min_size=8, max_size=8))
def test_any_other_word_is_seen(word: int, content: bytes) -> None:
    changed = bytearray(BLOCK)
    changed[8 * word : 8 * word + 8] = content
    assert (checksums(memoryview(changed)) == SUM) == (bytes(changed) == BLOCK)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, CHECK_BYTES // PAGE - 1), st.integers(0, CHECK_BYTES // PAGE - 1))
def test_pages_at_each_others_place_are_seen(one: int, other: int) -> None:
    changed = bytearray(BLOCK)
    changed[PAGE * one : PAGE * (one + 1)] = BLOCK[PAGE * other : PAGE * (other + 1)]
    changed[PAGE * other : PAGE * (other + 1)] = BLOCK[PAGE * one : PAGE * (one + 1)]
    assert (checksums(memoryview(changed)) == SUM) == (one == other)


def test_sectors_of_zeros_or_of_something_else_are_seen() -> None:
    for at in range(0, CHECK_BYTES, 16 * 512):
        for instead in (bytes(512), b"\xff" * 512, BLOCK[at - 512 : at] if at else BLOCK[-512:]):
            changed = bytearray(BLOCK)
            changed[at : at + 512] = instead
            assert checksums(memoryview(changed)) != SUM, f"sector at {at}"


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 3 * CHECK_BYTES // PAGE))
def test_blocks_have_the_same_sums_together_and_one_by_one(num_pages: int) -> None:
    content = bytearray(random.Random(num_pages).randbytes(PAGE * num_pages))
    with memoryview(content) as view:
        blocks = [view[at : at + CHECK_BYTES] for at in range(0, len(view), CHECK_BYTES)]
        assert checksums(view) == [one for block in blocks for one in checksums(block)]
        assert all(-(2**63) <= one < 2**63 for one in checksums(view))


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 3 * CHECK_BYTES // PAGE))
def test_c_has_the_same_sums(library: CDLL | None, num_pages: int) -> None:
    content = bytearray(random.Random(num_pages).randbytes(PAGE * num_pages))
    with TemporaryFile() as file, memoryview(content) as view:
        expected = checksums(view)
        assert checked_io(library)[0](file.fileno(), view, PAGE) == expected
        view[:] = bytes(len(view))
        assert checked_io(library)[1](file.fileno(), view, PAGE) == expected == checksums(view)
