"""The compiled codecs of a processor make the bytes and the numbers of the reference, bit for bit."""

import itertools
import math

import pytest
import torch

from shardwise.core.wire import reference_codecs as host
from shardwise.core.wire.codec import encoded_bytes, parse, parts
from shardwise.core.wire.reference_codecs import reference_decode_sum, reference_encode
from tests.gpu.test_codecs import DTYPES, assert_same, hard_values
from tests.support.codecs import decode, decode_sum, encode

SIZES = (1, 2, 63, 255, 256, 257, 2047, 4097, 300_001)
CODECS = [f"{kind}:{block}" for kind in ("int8", "int4") for block in (64, 256, 2048)]


def new_rows(name: str, num_rows: int, num_elems: int) -> torch.Tensor:
    return torch.full((num_rows, encoded_bytes(name, num_elems)), 0xA5, dtype=torch.uint8)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def _threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    monkeypatch.setattr(host, "LEAST_ELEMS", 256)


@pytest.mark.quick("one thread-int8:256-*", "two threads-int4:64-*", "two threads-int8:2048-dtype0")
@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CODECS)
def test_bytes_and_numbers_are_those_of_the_reference(name: str, dtype: torch.dtype) -> None:
    codec = parse(name)
    assert host.is_compiled(codec)
    for num_elems, num_rows in itertools.product(SIZES, (1, 3)):
        values = hard_values(num_elems * num_rows, dtype)
        seen, expected = new_rows(name, num_rows, num_elems), new_rows(name, num_rows, num_elems)
        encode(codec, values, seen)
        reference_encode(codec, values, expected, 0)
        assert seen.equal(expected), num_elems
        for out_dtype in (dtype, torch.float32):
            out, total = torch.empty(num_elems * num_rows, dtype=out_dtype), torch.empty(num_elems, dtype=out_dtype)
            decode(codec, seen, out)
            alone = [torch.empty(num_elems, dtype=out_dtype) for _ in range(num_rows)]
            for row, part in zip(seen, alone, strict=True):
                reference_decode_sum(codec, row[None], part)
            assert_same(out, torch.cat(alone))
            decode_sum(codec, seen, total)
            expected_total = torch.empty_like(total)
            reference_decode_sum(codec, seen, expected_total)
            assert_same(total, expected_total)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["int8:64", "int4:64"])
def test_scales_of_what_is_not_finite_are_those_of_the_reference(name: str, bad: float) -> None:
    codec, where = parse(name), parts(parse(name), 200)
    for dtype, at in itertools.product(DTYPES, (0, 63, 130, 199)):
        values = torch.randn(200).to(dtype)
        values[at] = bad
        seen, expected = new_rows(name, 1, 200), new_rows(name, 1, 200)
        encode(codec, values, seen)
        reference_encode(codec, values, expected, 0)
        assert_same(*(rows[:, where.scales_at :].view(torch.float32) for rows in (seen, expected)))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_smallest_and_the_largest_numbers(name: str) -> None:
    codec = parse(name)
    for size in (2.0**-149, 2.0**-140, 2.0**-127, 2.0**-126, 2.0**-120, 1.5e38):
        values = torch.randn(1000).clamp(-1, 1) * size
        seen, expected = new_rows(name, 1, 1000), new_rows(name, 1, 1000)
        encode(codec, values, seen)
        reference_encode(codec, values, expected, 0)
        assert seen.equal(expected), size


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_without_a_compiler_the_reference_does_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values, (seen, expected) = torch.randn(3000), (new_rows(name, 1, 3000) for _ in range(2))
    encode(parse(name), values, expected)
    monkeypatch.setattr(host, "library", lambda: None)
    encode(parse(name), values, seen)
    assert seen.equal(expected)
    out, total = torch.empty(3000), torch.empty(3000)
    decode(parse(name), seen, out)
    decode_sum(parse(name), seen, total)
    assert out.equal(total)
