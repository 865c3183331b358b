"""What comes back: error bounds, zeros, tails, what is not finite, rounding at random, sums."""

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.base.errors import ConfigurationError
from shardwise.core import wire
from shardwise.core.wire import reference_codecs as quant
from shardwise.core.wire.codec import Codec, encoded_bytes, parse, parts, seed_words
from tests.support.codecs import decode, decode_sum, encode

INTEGERS = tuple(
    f"{kind}{options}"
    for kind in ("int8", "int4")
    for options in ("", ":asymmetric", ":stochastic", ":asymmetric:stochastic")
)
SCALED = (*INTEGERS, "e4m3", "e5m2")
ALL = (*SCALED, "bf16", "fp16", "as_is")
# Steps between neighbouring numbers, relative to the larger, halved; and for fp8 the half of the smallest, in scales.
RELATIVE = {"bf16": 2.0**-8, "fp16": 2.0**-11, "e4m3": 2.0**-4, "e5m2": 2.0**-3}
SUBNORMAL = {"e4m3": 2.0**-10, "e5m2": 2.0**-17}
FP32_EPS = 2.0**-23


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few thousand elements are several pieces, and the largest block is one."""
    monkeypatch.setattr(quant, "PIECE_ELEMS", 2048)


def encoded(codec: Codec, values: Tensor, seed: int = 0) -> Tensor:
    # What was there before must not matter.
    out = torch.full((encoded_bytes(codec, values.numel(), values.dtype),), 0xA5, dtype=torch.uint8)
    encode(codec, values, out[None], seed)
    return out


def decoded(codec: Codec, data: Tensor, num_elems: int, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((num_elems,), math.nan, dtype=dtype)
    decode(codec, data[None], out)
    return out


def round_trip(codec: Codec, values: Tensor, seed: int = 0) -> Tensor:
    return decoded(codec, encoded(codec, values, seed), values.numel())


def in_blocks(codec: Codec, values: Tensor) -> Tensor:
    """(num_blocks, block), the last block filled with its first element."""
    missing = -values.numel() % codec.block
    filling = values[values.numel() - (codec.block - missing)].expand(missing) if missing else values[:0]
    return torch.cat([values, filling]).view(-1, codec.block)


def steps(codec: Codec, values: Tensor) -> Tensor:
    """The scale of each element's block, in fp64."""
    blocks = in_blocks(codec, values.double())
    spread = blocks.amax(1) - blocks.amin(1) if codec.is_asymmetric else blocks.abs().amax(1)
    return (spread / codec.largest).repeat_interleave(codec.block)[: values.numel()]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any number of elements, of any dtype that is carried, of very different sizes from block to block."""
    num_elems = draw(st.one_of(st.integers(1, 600), st.sampled_from([1024, 2047, 2048, 2049, 5000])))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    powers = torch.randint(*draw(st.sampled_from([(-3, 3), (-24, 15), (-90, 90)])), (num_elems,), generator=generator)
    values = torch.randn(num_elems, generator=generator) + draw(st.sampled_from([0.0, 0.0, 3.0]))
    if draw(st.booleans()):
        powers = powers[:1]
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    found = torch.ldexp(values, powers).to(dtype)
    return torch.where(found.isfinite(), found, 1.0)


@st.composite
def scaled_codecs(draw: st.DrawFn) -> Codec:
    return parse(f"{draw(st.sampled_from(SCALED))}:{draw(st.sampled_from([64, 128, 256, 512, 1024, 2048]))}")


@settings(deadline=None)
@given(scaled_codecs(), tensors(), st.integers(0, 2**64 - 1))
def test_errors_are_bounded(codec: Codec, values: Tensor, seed: int) -> None:
    found, exact = round_trip(codec, values, seed).double(), values.double()
    step = steps(codec, values)
    # fp32's own roundings: of codes near the largest, and of what a minimum is added to.
    slack = FP32_EPS * (4 * codec.largest * step + 2 * exact.abs()) + 2.0**-126 * codec.largest
    if codec.is_integer:
        bound = step * (1.0 if codec.is_stochastic else 0.5)
    else:
        bound = torch.maximum(exact.abs() * RELATIVE[codec.kind], step * SUBNORMAL[codec.kind])
    assert ((found - exact).abs() <= bound + slack).all()


@settings(deadline=None)
@given(st.sampled_from(["bf16", "fp16"]), tensors())
def test_casts_are_torchs(kind: str, values: Tensor) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    found = round_trip(parse(kind), values)
    assert found.equal(values.to(dtype).float())
    exact = values.double()
    is_normal = (exact.abs() >= torch.finfo(dtype).smallest_normal) & (exact.abs() <= torch.finfo(dtype).max)
    assert ((found.double() - exact).abs() <= exact.abs() * RELATIVE[kind])[is_normal].all()


@settings(deadline=None)
@given(tensors())
def test_as_it_is_nothing_is_lost(values: Tensor) -> None:
    codec = parse("as_is")
    assert decoded(codec, encoded(codec, values), values.numel(), values.dtype).equal(values)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("num_elems", [1, 2, 63, 255, 256, 257, 1000, 4099])
def test_zeros_are_zeros(name: str, num_elems: int) -> None:
    for zero in (0.0, -0.0):
        assert round_trip(parse(name), torch.full((num_elems,), zero)).equal(torch.zeros(num_elems))


@pytest.mark.parametrize("name", SCALED)
def test_blocks_do_not_know_of_each_other(name: str) -> None:
    """A block decodes to the same beside others as alone, whatever their size."""
    codec = parse(f"{name}:64")
    values = torch.randn(64 * 5) * torch.tensor([1e-20, 0.0, 1.0, 1e20, 1e-3]).repeat_interleave(64)
    found = round_trip(codec, values)
    assert not found[64:128].any()
    if not codec.is_stochastic:
        alone = torch.cat([round_trip(codec, block) for block in values.split(64)])
        assert found.equal(alone)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 63, 130, 199])
def test_what_is_not_finite_makes_its_block_nan_and_no_other(name: str, bad: float, at: int) -> None:
    codec, values = parse(f"{name}:64"), torch.randn(200)
    spoilt = values.clone()
    spoilt[at] = bad
    found, clean = round_trip(codec, spoilt), round_trip(codec, values)
    is_hit = torch.arange(200) // 64 == at // 64
    assert found[is_hit].isnan().all()
    assert found[~is_hit].equal(clean[~is_hit])
    total = torch.empty(200)
    decode_sum(codec, torch.stack([encoded(codec, values), encoded(codec, spoilt)]), total)
    assert total[is_hit].isnan().all()
    assert total[~is_hit].isfinite().all()


def test_casts_keep_what_is_not_finite_and_fp16_overflows_to_inf() -> None:
    values = torch.tensor([math.inf, -math.inf, math.nan, 65504.0, 65520.0, -1e30])
    for name in ("bf16", "as_is"):
        found = round_trip(parse(name), values)
        assert found[:2].equal(values[:2])
        assert found[2].isnan()
        assert found[3:].isfinite().all()
    found = round_trip(parse("fp16"), values)
    assert found[[0, 1, 3, 4, 5]].tolist() == [math.inf, -math.inf, 65504.0, math.inf, -math.inf]
    assert found[2].isnan()


@pytest.mark.parametrize("name", SCALED)
def test_the_smallest_and_the_largest_numbers(name: str) -> None:
    codec = parse(name)
    for size in (2.0**-149, 2.0**-140, 2.0**-127, 2.0**-126):
        values = torch.randn(256).clamp(-1, 1) * size
        found = round_trip(codec, values)
        assert found.isfinite().all()
        assert ((found - values).abs() <= size * 2).all()
    values = torch.linspace(-1, 1, 256) * 1.5e38
    assert round_trip(codec, values).isfinite().all()
    # A range that fp32 cannot hold counts as not finite: NaN, and no number that is wrong.
    wide = torch.linspace(-1, 1, 256) * 3e38
    assert round_trip(codec, wide).isnan().all() == codec.is_asymmetric


@pytest.mark.parametrize("name", [name for name in INTEGERS if "asymmetric" in name])
def test_a_constant_block_is_exact_with_a_minimum(name: str) -> None:
    values = torch.full((300,), 0.1)
    assert round_trip(parse(name), values).equal(values)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("num_elems", [1, 2, 63, 65, 2047, 2049, 5001])
def test_padding_is_zero_and_scales_are_where_they_should_be(name: str, num_elems: int) -> None:
    codec, values = parse(f"{name}:64"), torch.randn(num_elems) + 1.0
    data, where = encoded(codec, values), parts(parse(f"{name}:64"), num_elems)
    assert data.numel() == where.total_bytes
    scales = data[where.scales_at : where.minima_at].view(torch.float32)
    assert not data[where.payload_bytes : where.scales_at].any()
    assert not scales[where.num_blocks :].any()
    torch.testing.assert_close(scales[: where.num_blocks].double(), steps(codec, values)[::64], rtol=1e-6, atol=0)
    if codec.is_asymmetric:
        minima = data[where.minima_at :].view(torch.float32)
        assert minima[: where.num_blocks].equal(in_blocks(codec, values).amin(1))
        assert not minima[where.num_blocks :].any()
    if codec.kind == "int4" and num_elems % 2:
        assert data[where.payload_bytes - 1] >> 4 == 0


def test_codes_of_int4_lie_two_in_a_byte_the_first_one_low() -> None:
    values = torch.tensor([7.0, -7.0, 1.0, 0.0, -3.0])
    assert encoded(parse("int4"), values)[:3].tolist() == [0x1F, 0x89, 0x05]
    values = torch.tensor([0.0, 15.0, 1.0, 2.0, 9.0])
    assert encoded(parse("int4:asymmetric"), values)[:3].tolist() == [0xF0, 0x21, 0x09]


def test_codes_of_int8() -> None:
    values = torch.tensor([127.0, -127.0, 1.0, 0.0, -3.0])
    assert encoded(parse("int8"), values)[:5].view(torch.int8).tolist() == [127, -127, 1, 0, -3]
    values = torch.tensor([-100.0, 155.0, 0.0])
    assert encoded(parse("int8:asymmetric"), values)[:3].tolist() == [0, 255, 100]


def test_ties_go_to_even() -> None:
    values = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    assert encoded(parse("int8"), values)[:7].view(torch.int8).tolist() == [127, 0, 2, 2, 0, -2, -2]


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_fp8_codes_are_torchs(kind: str) -> None:
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[kind]
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(dtype).float()
    codes = codes[values.isfinite()]
    data = torch.zeros(encoded_bytes(kind, len(codes)), dtype=torch.uint8)
    where = parts(parse(kind), len(codes))
    data[: len(codes)] = codes
    data[where.scales_at : where.scales_at + 4].view(torch.float32).fill_(0.75)
    assert decoded(parse(kind), data, len(codes)).equal(codes.view(dtype).float() * 0.75)


@pytest.mark.parametrize("name", [name for name in INTEGERS if "stochastic" in name])
def test_random_rounding_is_right_on_average_and_the_same_for_a_seed(name: str) -> None:
    codec, values = parse(f"{name}:64"), torch.randn(64 * 16)
    num_seeds = 2000
    rows = torch.stack([encoded(codec, values, seed) for seed in range(num_seeds)])
    assert rows[3].equal(encoded(codec, values, 3))
    assert not rows[3].equal(rows[4])
    found = torch.stack([decoded(codec, row, values.numel()) for row in rows]).double()
    step = steps(codec, values)
    # A rounded number is off by up to a step; the mean of many has a deviation of at most half a step over their root.
    errors = (found.mean(0) - values.double()) / (0.5 * step / math.sqrt(num_seeds))
    assert errors.abs().max() < 6
    assert abs(errors.mean()) < 6 / math.sqrt(values.numel())
    # Neighbours are rounded independently of each other, in one seed and from seed to seed.
    residuals = (found - values.double()) / step
    for one, other in ((residuals[:, 1:], residuals[:, :-1]), (residuals[1:], residuals[:-1])):
        assert abs((one * other).mean()) < 6 * 0.25 / math.sqrt(one.numel())


def hashed(index: int, seed: int) -> float:
    """What is added to an element before it is rounded: an odd multiple of 2^-17, from half of its pair's word."""
    low, high = (word % 2**32 for word in seed_words(seed))
    word = index // 2 ^ low
    word = ((word ^ word >> 16) * 0x7FEB352D % 2**32) ^ high
    word = (word ^ word >> 15) * 0x846CA68B % 2**32
    half = (word ^ word >> 16) >> 16 * (index % 2) & 0xFFFF
    return ((half ^ 0x8000) + 0.5) / 2**16 - 0.5


def test_what_is_added_before_rounding_is_the_hash() -> None:
    """By its definition, in unbounded integers: with a scale of 1, the first value that is rounded up tells it."""
    codec, seed = parse("int8:64:stochastic"), 12345
    added = torch.tensor([hashed(index, seed) for index in range(5000)], dtype=torch.float64)
    for rounded, more in ((0, 0.0), (1, 2.0**-17)):
        values = 0.5 - added + more  # a tie goes to zero, which is even
        values[::64] = 127.0  # the absmax of a block stays
        codes = encoded(codec, values.float(), seed)[:5000].view(torch.int8)
        assert (codes == torch.where(values == 127.0, 127, rounded)).all()


def test_pieces_round_as_the_whole_would(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, values = parse("int8:64:stochastic"), torch.randn(10000)
    in_pieces = encoded(codec, values, 5)
    monkeypatch.setattr(quant, "PIECE_ELEMS", 1 << 20)
    assert encoded(codec, values, 5).equal(in_pieces)


@settings(deadline=None)
@given(st.sampled_from(ALL), st.integers(1, 5), tensors(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_sum_is_the_sum_of_what_is_decoded_bit_for_bit(
    name: str, num_rows: int, values: Tensor, dtype: torch.dtype
) -> None:
    codec, num_elems = parse(name), values.numel()
    sent = dtype if name == "as_is" else torch.float32
    rows = [
        encoded(codec, (values.float() * (index + 1)).clamp(-1e37, 1e37).to(sent), index) for index in range(num_rows)
    ]
    expected = torch.zeros(num_elems)
    for index, row in enumerate(rows):
        one = decoded(codec, row, num_elems, sent).float()
        expected = one if index == 0 else expected + one
    out = torch.full((num_elems,), math.nan, dtype=dtype)
    decode_sum(codec, torch.stack(rows), out)
    assert torch.equal(out.nan_to_num(nan=7.0), expected.to(dtype).nan_to_num(nan=7.0))


@pytest.mark.parametrize("num_elems", [1, 999, 1024, 5001])
@pytest.mark.parametrize("name", [name for name in ALL if "stochastic" not in name])
def test_equal_parts_are_encoded_and_decoded_each_by_itself(name: str, num_elems: int) -> None:
    codec, parts_of = parse(name), torch.randn(3, num_elems)
    rows = torch.full((3, encoded_bytes(codec, num_elems, torch.float32)), 0xA5, dtype=torch.uint8)
    encode(codec, parts_of.view(-1), rows)
    assert rows.equal(torch.stack([encoded(codec, part) for part in parts_of]))
    out = torch.full((3 * num_elems,), math.nan)
    decode(codec, rows, out)
    assert out.equal(torch.cat([round_trip(codec, part) for part in parts_of]))


@pytest.mark.parametrize("name", [name for name in ALL if "stochastic" in name])
def test_equal_parts_are_rounded_by_different_lots(name: str) -> None:
    codec, part = parse(name), torch.randn(2048)
    rows = torch.empty(2, encoded_bytes(codec, 2048), dtype=torch.uint8)
    encode(codec, part.repeat(2), rows, seed=5)
    assert rows[0].equal(encoded(codec, part, seed=5))
    first, second = (decoded(codec, row, 2048) - part for row in rows)
    # Errors of the same values, each right on average, that have nothing to do with each other.
    assert (first @ second / (first.norm() * second.norm())).abs() < 0.1


def test_no_graph_is_made_of_values_that_want_gradients() -> None:
    codec, values = parse("int8"), torch.randn(300, requires_grad=True)
    data = encoded(codec, values)
    decode(codec, data[None], values)
    assert values.requires_grad
    assert values.is_leaf


@pytest.mark.parametrize("name", ALL)
def test_of_nothing_nothing_is_made(name: str) -> None:
    nothing = torch.empty(0)
    data = encoded(parse(name), nothing)
    assert data.numel() == 0
    decode(parse(name), data[None], nothing)
    decode_sum(parse(name), data.view(1, 0), nothing)


@pytest.mark.parametrize("name", SCALED)
def test_rows_may_be_part_of_a_larger_buffer(name: str) -> None:
    codec, values = parse(name), torch.randn(2, 1000)
    size = encoded_bytes(codec, 1000)
    buffer = torch.zeros(3 * size, dtype=torch.uint8)
    encode(codec, values.view(-1), buffer.view(3, size)[1:])
    out = torch.empty(1000)
    decode_sum(codec, buffer.view(3, size)[1:], out)
    alone = [decoded(codec, row, 1000) for row in buffer.view(3, size)[1:]]
    assert out.equal(alone[0] + alone[1])
    if "stochastic" not in name:
        assert alone[1].equal(round_trip(codec, values[1]))


def test_what_cannot_be_is_refused() -> None:
    codec = parse("int8")
    data = torch.zeros(1, encoded_bytes(codec, 256) + 16, dtype=torch.uint8)
    right = data[:, :-16]
    with pytest.raises(ConfigurationError, match=r"values of torch.int64 .* a dtype among torch.float32"):
        encode(codec, torch.zeros(256, dtype=torch.int64), right)
    with pytest.raises(ConfigurationError, match=r"int8: out of torch.float64"):
        decode(codec, right, torch.zeros(256, dtype=torch.float64))
    with pytest.raises(ConfigurationError, match=r"shape \(16, 16\) .* flat and contiguous"):
        encode(codec, torch.zeros(16, 16), right)
    with pytest.raises(ConfigurationError, match=r"shape \(256,\) and strides \(2,\) do not fit"):
        encode(codec, torch.zeros(512)[::2], right)
    with pytest.raises(ConfigurationError, match=r"shape \(1, 288\) .* of shape \(num_rows, 272\)"):
        encode(codec, torch.zeros(256), data)
    with pytest.raises(ConfigurationError, match=r"rows of torch.int8"):
        decode(codec, right.view(torch.int8), torch.zeros(256))
    with pytest.raises(ConfigurationError, match=r"begin at byte 8 of their storage.* at a multiple of 16 bytes"):
        encode(codec, torch.zeros(256), data[:, 8:-8])
    with pytest.raises(ConfigurationError, match=r"shape \(257,\) .* shape \(2, 272\).* in equal parts"):
        encode(codec, torch.zeros(257), torch.zeros(2, 272, dtype=torch.uint8))
    for rows, shape in ((right[0], r"\(272,\)"), (right[:0], r"\(0, 272\)")):
        with pytest.raises(ConfigurationError, match=rf"rows of .* with shape {shape}"):
            decode(codec, rows, torch.zeros(256))
        with pytest.raises(ConfigurationError, match=rf"rows of .* with shape {shape} .*\(num_rows, 272\)"):
            decode_sum(codec, rows, torch.zeros(256))
    with pytest.raises(ConfigurationError, match=r"strides \(280, 1\)"):
        decode_sum(codec, torch.zeros(600, dtype=torch.uint8).as_strided((2, 272), (280, 1)), torch.zeros(256))
    with pytest.raises(ConfigurationError, match=r"on cpu .* on meta .* on the same device"):
        encode(codec, torch.zeros(256), right.to("meta"))


def test_a_device_whose_kernels_cannot_be_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "shardwise.core.wire.triton_codecs", raising=False)
    monkeypatch.delattr(wire, "kernels", raising=False)
    with pytest.raises(ConfigurationError, match=r"triton cannot be imported .* install the triton"):
        quant._kernels()
