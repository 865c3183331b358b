"""The codecs as Triton kernels, for CUDA devices: bit for bit `reference_codecs.py`.

Each kernel is one pass: a program reads a tile of whole blocks once, 16 bytes at a time, keeps scales and codes in
registers, and writes them. Four things keep the bits equal. Products and sums are not fused (`enable_fp_fusion=False`).
1/scale is one division per block, rounded to nearest. Adding 1.5 * 2^23 gives the nearest integer: there fp32 numbers
are spaced by 1, and ties go to even. Absmax, minimum and maximum compare the values' bits as integers in the same
order, so that no NaN is lost.

Kernels are launched on the current device, which must be that of the tensors.
"""

# Triton is untyped, and by its convention constants of a kernel are in capitals.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: N803

from collections.abc import Callable
from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from .codec import Codec, parts, seed_words

_SMALLEST_SCALE = tl.constexpr(2.0**-126)
_NEAREST = tl.constexpr(1.5 * 2.0**23)

_PAYLOAD = {"int8": torch.uint8, "int4": torch.uint8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Each thread handles 16 or 32 elements of a tile, so that it reads and writes a multiple of 16 bytes at a time.
_LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
_ENCODED_ELEMS = 4096
_DECODED_ELEMS = 2048


def encoder(codec: Codec, values: Tensor, rows: Tensor) -> Callable[[int], None]:
    """Prepare to encode, for a codec with scales."""
    num_rows = len(rows)
    num_elems = values.numel() // num_rows
    where = parts(codec, num_elems)
    num_slots = (where.minima_at - where.scales_at) // 4
    scales = rows[:, where.scales_at : where.minima_at].view(torch.float32)
    num_blocks = _ENCODED_ELEMS // codec.block
    launch = prepared(
        _encode_tile,
        (triton.cdiv(num_slots, num_blocks), num_rows),
        values,
        rows[:, : where.scales_at].view(_PAYLOAD[codec.kind]),
        scales,
        rows[:, where.minima_at :].view(torch.float32) if codec.is_asymmetric else scales,
        rows.stride(0),
        num_elems,
        where.scales_at,
        num_slots,
        later=(0, 0),
        KIND=codec.kind,
        LARGEST=codec.largest,
        IS_ASYMMETRIC=codec.is_asymmetric,
        IS_STOCHASTIC=codec.is_stochastic,
        HAS_TAIL=num_elems % codec.block != 0,
        IS_LONG=is_long(num_elems),
        BLOCK=codec.block,
        NUM_BLOCKS=num_blocks,
    )
    return (lambda seed: launch(*seed_words(seed))) if codec.is_stochastic else lambda _: launch(0, 0)


def decoder(codec: Codec, rows: Tensor, out: Tensor, is_sum: bool) -> Callable[[], None]:
    """Prepare to decode each row to its part of `out`, or to write the sum of all rows. Sums also work for codecs
    without scales."""
    num_outs = 1 if is_sum else len(rows)
    num_elems = out.numel() // num_outs
    if codec.has_scales:
        where = parts(codec, num_elems)
        payload = rows[:, : where.scales_at].view(torch.int32 if codec.is_integer else _PAYLOAD[codec.kind])
        scales = rows[:, where.scales_at : where.minima_at].view(torch.float32)
        minima = rows[:, where.minima_at :].view(torch.float32) if codec.is_asymmetric else scales
    else:
        payload = scales = minima = rows.view(_PLAIN.get(codec.kind, out.dtype))
    return prepared(
        _decode_tile,
        (triton.cdiv(num_elems, _DECODED_ELEMS), num_outs),
        payload,
        scales,
        minima,
        out,
        payload.stride(0),
        scales.stride(0),
        num_elems,
        payload.shape[1],
        len(rows) // num_outs,
        KIND=codec.kind,
        HAS_SCALES=codec.has_scales,
        IS_ASYMMETRIC=codec.is_asymmetric,
        IS_LONG=is_long(num_elems),
        BLOCK=codec.block,
        NUM_BLOCKS=_DECODED_ELEMS // codec.block,
    )


def prepared(
    kernel: Any, grid: tuple[int, int], *arguments: Any, later: tuple[int, ...] = (), **constants: Any
) -> Callable[..., None]:
    """Compile a kernel for these arguments, and return a function that launches it. `later` stands for arguments that
    follow them and are given to that function. Triton's own launch finds the compiled kernel again each time, which
    takes dozens of Python calls. Addresses are read at each launch: memory may be released and allocated again."""
    compiled = kernel.warmup(*arguments, *later, grid=grid, **constants, **_LAUNCH)
    run = compiled.run  # loads the binary, which sets `function`
    function, metadata, device = compiled.function, compiled.packed_metadata, arguments[0].device.index
    values = tuple(constants.values())
    stream_of = torch._C._cuda_getCurrentRawStream

    def launch(*rest: int) -> None:
        # No data for, and no hooks of, Triton's profiler.
        run(*grid, 1, stream_of(device), function, metadata, None, None, None, *arguments, *rest, *values)

    return launch


def is_long(num_elems: int) -> bool:
    """True if the index of an element, also in the last tile's padding, needs 64 bits."""
    return num_elems > 2**31 - _ENCODED_ELEMS


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def _encode_tile(
    values,
    payload,
    scales,
    minima,
    row_bytes,
    num_elems,
    num_payload_bytes,
    num_slots,
    seed_low,
    seed_high,
    KIND: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_ASYMMETRIC: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    IS_LONG: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    blocks, elems = _tile(IS_LONG, BLOCK, NUM_BLOCKS)
    row = tl.program_id(1).to(tl.int64)
    values += row * num_elems
    payload += row * row_bytes
    scales += row * (row_bytes // 4)
    minima += row * (row_bytes // 4)
    is_value = elems < num_elems
    wide = tl.load(values + elems, mask=is_value, other=0.0).to(tl.float32)
    bits = wide.to(tl.int32, bitcast=True)
    if IS_ASYMMETRIC:
        order = _in_order(bits)
        if HAS_TAIL:
            lowest = tl.min(tl.where(is_value, order, 0x7FFFFFFF), axis=1)
            highest = tl.max(tl.where(is_value, order, -0x7FFFFFFF), axis=1)
        else:
            lowest = tl.min(order, axis=1)
            highest = tl.max(order, axis=1)
        # A minimum of -0 is 0.
        minimum = _in_order(lowest).to(tl.float32, bitcast=True) + 0.0
        spread = _in_order(highest).to(tl.float32, bitcast=True) - minimum
        wide = wide - minimum[:, None]
    else:
        minimum = tl.zeros([NUM_BLOCKS], tl.float32)
        spread = tl.max(bits & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)

    scale = spread * (1.0 / LARGEST)
    is_finite = spread < float("inf")
    is_usable = is_finite & (scale >= _SMALLEST_SCALE)
    inverse = tl.where(is_usable, tl.div_rn(1.0, scale), 0.0)
    scale = tl.where(is_usable, scale, tl.where(is_finite, 0.0, float("nan")))
    # Slots without a block are padding, which is zero.
    is_block = blocks * BLOCK < num_elems
    tl.store(scales + blocks, tl.where(is_block, scale, 0.0), mask=blocks < num_slots)
    if IS_ASYMMETRIC:
        tl.store(minima + blocks, tl.where(is_block & is_finite, minimum, 0.0), mask=blocks < num_slots)

    codes = wide * inverse[:, None]
    if KIND == "e4m3" or KIND == "e5m2":
        tl.store(payload + elems, codes.to(payload.dtype.element_ty), mask=elems < num_payload_bytes)
    else:
        if IS_STOCHASTIC:
            pairs = blocks[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
            first_pair = (row * ((num_elems + 1) // 2)).to(tl.uint32)
            codes += _around_zero(first_pair + pairs.to(tl.uint32), seed_low, seed_high, BLOCK, NUM_BLOCKS)
            codes = tl.minimum(tl.maximum(codes, 0.0 if IS_ASYMMETRIC else -LARGEST), LARGEST)
        # The low bits of the sum are the integer. A symmetric int4 is stored plus 8.
        shift: tl.constexpr = _NEAREST + (8.0 if KIND == "int4" and not IS_ASYMMETRIC else 0.0)
        integers = (codes + shift).to(tl.int32, bitcast=True)
        if HAS_TAIL:
            integers = tl.where(is_value, integers, 0)
        if KIND == "int4":
            low, high = tl.split(tl.reshape(integers, [NUM_BLOCKS, BLOCK // 2, 2]))
            packed = low + (high << 4)
            bytes_at = blocks[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
            tl.store(payload + bytes_at, packed.to(tl.uint8), mask=bytes_at < num_payload_bytes)
        else:
            tl.store(payload + elems, integers.to(payload.dtype.element_ty), mask=elems < num_payload_bytes)


@triton.jit
def _decode_tile(
    payload,
    scales,
    minima,
    out,
    payload_stride,
    scales_stride,
    num_elems,
    num_payload,
    num_summed,
    KIND: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_ASYMMETRIC: tl.constexpr,
    IS_LONG: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    _, elems = _tile(IS_LONG, BLOCK, NUM_BLOCKS)
    row = tl.program_id(1).to(tl.int64)
    payload += row * payload_stride
    scales += row * scales_stride
    minima += row * scales_stride
    # The first row is not added to zero, which would turn -0 into 0.
    total = _decoded_row(
        payload, scales, minima, num_elems, num_payload, KIND, HAS_SCALES, IS_ASYMMETRIC, IS_LONG, BLOCK, NUM_BLOCKS
    )
    for _ in tl.range(1, num_summed, loop_unroll_factor=4):
        payload += payload_stride
        scales += scales_stride
        minima += scales_stride
        total += _decoded_row(
            payload, scales, minima, num_elems, num_payload, KIND, HAS_SCALES, IS_ASYMMETRIC, IS_LONG, BLOCK, NUM_BLOCKS
        )
    tl.store(out + row * num_elems + elems, total.to(out.dtype.element_ty), mask=elems < num_elems)


@triton.jit
def _decoded_row(
    payload,
    scales,
    minima,
    num_elems,
    num_payload,
    KIND: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_ASYMMETRIC: tl.constexpr,
    IS_LONG: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """This program's tile of a decoded row, in fp32."""
    blocks, elems = _tile(IS_LONG, BLOCK, NUM_BLOCKS)
    if KIND == "int8" or KIND == "int4":
        # The thread that loads a word of 4 or 8 codes unpacks it: its elements are neighbours in one thread.
        word_elems: tl.constexpr = 4 if KIND == "int8" else 8
        at = blocks[:, None] * (BLOCK // word_elems) + tl.arange(0, BLOCK // word_elems)[None, :]
        codes = tl.load(payload + at, mask=at < num_payload, other=0)
        if KIND == "int8" and not IS_ASYMMETRIC:
            codes ^= -0x7F7F7F80  # 0x80808080: each code plus 128
        codes = tl.join(codes, codes >> 16)
        codes = tl.join(codes, codes >> 8)
        if KIND == "int4":
            codes = tl.join(codes, codes >> 4)
        codes = tl.reshape(codes, [NUM_BLOCKS, BLOCK]) & (255 if KIND == "int8" else 15)
        # Codes in the low bits of the float 2^23 need no conversion: it then is 2^23 + code.
        added: tl.constexpr = 0.0 if IS_ASYMMETRIC else 128.0 if KIND == "int8" else 8.0
        wide = (codes | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + added)
    else:
        wide = tl.load(payload + elems, mask=elems < num_payload, other=0.0).to(tl.float32)
    if HAS_SCALES:
        is_block = blocks * BLOCK < num_elems
        wide = wide * tl.load(scales + blocks, mask=is_block, other=0.0)[:, None]
        if IS_ASYMMETRIC:
            wide = wide + tl.load(minima + blocks, mask=is_block, other=0.0)[:, None]
    return wide


@triton.jit
def _tile(IS_LONG: tl.constexpr, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr):
    """The indices of this program's blocks, and of their elements."""
    program = tl.program_id(0)
    if IS_LONG:
        program = program.to(tl.int64)
    blocks = program * NUM_BLOCKS + tl.arange(0, NUM_BLOCKS)
    return blocks, blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def _in_order(bits):
    """Map the bits of floats to integers in the same order, NaNs at both ends. The function is its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _around_zero(words, seed_low, seed_high, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr):
    """Two numbers between -1/2 and 1/2 from the hash of each word."""
    words ^= seed_low.to(tl.uint32)
    words ^= words >> 16
    words *= 0x7FEB352D
    words ^= seed_high.to(tl.uint32)
    words ^= words >> 15
    words *= 0x846CA68B
    words ^= words >> 16
    # Each 16 bits become the upper mantissa bits of a number in [1, 2), the highest one flipped; plus half a step.
    bits = tl.reshape(tl.join(words << 7, words >> 9), [NUM_BLOCKS, BLOCK])
    return ((bits & 0x7FFF80) ^ 0x3FC00040).to(tl.float32, bitcast=True) - 1.5
