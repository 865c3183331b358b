"""Codecs for collectives in fewer bits: their names, and the size and layout of encoded buffers.

    kind[:block][:asymmetric][:stochastic][:feedback][:forward]     int8, int4:128, int8:512:asymmetric, e4m3:64:forward

A buffer of encoded elements has up to three parts: the payload; one fp32 scale for each block of elements; and for an
asymmetric codec one fp32 minimum for each block. Every part starts, and the buffer ends, at a multiple of 16 bytes, so
that buffers in a row can be viewed in their dtype and be read in the widest steps; the padding is zero. Kinds without
scales consist of their payload.

`reference_codecs.py` encodes and decodes; this file has what planning needs, without torch.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from ...base.dtypes import DTypeLike, dtype_of
from ...base.errors import ConfigurationError, did_you_mean
from ...base.intervals import BLOCK_ELEMS

Kind = Literal["as_is", "bf16", "fp16", "e4m3", "e5m2", "int8", "int4"]

AS_IS: Kind = "as_is"
KINDS: tuple[Kind, ...] = get_args(Kind)
ALIASES: dict[str, Kind] = {"fp8": "e4m3"}
ALIGN_BYTES = 16

_BITS: dict[Kind, int] = {"bf16": 16, "fp16": 16, "e4m3": 8, "e5m2": 8, "int8": 8, "int4": 4}
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


@dataclass(frozen=True, slots=True)
class Codec:
    """`block` elements share a scale. Symmetric codes cover -absmax to absmax, asymmetric ones minimum to maximum.
    Stochastic rounding is right on average; rounding to the nearest code has the smaller error. With feedback, the
    encoding rank saves the error and adds it to the next values. Forward only: a backward gets exact parameters."""

    kind: Kind
    block: int = BLOCK_ELEMS
    is_asymmetric: bool = False
    is_stochastic: bool = False
    has_feedback: bool = False
    is_forward_only: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigurationError(f"unknown codec {self.kind!r}; {did_you_mean(str(self.kind), KINDS)}")
        if self.block not in _BLOCKS:
            raise ConfigurationError(
                f"codec {self.kind}: a block of {self.block} elements; it must be a power of two from "
                f"{_BLOCKS[0]} to {_BLOCKS[-1]}"
            )
        if not self.has_scales and self.block != BLOCK_ELEMS:
            raise ConfigurationError(f"codec {self.kind} with a block of {self.block}: {_without_blocks(self.kind)}")
        for option, is_set in zip(_OPTIONS, self._options, strict=True):
            if is_set and option in _OF_INTEGERS and not self.is_integer:
                raise ConfigurationError(
                    f"codec {self.kind} cannot be {option}, only int8 and int4 can; write {self.kind!r}, "
                    f"or 'int8:{option}'"
                )
            if is_set and self.kind == "as_is":
                raise ConfigurationError(f"codec as_is with {option}: nothing is lost that is sent as it is; leave it")

    def __str__(self) -> str:
        words = [self.kind, *([str(self.block)] if self.block != BLOCK_ELEMS else [])]
        return ":".join(words + [option for option, is_set in zip(_OPTIONS, self._options, strict=True) if is_set])

    @property
    def _options(self) -> tuple[bool, ...]:
        return self.is_asymmetric, self.is_stochastic, self.has_feedback, self.is_forward_only

    @property
    def has_scales(self) -> bool:
        return self.kind in _LARGEST

    @property
    def is_integer(self) -> bool:
        return self.kind in ("int8", "int4")

    @property
    def largest(self) -> float:
        """The largest code, which stands for a block's absmax, or for its maximum."""
        return _LARGEST[self.kind][self.is_asymmetric]


@dataclass(frozen=True, slots=True)
class Parts:
    """The offsets of the parts of an encoded buffer, and their lengths without padding."""

    payload_bytes: int
    num_blocks: int
    scales_at: int
    minima_at: int
    total_bytes: int


@lru_cache(maxsize=1024)
def parse(name: str) -> Codec:
    kind, *words = name.split(":")
    known = ALIASES.get(kind, kind)
    if known not in KINDS:
        raise ConfigurationError(f"codec {name!r}: unknown kind {kind!r}; {did_you_mean(kind, [*KINDS, *ALIASES])}")
    blocks = [int(word) for word in words if word.isdecimal()]
    options = [word for word in words if not word.isdecimal()]
    if len(blocks) > 1:
        raise ConfigurationError(f"codec {name!r}: two blocks, {blocks[0]} and {blocks[1]}; give one")
    for word in options:
        if word not in _OPTIONS:
            raise ConfigurationError(
                f"codec {name!r}: unknown option {word!r}; {did_you_mean(word, _OPTIONS)}, or the elements of a block"
            )
        if options.count(word) > 1:
            raise ConfigurationError(f"codec {name!r}: {word!r} twice; write it once")
    if blocks and known not in _LARGEST:
        raise ConfigurationError(f"codec {name!r} with a block of {blocks[0]}: {_without_blocks(known)}")
    return Codec(known, blocks[0] if blocks else BLOCK_ELEMS, *(option in options for option in _OPTIONS))


@lru_cache(maxsize=4096)
def parts(codec: Codec, num_elems: int) -> Parts:
    """The layout of an encoded buffer; not for `as_is`."""
    payload_bytes = -(-num_elems * _BITS[codec.kind] // 8)
    if not codec.has_scales:
        return Parts(payload_bytes, 0, payload_bytes, payload_bytes, payload_bytes)
    num_blocks = -(-num_elems // codec.block)
    scales_at = _aligned(payload_bytes)
    minima_at = scales_at + _aligned(4 * num_blocks)
    total_bytes = minima_at + (_aligned(4 * num_blocks) if codec.is_asymmetric else 0)
    return Parts(payload_bytes, num_blocks, scales_at, minima_at, total_bytes)


def encoded_bytes(codec: Codec | str, num_elems: int, dtype: DTypeLike | None = None) -> int:
    """The bytes that `reference_codecs.encode` fills. Without encoding, elements have the size of `dtype`."""
    if isinstance(codec, str):
        codec = parse(codec)
    if codec.kind != "as_is":
        return parts(codec, num_elems).total_bytes
    if dtype is None:
        raise ConfigurationError(
            f"{num_elems} elements as they are have the size of their dtype, and none was given; pass dtype="
        )
    return num_elems * dtype_of(dtype).itemsize


def seed_words(seed: int) -> tuple[int, int]:
    """Two unrelated signed 32-bit words for any seed: neighbouring seeds must not give neighbouring numbers.
    (The finaliser of splitmix64.)"""
    mixed = (seed + 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    mixed ^= mixed >> 31
    return signed_word(mixed), signed_word(mixed >> 32)


def signed_word(value: int) -> int:
    """The lowest 32 bits, as the value of an int32."""
    return (value + 2**31) % 2**32 - 2**31


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _without_blocks(kind: str) -> str:
    return f"{kind} has no scales, so it has no blocks; leave out the block"
