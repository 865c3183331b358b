"""Encoding and decoding in plain torch: the definition of every codec, and the reference of its kernels.

The same is computed, bit for bit, by the Triton kernels (`triton_codecs.py`) on a CUDA device, and for the most common
codecs by C code on a CPU (`native/c/codecs.c`). All arithmetic is fp32, one operation at a time. The host never waits
for the device.

A block's scale is its absmax (asymmetric: maximum - minimum) times 1/(largest code). Value, or value - minimum, times
1/scale is cast to fp8, or rounded to an integer code, ties to even. Stochastic rounding first adds a number between
-1/2 and 1/2, a hash of the seed and of the element's index. A decoded value is code times scale, plus minimum.

- int8 is two's complement, asymmetric 0 to 255. int4 is code + 8, asymmetric 0 to 15; a byte has two elements, the
  first in its low half. The last block may be shorter.
- A block of zeros, and one whose scale would be below 2^-126, has the scale 0: it decodes to zeros, or to its minimum.
- A block with a value that is not finite, or whose range is not, has the scale NaN: it decodes to NaN everywhere. Its
  codes mean nothing. bf16 and fp16 are plain casts: inf and NaN stay, and beyond 65504 fp16 is inf.

Elements are processed in pieces, so about 16 MiB of scratch memory are enough for any size; the kernels need none.
"""

import ctypes
import importlib
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...base.errors import ConfigurationError
from ..native.library import DTYPES, library, struct_fields
from . import nf4
from .codec import ALIGN_BYTES, Codec, encoded_bytes, parts, seed_words, signed_word

# Elements per piece: few enough for the caches, and enough for torch's threads.
PIECE_ELEMS = 1 << 20
SMALLEST_SCALE = 2.0**-126
# The C code uses at most one thread for each of this many elements.
LEAST_ELEMS = 1 << 16

_CARRIED = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def encoder(codec: Codec, values: Tensor, rows: Tensor) -> Callable[[int], object]:
    """Prepare to encode `values`, cut into as many equal parts as there are rows, into `rows`: (num_rows,
    `encoded_bytes` of a part).

    Returns a function of the seed, to be called any number of times; storage may be released and allocated again in
    between. Only stochastic rounding reads the seed: the same seed rounds the same way, so ranks and steps should have
    different ones.
    """
    num_elems = _part_elems(codec, rows, values, "values")
    if codec.kind == "nf4":
        return lambda _: nf4.encode(values, rows[0])
    if not codec.has_scales:
        target, source = rows.view(_plain_dtype(codec, values)), values.view(len(rows), num_elems)
        return lambda _: target.copy_(source)
    if not num_elems:
        return lambda _: None
    if values.is_cuda:
        return _kernels().encoder(codec, values, rows)
    return (
        _compiled_encoder(codec, values, rows) if is_compiled(codec) else partial(reference_encode, codec, values, rows)
    )


def decoder(codec: Codec, rows: Tensor, out: Tensor, is_sum: bool = False) -> Callable[[], object]:
    """Prepare to decode rows into `out`. Values that were sent unencoded must have the dtype of `out`.

    With `is_sum` each row has the size of `out`, which gets their sum: in fp32, in the order of the rows, and rounded
    to the dtype of `out` once. No other memory as large as `out` is needed.
    """
    num_elems = _part_elems(codec, rows, out, "out", is_sum)
    if codec.kind == "nf4":
        return _nf4_decoder(rows[0], out)
    if not codec.has_scales and not is_sum:
        return partial(out.view(len(rows), num_elems).copy_, rows.view(_plain_dtype(codec, out)))
    if not num_elems:
        return lambda: None
    if out.is_cuda:
        return _kernels().decoder(codec, rows, out, is_sum)
    pairs = [(rows, out)] if is_sum else list(zip(rows.split(1), out.split(num_elems), strict=True))
    if is_compiled(codec):
        return _compiled_decoder(codec, pairs)

    def run() -> None:
        for part, target in pairs:
            reference_decode_sum(codec, part, target)

    return run


def encoded(codec: Codec, values: Tensor) -> Tensor:
    """Return the bytes of all elements of a tensor, to nearest."""
    flat = values.reshape(-1)
    flat = flat if flat.dtype in _CARRIED else flat.float()
    row = torch.zeros(1, encoded_bytes(codec, flat.numel()), dtype=torch.uint8, device=flat.device)
    encoder(codec, flat, row)(0)
    return row[0]


def _nf4_decoder(row: Tensor, out: Tensor) -> Callable[[], object]:
    if out.is_cuda:
        return _kernels("triton_nf4").decoder(row, out)
    if library() is None:
        return partial(nf4.decode, row, out)
    return nf4.compiled_decoder(row, out, DTYPES[out.dtype], _in_threads)


def reference_encode(codec: Codec, values: Tensor, rows: Tensor, seed: int) -> None:
    """Encode with torch, for a codec with scales."""
    num_elems = values.numel() // len(rows)
    where, num_piece, num_pairs = parts(codec, num_elems), _piece_elems(codec, num_elems), -(-num_elems // 2)
    scales, minima = _scale_parts(codec, rows, num_elems)
    rows[:, where.payload_bytes : where.scales_at].zero_()
    scales[:, where.num_blocks :].zero_()
    minima[:, where.num_blocks :].zero_()
    wide_scratch = torch.empty(num_piece, dtype=torch.float32, device=values.device)
    spare_scratch = torch.empty_like(wide_scratch)
    counts = torch.arange(num_piece // 2 if codec.is_stochastic else 0, dtype=torch.int32, device=values.device)
    for index, begin in itertools.product(range(len(rows)), range(0, num_elems, num_piece)):
        num, first = min(num_piece, num_elems - begin), index * num_elems + begin
        blocks = slice(begin // codec.block, -(-(begin + num) // codec.block))
        num_whole = (blocks.stop - blocks.start) * codec.block
        wide, spare = wide_scratch[:num_whole], spare_scratch[:num_whole]
        wide[:num].copy_(values[first : first + num])
        # A shorter block is filled with its first element, which changes neither its minimum nor its maximum.
        wide[num:].copy_(wide[num_whole - codec.block])
        in_blocks = wide.view(-1, codec.block)
        if codec.is_asymmetric:
            # A minimum of -0 is 0: which of the two is the smaller is not defined.
            minimum = in_blocks.amin(1) + 0.0
            spread = in_blocks.amax(1) - minimum
            minima[index, blocks] = torch.where(spread < torch.inf, minimum, 0.0)
            in_blocks.sub_(minimum[:, None])
        else:
            spread = torch.abs(in_blocks, out=spare.view(-1, codec.block)).amax(1)
        scale, is_finite = spread * (1.0 / codec.largest), spread < torch.inf
        is_usable = is_finite & (scale >= SMALLEST_SCALE)
        scales[index, blocks] = torch.where(is_usable, scale, torch.where(is_finite, 0.0, torch.nan))
        in_blocks.mul_(torch.where(is_usable, scale.reciprocal(), 0.0)[:, None])
        if codec.is_integer:
            if codec.is_stochastic:
                _round_at_random(wide, spare, counts, index * num_pairs + begin // 2, seed)
                wide.clamp_(0.0 if codec.is_asymmetric else -codec.largest, codec.largest)
            else:
                wide.round_()
        _write_codes(codec, wide[:num], spare, rows[index], begin)


def reference_decode_sum(codec: Codec, rows: Tensor, out: Tensor) -> None:
    scales, minima = _scale_parts(codec, rows, out.numel())
    num_elems, num_piece = out.numel(), _piece_elems(codec, out.numel())
    total_scratch = torch.empty(num_piece, dtype=torch.float32, device=out.device)
    wide_scratch = torch.empty_like(total_scratch)
    for begin in range(0, num_elems, num_piece):
        num = min(num_piece, num_elems - begin)
        blocks = slice(begin // codec.block, -(-(begin + num) // codec.block))
        num_whole = (blocks.stop - blocks.start) * codec.block
        total, wide = total_scratch[:num_whole], wide_scratch[:num_whole]
        for index, row in enumerate(rows):
            # The first row is not added to zero, which would turn -0 into 0.
            decoded = wide if index else total
            _read_codes(codec, row, decoded[:num], begin, out.dtype)
            if codec.has_scales:
                decoded.view(-1, codec.block).mul_(scales[index, blocks, None])
                if codec.is_asymmetric:
                    decoded.view(-1, codec.block).add_(minima[index, blocks, None])
            if index:
                total.add_(wide)
        out[begin : begin + num].copy_(total[:num])


def _round_at_random(wide: Tensor, spare: Tensor, counts: Tensor, first_pair: int, seed: int) -> None:
    """Add a number between -1/2 and 1/2 to each element, and round to nearest. The number is an odd multiple of 2^-17.
    A hash of the seed and of a pair's index has 32 bits, 16 for each of two elements. It is computed in int32, whose
    sums and products wrap; a right shift fills in copies of the sign, which are masked."""
    low, high = seed_words(seed)
    num_pairs = wide.numel() // 2
    words, shifted = counts[:num_pairs] + signed_word(first_pair), spare.view(torch.int32)[:num_pairs]
    words.bitwise_xor_(low)
    for shift, factor, word in ((16, 0x7FEB352D, high), (15, 0x846CA68B, 0)):
        torch.bitwise_right_shift(words, shift, out=shifted).bitwise_and_(2 ** (32 - shift) - 1)
        words.bitwise_xor_(shifted).mul_(signed_word(factor)).bitwise_xor_(word)
    torch.bitwise_right_shift(words, 16, out=shifted).bitwise_and_(0xFFFF)
    words.bitwise_xor_(shifted)
    # The lower half of a word is the first of its pair.
    wide.add_(spare.copy_(words.view(torch.int16)).add_(0.5), alpha=2.0**-16).round_()


def _write_codes(codec: Codec, codes: Tensor, spare: Tensor, out: Tensor, begin: int) -> None:
    """Write the codes of a piece that begins at element `begin`. A cast to int8 is much faster than to uint8."""
    num = codes.numel()
    if codec.kind == "int4":
        narrow = spare.view(torch.int8)[: num + num % 2]
        narrow[num:].zero_()
        narrow[:num].copy_(codes if codec.is_asymmetric else codes.add_(8.0))
        pairs = narrow.view(torch.int16)
        packed = (pairs >> 4).bitwise_or_(pairs).bitwise_and_(0xFF)
        out[begin // 2 : begin // 2 + packed.numel()].copy_(packed)
    elif codec.kind == "int8":
        payload = out[begin : begin + num]
        payload.view(torch.int8).copy_(codes.sub_(128.0) if codec.is_asymmetric else codes)
        if codec.is_asymmetric:
            payload.bitwise_xor_(0x80)
    else:
        out[begin : begin + num].view(_FP8[codec.kind]).copy_(codes)


def _read_codes(codec: Codec, row: Tensor, wide: Tensor, begin: int, dtype: torch.dtype) -> None:
    num = wide.numel()
    if codec.kind == "int4":
        packed = row[begin // 2 : (begin + num + 1) // 2].to(torch.int16)
        pairs = (packed << 4).bitwise_or_(packed).bitwise_and_(0x0F0F)
        wide.copy_(pairs.view(torch.uint8)[:num])
        if not codec.is_asymmetric:
            wide.sub_(8.0)
    elif codec.kind == "int8":
        wide.copy_(row[begin : begin + num].view(torch.uint8 if codec.is_asymmetric else torch.int8))
    elif codec.kind == "e4m3":
        # Its shifted bits are an fp16 that is too small by a factor of 2^8. torch's own cast takes ten times as long.
        signed = row[begin : begin + num].view(torch.int8).to(torch.int16)
        shifted = (signed << 7).bitwise_and_(0x3F80).bitwise_or_(signed.bitwise_and_(-0x8000))
        wide.copy_(shifted.view(torch.float16)).mul_(256.0)
    elif codec.kind == "e5m2":
        wide.copy_((row[begin : begin + num].to(torch.int16) << 8).view(torch.float16))
    else:
        wide.copy_(row.view(_PLAIN.get(codec.kind, dtype))[begin : begin + num])


def _scale_parts(codec: Codec, rows: Tensor, num_elems: int) -> tuple[Tensor, Tensor]:
    """Scales and minima of each row, padding included; empty where the codec has none."""
    if not codec.has_scales:
        return rows.new_empty(0), rows.new_empty(0)
    where = parts(codec, num_elems)
    return (
        rows[:, where.scales_at : where.minima_at].view(torch.float32),
        rows[:, where.minima_at : where.total_bytes].view(torch.float32),
    )


def _piece_elems(codec: Codec, num_elems: int) -> int:
    return min(PIECE_ELEMS, -(-num_elems // codec.block) * codec.block)


def _plain_dtype(codec: Codec, values: Tensor) -> torch.dtype:
    return _PLAIN.get(codec.kind, values.dtype)


def _part_elems(codec: Codec, rows: Tensor, values: Tensor, what: str, is_sum: bool = False) -> int:
    """Elements that one row encodes. Raises for tensors that do not fit together, or that the codec cannot encode."""
    num_parts = 1 if is_sum else len(rows)
    num_elems = values.numel() // max(num_parts, 1)
    needed = encoded_bytes(codec, num_elems, values.dtype)
    align = ALIGN_BYTES if codec.has_scales else _plain_dtype(codec, values).itemsize
    is_flat = values.ndim == 1 and values.is_contiguous() and num_elems * num_parts == values.numel()
    is_in_rows = rows.ndim == 2 and len(rows) > 0 and rows.shape[1] == needed and rows.stride(1) == 1
    is_aligned = rows.storage_offset() % align == 0 and (len(rows) == 1 or rows.stride(0) % align == 0)
    is_of_dtype = values.dtype in _CARRIED and rows.dtype == torch.uint8 and rows.device == values.device
    if not (is_flat and is_in_rows and is_of_dtype and (is_aligned or not needed)):
        raise ConfigurationError(
            f"codec {codec}: {what} of {_described(values)} do not fit rows of {_described(rows)}, which begin at byte "
            f"{rows.storage_offset()} of their storage. The values must be flat and contiguous, of a dtype among "
            f"{', '.join(map(str, _CARRIED))}, in equal parts for the rows; the rows torch.uint8 of shape (num_rows, "
            f"{needed}) on the same device, each of them contiguous and at a multiple of {align} bytes"
        )
    return num_elems


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device} with shape {tuple(tensor.shape)} and strides {tensor.stride()}"


def _kernels(name: str = "triton_codecs") -> ModuleType:
    try:
        return importlib.import_module(f"{__package__}.{name}")
    except ImportError as error:
        fix = f"install the triton that belongs to torch {torch.__version__}, or send everything as_is"
        raise ConfigurationError(
            f"codecs need triton on CUDA, and triton cannot be imported ({error}); {fix}"
        ) from error


# The C code.

_CODEC = "dtype block bits"


class EncodeJob(ctypes.Structure):
    _fields_ = struct_fields(
        c_void_p="values payload scales", c_int64="num_elems", c_float="of_largest", c_int32=_CODEC
    )


class DecodeJob(ctypes.Structure):
    _fields_ = struct_fields(c_void_p="payload scales out", c_int64="row_bytes num_rows num_elems", c_int32=_CODEC)


def is_compiled(codec: Codec) -> bool:
    return codec.is_integer and not codec.is_asymmetric and not codec.is_stochastic and library() is not None


def _compiled_encoder(codec: Codec, values: Tensor, rows: Tensor) -> Callable[[int], None]:
    num_elems = values.numel() // len(rows)
    where = parts(codec, num_elems)
    paddings = [rows[:, where.payload_bytes : where.scales_at], rows[:, where.scales_at + 4 * where.num_blocks :]]
    job = EncodeJob(0, 0, 0, num_elems, 1.0 / codec.largest, *_codec(codec, values))
    pairs = list(zip(rows.split(1), values.split(num_elems), strict=True))
    run = _in_threads("shardwise_encode", job, where.num_blocks, codec.block)

    def encode_all(_: int) -> None:
        torch._foreach_zero_(paddings)
        for row, part in pairs:
            job.values, job.payload = part.data_ptr(), row.data_ptr()
            job.scales = job.payload + where.scales_at
            run()

    return encode_all


def _compiled_decoder(codec: Codec, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    """Prepare to write the sum of the rows of each pair to its tensor. All pairs have the same shapes."""
    rows, out = pairs[0]
    where = parts(codec, out.numel())
    job = DecodeJob(0, 0, 0, rows.stride(0), len(rows), out.numel(), *_codec(codec, out))
    run = _in_threads("shardwise_decode_sum", job, where.num_blocks, codec.block * len(rows))

    def decode_all() -> None:
        for part, target in pairs:
            job.payload, job.out = part.data_ptr(), target.data_ptr()
            job.scales = job.payload + where.scales_at
            run()

    return decode_all


def _codec(codec: Codec, values: Tensor) -> tuple[int, int, int]:
    """The fields of `_CODEC`."""
    return DTYPES[values.dtype], codec.block, 8 if codec.kind == "int8" else 4


def _in_threads(name: str, job: ctypes.Structure, num_blocks: int, block_elems: int) -> Callable[[], object]:
    """Prepare to run a function on at most as many threads as torch uses. ctypes releases the GIL while it runs."""
    function: Callable[..., Any] = getattr(library(), name)
    num_threads = max(1, min(torch.get_num_threads(), num_blocks * block_elems // LEAST_ELEMS))
    ends = [ctypes.c_int64(num_blocks * index // num_threads) for index in range(num_threads + 1)]
    runs = [partial(function, ctypes.byref(job), *pair) for pair in itertools.pairwise(ends)]
    return runs[0] if num_threads == 1 else lambda: list(_pool(num_threads).map(lambda run: run(), runs))


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="codec")
