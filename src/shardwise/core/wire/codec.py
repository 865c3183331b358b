"""Codecs for collectives and frozen weights in fewer bits: their names, and the size and layout of encoded buffers.

    kind[:block][:asymmetric][:stochastic][:feedback][:forward]     int8, int4:128, int8:512:asymmetric, e4m3:64:forward

A buffer of encoded elements has up to three parts: the payload; one fp32 scale for each block of elements; and for an
asymmetric codec one fp32 minimum for each block. Every part starts, and the buffer ends, at a multiple of 16 bytes.
So parts of buffers that follow each other can be viewed in their dtype and read with the widest loads. The padding is
zero. Kinds without scales have only a payload. `nf4` is for frozen weights (`nf4.py`): the payload; one byte for the
absmax of each block; then one fp32 scale for 256 of these bytes, and one fp32 offset of them all.

`reference_codecs.py` encodes and decodes; this file has what planning needs, without torch.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import Any, Literal, get_args

from ...base.dtypes import DTypeLike, dtype_of
from ...base.errors import ConfigurationError, did_you_mean
from ...base.intervals import BLOCK_ELEMS, round_up

Kind = Literal["as_is", "bf16", "fp16", "e4m3", "e5m2", "int8", "int4", "nf4"]

AS_IS: Kind = "as_is"
# Kinds in which collectives may be sent.
KINDS: tuple[Kind, ...] = tuple(kind for kind in get_args(Kind) if kind != "nf4")
# Kinds in which frozen weights may be stored.
FROZEN_KINDS: tuple[Kind, ...] = ("nf4", "int8", "int4", "e4m3", "e5m2")
ALIASES: dict[str, Kind] = {"fp8": "e4m3"}
ALIGN_BYTES = 16
NF4_BLOCK, NF4_SCALED = 64, 256  # elements of a block; blocks whose absmaxes share a scale

_BITS: dict[Kind, int] = {"bf16": 16, "fp16": 16, "e4m3": 8, "e5m2": 8, "int8": 8, "int4": 4, "nf4": 4}
# The largest code of a symmetric codec, then of an asymmetric one. Kinds that are not here have no scales.
_LARGEST: dict[Kind, tuple[float, ...]] = {
    "int8": (127.0, 255.0),
    "int4": (7.0, 15.0),
    "e4m3": (448.0,),
    "e5m2": (57344.0,),
}
_BLOCKS = tuple(2**power for power in range(6, 12))
_OPTIONS = ("asymmetric", "stochastic", "feedback", "forward")
_OF_INTEGERS = ("asymmetric", "stochastic")
_INTEGERS = ("int8", "int4")


@dataclass(frozen=True, slots=True)
class Codec:
    """A way to encode. `block` elements share a scale. Symmetric codes cover -absmax to absmax, asymmetric ones minimum
    to maximum. Stochastic rounding is right on average; rounding to nearest has the smaller error. With feedback, the
    encoding rank saves the error and adds it to the next values. Forward only: a backward gets exact parameters."""

    kind: Kind
    block: int = BLOCK_ELEMS
    is_asymmetric: bool = False
    is_stochastic: bool = False
    has_feedback: bool = False
    is_forward_only: bool = False

    def __str__(self) -> str:
        are_set = (self.is_asymmetric, self.is_stochastic, self.has_feedback, self.is_forward_only)
        block = [str(self.block)] if self.block != BLOCK_ELEMS and self.kind != "nf4" else []
        return ":".join([self.kind, *block, *compress(_OPTIONS, are_set)])

    @property
    def has_scales(self) -> bool:
        return self.kind in _LARGEST

    @property
    def is_integer(self) -> bool:
        return self.kind in _INTEGERS

    @property
    def largest(self) -> float:
        """The largest code, which stands for a block's absmax, or for its maximum."""
        return _LARGEST[self.kind][self.is_asymmetric]


@dataclass(frozen=True, slots=True)
class Parts:
    """The offsets of the parts of an encoded buffer, and their lengths without padding. Of nf4, `scales_at` are the
    absmaxes, and `minima_at` their scales and then their offset."""

    payload_bytes: int
    num_blocks: int
    scales_at: int
    minima_at: int
    total_bytes: int


@lru_cache(maxsize=1024)
def parse(name: str) -> Codec:
    word, *words = name.split(":")
    kind: Any = ALIASES.get(word, word)
    blocks = [int(word) for word in words if word.isdecimal()]
    options = [word for word in words if not word.isdecimal()]
    unknown = [option for option in options if option not in _OPTIONS]
    of_integers = [option for option in options if option in _OF_INTEGERS]
    problem = ""
    if kind not in _BITS and kind != AS_IS:
        problem = f"unknown kind {word!r}; {did_you_mean(word, [*KINDS, *ALIASES, 'nf4'])}"
    elif kind == "nf4" and words:
        problem = f"its blocks have {NF4_BLOCK} elements, and it has no options; leave out {words[0]!r}"
    elif unknown:
        problem = f"unknown option {unknown[0]!r}; {did_you_mean(unknown[0], _OPTIONS)}, or the elements of a block"
    elif len(blocks) > 1 or len({*options}) < len(options):
        problem = "one block is enough, and each option once"
    elif blocks and kind not in _LARGEST:
        problem = f"{kind} has no scales, so it has no blocks; leave out the block"
    elif blocks and blocks[0] not in _BLOCKS:
        problem = f"a block of {blocks[0]} elements; it must be a power of two from {_BLOCKS[0]} to {_BLOCKS[-1]}"
    elif of_integers and kind not in _INTEGERS:
        problem = (
            f"{kind} cannot be {of_integers[0]}, only int8 and int4 can; leave it out, or write 'int8:{of_integers[0]}'"
        )
    elif options and kind == AS_IS:
        problem = f"nothing is lost that is sent as it is; leave out {options[0]!r}"
    if problem:
        raise ConfigurationError(f"codec {name!r}: {problem}")
    usual = NF4_BLOCK if kind == "nf4" else BLOCK_ELEMS
    return Codec(kind, blocks[0] if blocks else usual, *(option in options for option in _OPTIONS))


@lru_cache(maxsize=4096)
def parts(codec: Codec, num_elems: int) -> Parts:
    """The layout of an encoded buffer; not for `as_is`."""
    payload_bytes = -(-num_elems * _BITS[codec.kind] // 8)
    if codec.kind == "nf4":
        num_blocks, scales_at = -(-num_elems // NF4_BLOCK), round_up(payload_bytes, ALIGN_BYTES)
        minima_at = scales_at + round_up(num_blocks, ALIGN_BYTES)
        end = minima_at + round_up(4 * (1 + num_nf4_scales(num_blocks)), ALIGN_BYTES)
        return Parts(payload_bytes, num_blocks, scales_at, minima_at, end)
    if not codec.has_scales:
        return Parts(payload_bytes, 0, payload_bytes, payload_bytes, payload_bytes)
    num_blocks = -(-num_elems // codec.block)
    scales_at = round_up(payload_bytes, ALIGN_BYTES)
    minima_at = scales_at + round_up(4 * num_blocks, ALIGN_BYTES)
    total_bytes = minima_at + (minima_at - scales_at if codec.is_asymmetric else 0)
    return Parts(payload_bytes, num_blocks, scales_at, minima_at, total_bytes)


def encoded_bytes(codec: Codec | str, num_elems: int, dtype: DTypeLike | None = None) -> int:
    """The bytes that `reference_codecs.encode` writes. For `as_is`, elements have the size of `dtype`."""
    codec = parse(codec) if isinstance(codec, str) else codec
    if codec.kind != AS_IS:
        return parts(codec, num_elems).total_bytes
    assert dtype is not None
    return num_elems * dtype_of(dtype).itemsize


def num_nf4_scales(num_blocks: int) -> int:
    return -(-num_blocks // NF4_SCALED)


def codec_in(name: str) -> str | None:
    """The codec at the end of the name under which encoded weights are saved; None for other names."""
    last = name.rpartition(".")[2]
    return last if last.partition(":")[0] in FROZEN_KINDS else None


def seed_words(seed: int) -> tuple[int, int]:
    """Two unrelated signed 32-bit words from a seed: neighbouring seeds must not give similar words.
    (The finaliser of splitmix64.)"""
    mixed = (seed + 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    mixed ^= mixed >> 31
    return signed_word(mixed), signed_word(mixed >> 32)


def signed_word(value: int) -> int:
    """The lowest 32 bits, as the value of an int32."""
    return (value + 2**31) % 2**32 - 2**31
