"""Decoding of nf4 as a Triton kernel, for CUDA devices: bit for bit `nf4.decode`.

A program reads the payload of some blocks, 4 bytes at a time, and computes each block's absmax once. Both tables are
small, so their look-ups are served by the caches. Products and sums are not fused, as in `triton_codecs.py`.
"""

# Triton is untyped, and by its convention constants of a kernel are in capitals.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: N803

from collections.abc import Callable

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor, float32, int32

from .codec import NF4_BLOCK, NF4_SCALED, num_nf4_scales, parts
from .nf4 import CODEC, tables
from .triton_codecs import is_long, prepared

_NUM_BLOCKS = 32


def decoder(row: Tensor, out: Tensor) -> Callable[[], None]:
    """Prepare to decode all elements of a parameter."""
    num_elems = out.numel()
    where = parts(CODEC, num_elems)
    codes, levels = tables(out.device)
    return prepared(
        _decode_blocks,
        (triton.cdiv(where.num_blocks, _NUM_BLOCKS), 1),
        row[: where.scales_at].view(int32),
        row[where.scales_at : where.minima_at],
        row[where.minima_at : where.total_bytes].view(float32),
        codes,
        levels,
        out,
        num_elems,
        where.num_blocks,
        num_nf4_scales(where.num_blocks),
        where.scales_at // 4,
        IS_LONG=is_long(num_elems),
        BLOCK=NF4_BLOCK,
        SCALED=NF4_SCALED,
        NUM_BLOCKS=_NUM_BLOCKS,
    )


@triton.jit
def _decode_blocks(
    payload,
    absmaxes,
    scales,
    codes,
    levels,
    out,
    num_elems,
    num_blocks,
    num_scales,
    num_words,
    IS_LONG: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    program = tl.program_id(0)
    if IS_LONG:
        program = program.to(tl.int64)
    blocks = program * NUM_BLOCKS + tl.arange(0, NUM_BLOCKS)
    is_block = blocks < num_blocks
    level = tl.load(levels + tl.load(absmaxes + blocks, mask=is_block, other=0).to(tl.int32))
    absmax = level * tl.load(scales + blocks // SCALED, mask=is_block, other=0.0) + tl.load(scales + num_scales)
    at = blocks[:, None] * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]
    words = tl.load(payload + at, mask=at < num_words, other=0)
    # The first element of a byte is in its high half: the halves change places, then they are taken in order.
    words = ((words & 0x0F0F0F0F) << 4) | ((words >> 4) & 0x0F0F0F0F)
    pairs = tl.join(words, words >> 16)
    pairs = tl.join(pairs, pairs >> 8)
    pairs = tl.join(pairs, pairs >> 4)
    values = tl.load(codes + (tl.reshape(pairs, [NUM_BLOCKS, BLOCK]) & 15)) * absmax[:, None]
    elems = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out + elems, values.to(out.dtype.element_ty), mask=elems < num_elems)
