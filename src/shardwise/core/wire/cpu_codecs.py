"""The most common codecs, compiled for the processor (`native/c/codecs.c`): bit for bit the reference codecs."""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..native.library import DTYPES, library, struct_fields
from .codec import Codec, parts

# Fewer elements are not worth a thread.
LEAST_ELEMS = 1 << 16

_CODEC = "dtype block bits"


class EncodeJob(ctypes.Structure):
    _fields_ = struct_fields(
        c_void_p="values payload scales", c_int64="num_elems", c_float="of_largest", c_int32=_CODEC
    )


class DecodeJob(ctypes.Structure):
    _fields_ = struct_fields(c_void_p="payload scales out", c_int64="row_bytes num_rows num_elems", c_int32=_CODEC)


def is_compiled(codec: Codec) -> bool:
    return codec.is_integer and not codec.is_asymmetric and not codec.is_stochastic and library() is not None


def encode(codec: Codec, values: Tensor, rows: Tensor) -> None:
    num_elems = values.numel() // len(rows)
    where = parts(codec, num_elems)
    rows[:, where.payload_bytes : where.scales_at].zero_()
    rows[:, where.scales_at + 4 * where.num_blocks :].zero_()
    for row, part in zip(rows, values.view(len(rows), num_elems), strict=True):
        job = EncodeJob(
            values=part.data_ptr(),
            payload=row.data_ptr(),
            scales=row.data_ptr() + where.scales_at,
            num_elems=num_elems,
            of_largest=1.0 / codec.largest,
            **_numbers(codec, values),
        )
        _in_threads(_functions().shardwise_encode, job, where.num_blocks, codec.block)


def decode_sum(codec: Codec, rows: Tensor, out: Tensor) -> None:
    where = parts(codec, out.numel())
    job = DecodeJob(
        payload=rows.data_ptr(),
        scales=rows.data_ptr() + where.scales_at,
        out=out.data_ptr(),
        row_bytes=rows.stride(0),
        num_rows=len(rows),
        num_elems=out.numel(),
        **_numbers(codec, out),
    )
    _in_threads(_functions().shardwise_decode_sum, job, where.num_blocks, codec.block * len(rows))


def _numbers(codec: Codec, values: Tensor) -> dict[str, int]:
    return {"dtype": DTYPES[values.dtype], "block": codec.block, "bits": 8 if codec.kind == "int8" else 4}


def _functions() -> ctypes.CDLL:
    found = library()
    assert found is not None
    return found


def _in_threads(function: Callable[..., Any], job: ctypes.Structure, num_blocks: int, block_elems: int) -> None:
    """Run on as many threads as torch would use. ctypes gives the GIL back while the function runs."""
    num_threads = max(1, min(torch.get_num_threads(), num_blocks * block_elems // LEAST_ELEMS))
    ends = [num_blocks * index // num_threads for index in range(num_threads + 1)]

    def run(index: int) -> None:
        function(ctypes.byref(job), ctypes.c_int64(ends[index]), ctypes.c_int64(ends[index + 1]))

    if num_threads == 1:
        run(0)
    else:
        list(_pool(num_threads).map(run, range(num_threads)))


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="codec")
