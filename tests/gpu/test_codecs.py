"""On a GPU: the Triton kernels make the bytes and the numbers of the reference, bit for bit."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from shardwise.core.wire import nf4
from shardwise.core.wire.codec import Codec, encoded_bytes, parse, parts
from shardwise.core.wire.reference_codecs import decoder
from shardwise.core.wire.reference_codecs import encoded as encoded_row
from tests.support.codecs import decode, decode_sum, encode

pytestmark = pytest.mark.gpu

SCALED = (
    *(
        f"{kind}{options}"
        for kind in ("int8", "int4")
        for options in ("", ":asymmetric", ":stochastic", ":asymmetric:stochastic")
    ),
    "e4m3",
    "e5m2",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Below a block, odd, exactly a tile, just beside it, and enough for many programs.
SIZES = (1, 63, 255, 257, 2047, 2048, 4097, 65536, 1_000_003)
# Every kernel is compiled, so that not everything is tried with everything.
BLOCKS_AND_DTYPES = [(64, torch.bfloat16), (2048, torch.bfloat16), *((256, dtype) for dtype in DTYPES)]


def hard_values(num_elems: int, dtype: torch.dtype) -> Tensor:
    """Of very different sizes: tiny ones, zeros of both signs, constant blocks, ties; all finite."""
    generator = torch.Generator().manual_seed(num_elems)
    powers = torch.randint(-20, 12, (-(-num_elems // 64),), generator=generator).repeat_interleave(64)[:num_elems]
    values = torch.ldexp(torch.randn(num_elems, generator=generator), powers)
    kinds = torch.randint(0, 12, (-(-num_elems // 512),), generator=generator).repeat_interleave(512)[:num_elems]
    values = torch.where(kinds == 0, 0.0, values)
    values = torch.where(kinds == 1, -0.0, values)
    values = torch.where(kinds == 2, -3.3, values)
    values = torch.where(kinds == 3, values * 2.0**-126, values)
    values = torch.where(kinds == 4, (values * 4).round() / 2, values)
    values = torch.where(kinds == 5, values.abs() + 100.0, values)
    return values.to(dtype)


def encoded(codec: Codec, values: Tensor, seed: int = 0, num_rows: int = 1) -> Tensor:
    size = encoded_bytes(codec, values.numel() // num_rows, values.dtype)
    rows = torch.full((num_rows, size), 0xA5, dtype=torch.uint8, device=values.device)
    encode(codec, values, rows, seed)
    return rows


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Also the sign of a zero; NaNs may have other bits."""
    found = found.cpu()
    assert found.isnan().equal(expected.isnan())
    is_number = ~expected.isnan()
    assert found[is_number].equal(expected[is_number])
    assert found[is_number].signbit().equal(expected[is_number].signbit())


@pytest.mark.parametrize(("block", "dtype"), BLOCKS_AND_DTYPES)
@pytest.mark.parametrize("name", SCALED)
def test_bytes_and_numbers_are_those_of_the_reference(name: str, block: int, dtype: torch.dtype) -> None:
    codec = parse(f"{name}:{block}")
    for num_elems, num_rows in itertools.product(SIZES, (1, 3)):
        values = hard_values(num_elems * num_rows, dtype)
        rows = encoded(codec, values, num_elems, num_rows)
        assert encoded(codec, values.cuda(), num_elems, num_rows).cpu().equal(rows), num_elems
        for out_dtype in {dtype, torch.float32}:
            expected = torch.empty(num_elems * num_rows, dtype=out_dtype)
            out = expected.cuda()
            decode(codec, rows, expected)
            decode(codec, rows.cuda(), out)
            assert_same(out, expected)


@pytest.mark.parametrize("name", [*SCALED, "bf16", "fp16", "as_is"])
def test_sums_are_those_of_the_reference(name: str) -> None:
    codec = parse(name)
    for dtype, num_elems in ((torch.float32, 1001), (torch.bfloat16, 100_000)):
        for num_rows in (1, 2, 5, 8, 17):
            sent = dtype if name == "as_is" else torch.bfloat16
            values = [hard_values(num_elems, sent) * (row + 1) for row in range(num_rows)]
            rows = torch.cat([encoded(codec, one, row) for row, one in enumerate(values)])
            expected = torch.empty(num_elems, dtype=dtype)
            out = expected.cuda()
            decode_sum(codec, rows, expected)
            decode_sum(codec, rows.cuda(), out)
            assert_same(out, expected)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", SCALED)
def test_what_is_not_finite_makes_its_block_nan_and_no_other(name: str, bad: float) -> None:
    codec = parse(f"{name}:64")
    for dtype in DTYPES:
        for at in (0, 63, 130, 199):
            values = torch.randn(200).to(dtype)
            values[at] = bad
            data = encoded(codec, values.cuda(), seed=1)
            where = parts(codec, 200)
            # Codes of such a block mean nothing; all the others and the scales are the reference's.
            is_hit = torch.arange(200) // 64 == at // 64
            expected = torch.empty(200)
            decode(codec, encoded(codec, values, seed=1), expected)
            assert data.cpu()[:, where.scales_at :].equal(encoded(codec, values, seed=1)[:, where.scales_at :])
            out = torch.empty(200, device="cuda")
            decode(codec, data, out)
            assert_same(out, expected)
            assert out.isnan().cpu().equal(is_hit)


@pytest.mark.parametrize("name", SCALED)
def test_the_smallest_and_the_largest_numbers(name: str) -> None:
    codec = parse(name)
    for size in (2.0**-149, 2.0**-140, 2.0**-127, 2.0**-126, 2.0**-120, 1.5e38):
        values = torch.randn(1000).clamp(-1, 1) * size
        data = encoded(codec, values, seed=3)
        assert encoded(codec, values.cuda(), seed=3).cpu().equal(data), size
        expected = torch.empty(1000)
        out = expected.cuda()
        decode(codec, data, expected)
        decode(codec, data.cuda(), out)
        assert_same(out, expected)


def test_casts_are_those_of_the_reference() -> None:
    values = torch.cat([hard_values(5001, torch.float32), torch.tensor([math.inf, -math.inf, math.nan, 65520.0])])
    for name in ("bf16", "fp16", "as_is"):
        codec = parse(name)
        expected = torch.empty_like(values)
        decode(codec, encoded(codec, values), expected)
        out = torch.zeros_like(expected, device="cuda")
        decode(codec, encoded(codec, values.cuda()), out)
        assert_same(out, expected)


def test_a_buffer_beyond_the_indices_of_32_bits() -> None:
    """Its last elements, those around the border, and its first are what they are alone."""
    codec, num_elems, probe = parse("int4:stochastic"), 2**31 + (1 << 17), 1 << 16
    values = torch.zeros(num_elems, dtype=torch.bfloat16, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    begins = (0, 2**31 - probe // 2, num_elems - probe)
    for begin in begins:
        values[begin : begin + probe].normal_(generator=generator)
    data = encoded(codec, values, seed=9)
    out = torch.full_like(values, math.nan)
    decode(codec, data, out)
    del data
    for begin in begins:
        errors = (
            (out[begin : begin + probe].float() - values[begin : begin + probe].float()).view(-1, codec.block).abs()
        )
        steps = values[begin : begin + probe].float().view(-1, codec.block).abs().amax(1, keepdim=True) / codec.largest
        assert (errors <= steps * 1.01 + 0.01).all()
    assert not out[probe : 2**31 - probe].any()


def test_nothing_waits_for_the_device() -> None:
    """A graph is captured of them, which refuses all that waits."""
    values = torch.randn(4096, device="cuda")
    for name in (*SCALED, "bf16"):
        codec = parse(name)
        data = encoded(codec, values)
        out = torch.empty_like(values)
        decode(codec, data, out)
        decode_sum(codec, data, out)
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            encode(codec, values, data, seed=1)
            decode(codec, data, out)
            decode_sum(codec, data, out)


@pytest.mark.parametrize("num_elems", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nf4_is_decoded_to_the_same_bits(num_elems: int, dtype: torch.dtype) -> None:
    row = encoded_row(parse("nf4"), hard_values(num_elems, dtype))
    expected = torch.empty(num_elems, dtype=dtype)
    nf4.decode(row, expected)
    found = torch.empty(num_elems, dtype=dtype, device="cuda")
    decoder(parse("nf4"), row.cuda()[None], found)()
    assert_same(found, expected)
