"""Names and sizes of codecs."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.errors import ConfigurationError
from shardwise.core.wire.codec import ALIGN_BYTES, KINDS, Codec, encoded_bytes, parse, parts, seed_words

BLOCKS = (64, 128, 256, 512, 1024, 2048)
INTEGERS = ("int8", "int4")


@st.composite
def codecs(draw: st.DrawFn) -> Codec:
    kind = draw(st.sampled_from(KINDS))
    has_scales = kind in (*INTEGERS, "e4m3", "e5m2")
    options = st.booleans() if kind in INTEGERS else st.just(False)
    sides = st.booleans() if kind != "as_is" else st.just(False)
    block = draw(st.sampled_from(BLOCKS)) if has_scales else 256
    return Codec(kind, block, draw(options), draw(options), draw(sides), draw(sides))


@given(codecs())
def test_a_name_leads_to_its_codec_and_back(codec: Codec) -> None:
    assert parse(str(codec)) == codec


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("int8", Codec("int8")),
        ("int4:128", Codec("int4", 128)),
        ("int4:asymmetric", Codec("int4", is_asymmetric=True)),
        ("int8:512:asymmetric:stochastic", Codec("int8", 512, True, True)),
        ("int8:stochastic:512", Codec("int8", 512, is_stochastic=True)),
        ("e4m3:256", Codec("e4m3")),
        ("fp8", Codec("e4m3")),
        ("fp8:64", Codec("e4m3", 64)),
        ("as_is", Codec("as_is")),
        ("int4:feedback", Codec("int4", has_feedback=True)),
        ("int8:forward:64", Codec("int8", 64, is_forward_only=True)),
    ],
)
def test_names(name: str, codec: Codec) -> None:
    assert parse(name) == codec


def test_a_name_is_as_short_as_it_can_be() -> None:
    assert str(parse("int8:256")) == "int8"
    assert str(parse("int8:stochastic:512:asymmetric")) == "int8:512:asymmetric:stochastic"
    assert str(parse("fp8")) == "e4m3"
    assert str(parse("fp8:forward:64")) == "e4m3:64:forward"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("int9", "unknown kind 'int9'; did you mean 'int4'?|unknown kind 'int9'; did you mean 'int8'?"),
        ("", "unknown kind ''; known: .*bf16"),
        ("int8:100", "a block of 100 elements; it must be a power of two from 64 to 2048"),
        ("int8:32", "a block of 32 .* from 64 to 2048"),
        ("int8:4096", "a block of 4096 .* from 64 to 2048"),
        ("int8:0", "a block of 0 "),
        ("int8:64:128", "one block is enough"),
        ("int8:asymetric", "unknown option 'asymetric'; did you mean 'asymmetric'?"),
        ("int8:", "unknown option ''"),
        ("int8:-64", "unknown option '-64'"),
        ("int8:stochastic:stochastic", "each option once"),
        ("bf16:256", "'bf16:256': bf16 has no scales"),
        ("as_is:64", "as_is has no scales, so it has no blocks; leave out the block"),
        ("e4m3:asymmetric", "e4m3 cannot be asymmetric, only int8 and int4 can; leave it out"),
        ("bf16:stochastic", "bf16 cannot be stochastic"),
        ("int8:forwards", "unknown option 'forwards'; did you mean 'forward'?"),
        ("as_is:forward", "nothing is lost that is sent as it is; leave out 'forward'"),
        ("as_is:feedback", "nothing is lost that is sent as it is; leave out 'feedback'"),
    ],
)
def test_what_is_wrong_is_named(name: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        parse(name)


@pytest.mark.parametrize(
    ("name", "num_elems", "num_bytes"),
    [
        ("bf16", 1001, 2002),
        ("fp16", 3, 6),
        ("int8", 1024, 1024 + 16),
        ("fp8", 1024, 1024 + 16),
        ("int4", 1024, 512 + 16),
        ("int4", 1 << 20, (1 << 19) + (1 << 14)),
        ("int4:64", 1 << 20, (1 << 19) + (1 << 16)),
        ("int8:asymmetric", 1 << 20, (1 << 20) + 2 * (1 << 14)),
        ("int8:asymmetric:forward", 1 << 20, (1 << 20) + 2 * (1 << 14)),
        ("int8", 256, 256 + 16),  # one scale, and 12 bytes of padding
        ("int8", 257, 272 + 16),
        ("int4", 5, 16 + 16),
        ("int4:asymmetric", 5, 16 + 16 + 16),
        ("int4", 0, 0),
        ("bf16", 0, 0),
    ],
)
def test_sizes(name: str, num_elems: int, num_bytes: int) -> None:
    assert encoded_bytes(name, num_elems) == encoded_bytes(parse(name), num_elems) == num_bytes


def test_what_travels_as_it_is_has_the_size_of_its_dtype() -> None:
    assert [encoded_bytes("as_is", 7, dtype) for dtype in ("fp32", "bf16", "float16")] == [28, 14, 14]


@given(codecs().filter(lambda codec: codec.has_scales), st.integers(0, 1 << 40))
def test_parts_follow_each_other_and_hold_what_they_must(codec: Codec, num_elems: int) -> None:
    where = parts(codec, num_elems)
    assert where.payload_bytes == (-(-num_elems // 2) if codec.kind == "int4" else num_elems)
    assert where.num_blocks == -(-num_elems // codec.block)
    edges = (where.scales_at, where.minima_at, where.total_bytes)
    assert all(edge % ALIGN_BYTES == 0 for edge in edges)
    needed = (where.payload_bytes, 4 * where.num_blocks, 4 * where.num_blocks * codec.is_asymmetric)
    sizes = (where.scales_at, where.minima_at - where.scales_at, where.total_bytes - where.minima_at)
    assert all(0 <= size - need < ALIGN_BYTES for size, need in zip(sizes, needed, strict=True))


@given(st.integers(0, 1 << 30))
def test_words_of_seeds_are_far_apart(seed: int) -> None:
    """Neighbours differ in about half of the 64 bits; never in only a few."""
    words, others = seed_words(seed), seed_words(seed + 1)
    assert all(-(2**31) <= word < 2**31 for word in words)
    assert sum((word ^ other).bit_count() for word, other in zip(words, others, strict=True)) > 8


def test_sizes_are_known_without_torch() -> None:
    code = (
        "import sys; from shardwise.core.wire.codec import encoded_bytes; encoded_bytes('int8', 9);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
