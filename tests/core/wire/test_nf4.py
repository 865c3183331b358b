"""Frozen weights in 4 bits: the format of QLoRA, byte for byte, and the C code that decodes it."""

import pytest
import torch
from torch import Tensor

from shardwise.base.errors import ConfigurationError
from shardwise.core.native.library import library
from shardwise.core.wire.codec import codec_in, encoded_bytes, parse
from shardwise.core.wire.nf4 import decode, stored_parts, tables
from shardwise.core.wire.reference_codecs import decoder, encoded

NF4 = parse("nf4")
PAYLOAD, ABSMAX = "7acb953247bdc952237cdd942137ceda", [4, 252, 252, 0]
SCALES, OFFSET = [0.009250625967979431], [0.05701722949743271]
DECODED = [0.0, 0.011900020763278008, 0.021309200674295425, 0.016338875517249107]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weights(num_elems: int) -> Tensor:
    """Numbers that need no random generator, so that fixed values stay right on every version of torch."""
    at = torch.arange(num_elems, dtype=torch.float64)
    return (torch.sin(at * 0.7) * (1 + at % 97 / 40) * 0.02).float()


def test_bytes_of_bitsandbytes() -> None:
    """What bitsandbytes 0.50 makes of the same numbers (`quantize_4bit`, nf4, double quantisation)."""
    row = encoded(NF4, weights(256))
    parts = stored_parts(row, 256)
    assert bytes(parts.payload[:16].tolist()).hex() == PAYLOAD
    assert parts.absmax.tolist() == ABSMAX
    assert parts.scales.tolist() == pytest.approx(SCALES, rel=1e-6)
    assert parts.offset.tolist() == pytest.approx(OFFSET, rel=1e-6)
    out = torch.empty(256)
    decode(row, out)
    assert out[:4].tolist() == pytest.approx(DECODED, rel=1e-6)


def test_tables() -> None:
    codes, levels = tables(torch.device("cpu"))
    # Quantiles of the normal distribution at equal steps of probability, and their negatives with one step less.
    ends = torch.distributions.Normal(0.0, 1.0).icdf(torch.linspace(0.9677083, 0.5, 9))[:-1]
    below = -torch.distributions.Normal(0.0, 1.0).icdf(torch.linspace(0.9677083, 0.5, 8))[:-1]
    made = torch.cat([below, torch.zeros(1), ends]).sort().values / ends.max()
    torch.testing.assert_close(codes, made, rtol=0.0, atol=1e-6)
    assert len(levels) == 256
    assert levels[[0, 127, 128, 255]].tolist() == pytest.approx([-0.99296875, 0.0, 5.5e-7, 1.0], rel=1e-6)


@pytest.mark.parametrize("num_elems", [1, 63, 64, 16 * 1024, (1 << 20) + 77])
@pytest.mark.parametrize("dtype", DTYPES)
def test_c_code_decodes_the_same_bits(num_elems: int, dtype: torch.dtype) -> None:
    assert library() is not None
    row = encoded(NF4, weights(num_elems).to(dtype))
    assert row.numel() == encoded_bytes("nf4", num_elems)
    one, other = torch.empty(num_elems, dtype=dtype), torch.empty(num_elems, dtype=dtype)
    decode(row, one)
    decoder(NF4, row[None], other)()
    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    # The nearest of 16 values is at most 0.152 of the block's absmax away, which is itself rounded a little.
    values = weights(num_elems).to(dtype).float()
    assert (one.float() - values).abs().max() <= 0.16 * values.abs().max()


def test_bytes_per_weight() -> None:
    assert encoded_bytes("nf4", 8192 * 28672) / (8192 * 28672) < 0.5163


@pytest.mark.parametrize("word", ["nf4:64", "nf4:asymmetric"])
def test_nf4_has_no_options(word: str) -> None:
    with pytest.raises(ConfigurationError, match="no options"):
        parse(word)


def test_codec_in_a_name() -> None:
    assert codec_in("blocks.0.ffn.up.weight.nf4") == "nf4"
    assert codec_in("blocks.0.ffn.up.weight.int8:128:asymmetric") == "int8:128:asymmetric"
    assert codec_in("blocks.0.ffn.up.weight") is None


def test_against_bitsandbytes() -> None:
    library_of = pytest.importorskip("bitsandbytes.functional")
    values = torch.randn(128, 1024, generator=torch.Generator().manual_seed(0)) * 0.02
    packed, state = library_of.quantize_4bit(values, blocksize=64, compress_statistics=True, quant_type="nf4")
    row = encoded(NF4, values)
    parts = stored_parts(row, values.numel())
    assert torch.equal(parts.payload, packed.view(-1))
    assert torch.equal(parts.scales, state.state2.absmax)
    assert torch.equal(parts.offset[0], state.offset)
    # It looks for the nearest level in fewer bits on CPUs: where two are almost equally near, it may take the other.
    assert (parts.absmax != state.absmax).float().mean() < 0.01
    out = torch.empty(values.numel())
    decode(row, out)
    theirs = library_of.dequantize_4bit(packed, state).view(-1)
    assert (out - theirs).abs().max() < 0.01 * values.abs().max()
