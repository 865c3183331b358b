"""The 4-bit format of QLoRA, as bitsandbytes stores it: frozen weights in about 0.516 bytes each.

64 elements share an absmax. An element divided by it is one of 16 values, the quantiles of a normal distribution, whose
codes lie in pairs, the first in the high half of a byte. The absmaxes are encoded again ("double quantisation"): their
mean, the offset, is subtracted, 256 of the rest share a scale, and each is one of 256 levels, most of them near zero.
`codec.parts` has the places of payload, absmaxes, and scales with the offset behind them.

This is plain torch and the definition. Bit for bit the same is decoded by C code (`native/c/nf4.c`) on a CPU and by a
Triton kernel (`triton_nf4.py`) on a CUDA device.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..native.library import struct_fields
from .codec import NF4_BLOCK, NF4_SCALED, Codec, num_nf4_scales, parts

CODEC = Codec("nf4", NF4_BLOCK)
# Elements that are encoded or decoded at once.
PIECE_ELEMS = 1 << 20
SMALLEST_ABSMAX = 1e-38

# Quantiles of the standard normal distribution at equal steps of probability, 8 below zero and 9 above, with the ends
# at 0.9677083, divided by the largest (QLoRA, arxiv.org/abs/2305.14314, appendix E).
# fmt: off
CODES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on


class Stored(NamedTuple):
    """The parts of an encoded parameter, as views of its bytes. `offset` is one number."""

    payload: Tensor
    absmax: Tensor
    scales: Tensor
    offset: Tensor


def stored_parts(row: Tensor, num_elems: int) -> Stored:
    where = parts(CODEC, num_elems)
    num_scales = num_nf4_scales(where.num_blocks)
    scales = row[where.minima_at : where.total_bytes].view(torch.float32)
    absmax = row[where.scales_at : where.scales_at + where.num_blocks]
    return Stored(row[: where.payload_bytes], absmax, scales[:num_scales], scales[num_scales : num_scales + 1])


@cache
def tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The 16 values of codes and the 256 levels of absmaxes, both in order.

    Of the levels, 2^k of each sign lie at equal distances in the k-th of seven decades that end at 1; the other two are
    0 and 1.
    """
    levels = [0.0, 1.0]
    for decade in range(7):
        bounds = torch.linspace(0.1, 1, 2**decade + 1)
        middles = (10 ** (decade - 6) * ((bounds[:-1] + bounds[1:]) / 2)).tolist()
        levels += [sign * middle for sign in (1, -1) for middle in middles]
    return torch.tensor(CODES, device=device), torch.tensor(sorted(levels), device=device)


def _nearest(scaled: Tensor, table: Tensor) -> Tensor:
    """The index of the nearest value of a table."""
    found = torch.bucketize(scaled.clamp_(-1, 1), (table[:-1] + table[1:]) / 2, out_int32=True)
    return found.to(torch.uint8)


def _inverse(absmax: Tensor) -> Tensor:
    return (1.0 / absmax.clamp(min=SMALLEST_ABSMAX))[:, None]


def encode(values: Tensor, row: Tensor) -> None:
    """Encode all elements of a parameter, which must be flat."""
    num_elems, (codes, levels) = values.numel(), tables(values.device)
    stored = stored_parts(row.zero_(), num_elems)
    absmax = torch.empty(stored.absmax.numel(), device=values.device)
    for begin in range(0, num_elems, PIECE_ELEMS):
        num = min(PIECE_ELEMS, num_elems - begin)
        blocks = torch.zeros(-(-num // NF4_BLOCK), NF4_BLOCK, device=values.device)
        blocks.view(-1)[:num] = values[begin : begin + num]
        most = blocks.abs().amax(1)
        absmax[begin // NF4_BLOCK :][: len(most)] = most
        found = _nearest(blocks * _inverse(most), codes).view(-1)
        packed = (found[::2] << 4) | found[1::2]
        stored.payload[begin // 2 :][: len(packed)] = packed[: -(-num // 2)]
    stored.offset.copy_(absmax.mean())
    spread = torch.zeros(stored.scales.numel(), NF4_SCALED, device=values.device)
    spread.view(-1)[: absmax.numel()] = absmax - stored.offset
    stored.scales.copy_(spread.abs().amax(1))
    stored.absmax.copy_(_nearest(spread * _inverse(stored.scales), levels).view(-1)[: absmax.numel()])


def decode(row: Tensor, out: Tensor) -> None:
    num_elems, (codes, levels) = out.numel(), tables(out.device)
    payload, absmaxes, scales, offset = stored_parts(row, num_elems)
    absmax = levels[absmaxes.int()] * scales.repeat_interleave(NF4_SCALED)[: absmaxes.numel()] + offset
    for begin in range(0, num_elems, PIECE_ELEMS):
        num = min(PIECE_ELEMS, num_elems - begin)
        pairs = payload[begin // 2 : (begin + num + 1) // 2].int()
        found = codes[torch.stack((pairs >> 4, pairs & 15), 1).view(-1)][:num]
        scale = absmax[begin // NF4_BLOCK : -(-(begin + num) // NF4_BLOCK)].repeat_interleave(NF4_BLOCK)[:num]
        out[begin : begin + num].copy_(found * scale)


class Nf4Job(ctypes.Structure):
    _fields_ = struct_fields(
        c_void_p="payload absmax scales codes levels out", c_int64="num_elems num_scales", c_int32="dtype"
    )


def compiled_decoder(
    row: Tensor, out: Tensor, dtype: int, in_threads: Callable[..., Callable[[], object]]
) -> Callable[[], None]:
    """Prepare to decode with the C code. Addresses are read each time: memory may be released and allocated again."""
    where, (codes, levels) = parts(CODEC, out.numel()), tables(out.device)
    num_scales = num_nf4_scales(where.num_blocks)
    job = Nf4Job(0, 0, 0, codes.data_ptr(), levels.data_ptr(), 0, out.numel(), num_scales, dtype)
    run = in_threads("shardwise_decode_nf4", job, where.num_blocks, NF4_BLOCK)

    def decode_all() -> None:
        job.payload, job.out = row.data_ptr(), out.data_ptr()
        job.absmax, job.scales = job.payload + where.scales_at, job.payload + where.minima_at
        run()

    return decode_all
