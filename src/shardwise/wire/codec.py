"""What travels in fewer bits, and how many bytes that is. Blocks of 256 elements share one fp32 scale."""

from ..layout import Encoding
from ..shard import BLOCK_ELEMS

# Bits of an element, and bytes of the scale of its block.
_SIZES: dict[Encoding, tuple[int, int]] = {"bf16": (16, 0), "fp8": (8, 4), "int8": (8, 4), "int4": (4, 4)}


def encoded_bytes(encoding: Encoding, num_elems: int) -> int:
    bits, scale_bytes = _SIZES[encoding]
    return num_elems * bits // 8 + -(-num_elems // BLOCK_ELEMS) * scale_bytes
