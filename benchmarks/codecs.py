"""How quickly codecs encode, decode and sum what they decode, beside a plain copy, in one run.

    python -m benchmarks.codecs [--device cpu|cuda] [--elems 16] [--codecs int8,int4,...] [--rows 8] [--rounds 9]
                                [--threads 2] [--dtype bf16] [--out benchmarks/results]

A round runs the copy and then everything else once, on the same arrays; shares of the copy's bandwidth are taken
within a round. GB/s are of what has to be read and written: the values and the encoded bytes, and for a sum all the
rows. The sum goes to fp32. On CUDA a time is between two events of the device, of several calls in a row. On a CPU the
last column has the same shares in processor time, of all threads, which says more where others use the machine, too.
"""

import argparse
import datetime
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardwise.base.dtypes import dtype_of
from shardwise.bench.pages import commit, processor
from shardwise.core.wire.codec import encoded_bytes, parse
from shardwise.core.wire.reference_codecs import decoder, encoder

from .pages import benchmark_page, show, table

CODECS = (
    "bf16,fp16,e4m3,e5m2,int8,int8:asymmetric,int8:stochastic,int4,int4:64,int4:2048,int4:asymmetric,int4:stochastic"
)
COPY = "copy"


@dataclass(frozen=True)
class Contender:
    codec: str
    what: str
    num_bytes: int
    run: Callable[[], object]


def contenders(names: list[str], num_elems: int, num_rows: int, dtype: torch.dtype, device: str) -> list[Contender]:
    values = torch.randn(num_elems, device=device).to(dtype)
    back, total = torch.empty_like(values), torch.empty(num_elems, device=device)
    value_bytes = num_elems * dtype.itemsize
    found = [Contender(COPY, COPY, 2 * value_bytes, partial(back.copy_, values))]
    for name in names:
        codec, size = parse(name), encoded_bytes(name, num_elems, dtype)
        rows = torch.empty(num_rows, size, dtype=torch.uint8, device=device)
        for index in range(num_rows):
            encoder(codec, values, rows[index : index + 1])(index)
        found += [
            Contender(name, "encode", value_bytes + size, partial(encoder(codec, values, rows[:1]), 1)),
            Contender(name, "decode", value_bytes + size, decoder(codec, rows[:1], back)),
            Contender(
                name, f"sum of {num_rows}", 4 * num_elems + num_rows * size, decoder(codec, rows, total, is_sum=True)
            ),
        ]
    return found


def seconds_on_cpu(run: Callable[[], object]) -> tuple[float, float]:
    """On the clock, and of the processor."""
    began, began_busy = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - began, time.process_time() - began_busy


def seconds_on_cuda(run: Callable[[], object], num_calls: int = 10) -> tuple[float, float]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(num_calls):
        run()
    end.record()
    end.synchronize()
    seconds = begin.elapsed_time(end) / 1e3 / num_calls
    return seconds, seconds


def measure(found: list[Contender], device: str, rounds: int) -> list[dict[str, Any]]:
    """A row for each; the first round is not counted."""
    clock = seconds_on_cuda if device == "cuda" else seconds_on_cpu
    rates: list[list[tuple[float, float]]] = [[] for _ in found]
    for turn in range(rounds + 1):
        for contender, seen in zip(found, rates, strict=True):
            seconds, busy = clock(contender.run)
            if turn:
                seen.append((contender.num_bytes / seconds / 1e9, contender.num_bytes / busy / 1e9))
    return [
        {
            "codec": contender.codec,
            "what": contender.what,
            "bytes": contender.num_bytes,
            "gigabytes_per_s": statistics.median(rate for rate, _ in seen),
            "shares_of_copy": [rate / copied for (rate, _), (copied, _) in zip(seen, rates[0], strict=True)],
            "busy_shares_of_copy": [rate / copied for (_, rate), (_, copied) in zip(seen, rates[0], strict=True)],
        }
        for contender, seen in zip(found, rates, strict=True)
    ]


def table_of(measured: list[dict[str, Any]], num_elems: int) -> str:
    heads = ("codec", "what", "bytes an element", "G elements/s", "GB/s", "share of copy", "in processor time")
    lines = []
    for row in measured:
        per_elem = row["bytes"] / num_elems
        speeds = f"{row['gigabytes_per_s'] / per_elem:.3g}", f"{row['gigabytes_per_s']:.4g}"
        shares = spread(row["shares_of_copy"]), spread(row["busy_shares_of_copy"])
        lines.append((row["codec"], row["what"], f"{per_elem:.3f}", *speeds, *shares))
    return table(heads, lines)


def spread(shares: list[float]) -> str:
    return f"**{statistics.median(shares):.2f}** ({min(shares):.2f}-{max(shares):.2f})"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--elems", type=int, default=16, help="in Mi; should exceed the caches")
    parser.add_argument("--codecs", default=CODECS)
    parser.add_argument("--rows", type=int, default=8, help="how many ranks' rows are summed")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", default="bf16", help="of the values")
    parser.add_argument("--out", type=Path, help="a folder for the dated results")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    now = datetime.datetime.now()
    torch.set_num_threads(options.threads)
    num_elems, dtype = options.elems << 20, dtype_of(options.dtype).torch
    found = contenders(options.codecs.split(","), num_elems, options.rows, dtype, options.device)
    measured = measure(found, options.device, options.rounds)
    machine = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else processor(),
        "threads": options.threads,
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
        "commit": commit(),
    }
    note = " ".join((__doc__ or "").split("\n\n")[-1].split())
    page = benchmark_page(
        "codecs",
        "Codecs beside a copy",
        now,
        machine,
        figures={"rows": measured},
        before=[note],
        after=[table_of(measured, num_elems)],
    )
    show(page, options.out, options.device)


if __name__ == "__main__":
    main()
