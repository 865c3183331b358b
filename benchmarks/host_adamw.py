"""The one-pass host AdamW beside torch's fused AdamW with casts, in one run.

    python -m benchmarks.host_adamw [--elems 16,64] [--threads 1,2] [--rounds 9] [--pages small,huge] [--torchao]
                                    [--out benchmarks/results]

A bf16 gradient comes in, fp32 weights and moments are updated, bf16 weights go out. torch does it in three passes (cast
into a buffer, update, cast), the host update in one. A round runs every contender once, on the same arrays; ratios are
taken within a round. GB/s are of what a contender has to read and write at least. `copy` is a plain copy, as torch does
it: what the memory gives. Processor time is that of all threads, and says more where others use the machine, too.
"""

import argparse
import datetime
import mmap
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from shardwise.bench.pages import commit, processor
from shardwise.core.native.adamw import AdamSettings, AdamUpdate, Moment8, adamw
from shardwise.core.native.cores import cores_for
from shardwise.core.native.library import library

from .pages import benchmark_page, show, table

SETTINGS = AdamSettings(1e-4, 0.9, 0.95, 1e-8, 0.1, decoupled=True, maximize=False, fused=True, step=10)
HUGE_PAGE = 2 << 20
Rows = tuple[Tensor, Tensor, Tensor]
LOOP = AdamSettings(1e-4, 0.9, 0.95, 1e-8, 0.1, decoupled=True, maximize=False, fused=False, step=10)


@dataclass(frozen=True)
class Contender:
    name: str
    bytes_per_elem: int
    run: Callable[[], object]
    peer: str | None = None  # whose time is divided by this one's


def zeros(num_elems: int, dtype: torch.dtype, pages: str) -> Tensor:
    """`small` is what torch gives; `huge` asks the kernel for pages of 2 MiB."""
    if pages == "small":
        return torch.zeros(num_elems, dtype=dtype)
    memory = mmap.mmap(-1, num_elems * dtype.itemsize + HUGE_PAGE)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE
    return whole[begin : begin + num_elems * dtype.itemsize].view(dtype).zero_()


class Arrays:
    """What all contenders work on, turn by turn."""

    def __init__(self, num_elems: int, pages: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.master = zeros(num_elems, torch.float32, pages).normal_(generator=generator)
        self.grad = zeros(num_elems, torch.bfloat16, pages).normal_(generator=generator)
        self.exp_avg, self.exp_avg_sq, self.wide_grad = (zeros(num_elems, torch.float32, pages) for _ in range(3))
        self.out = zeros(num_elems, torch.bfloat16, pages)
        new = [zeros(num_elems, torch.float32, pages) for _ in range(3)]
        self.new: Rows = (new[0], new[1], new[2])
        self.codes = [zeros(num_elems, torch.uint8, pages) for _ in range(2)]
        self.scales = [torch.zeros(num_elems // 256) for _ in range(2)]
        # Of an even spacing: what lies in a map changes no time.
        self.maps = [(torch.arange(256) - 127) / 128, torch.arange(256) / 255]

    def torch_passes(self, settings: AdamSettings) -> None:
        self.wide_grad.copy_(self.grad)
        adam(
            [self.master],
            [self.wide_grad],
            [self.exp_avg],
            [self.exp_avg_sq],
            [],
            [torch.tensor(float(settings.step - 1))],
            foreach=False,
            fused=settings.fused,
            amsgrad=False,
            beta1=settings.beta1,
            beta2=settings.beta2,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            eps=settings.eps,
            maximize=False,
            decoupled_weight_decay=True,
        )
        self.out.copy_(self.master)

    def one_pass(self, settings: AdamSettings, cores: tuple[int, ...], new: Rows | None = None) -> None:
        adamw(AdamUpdate(self.master, self.exp_avg, self.exp_avg_sq, self.grad, self.out, settings, 1.0, new), cores)

    def one_pass8(self, cores: tuple[int, ...]) -> None:
        moments = (Moment8(*each) for each in zip(self.codes, self.scales, self.maps, strict=True))
        adamw(AdamUpdate(self.master, *moments, self.grad, self.out, SETTINGS, 1.0), cores)

    def torchao(self) -> Callable[[], object]:
        """Its own state; compiled at the first call."""
        from torchao.optim import AdamW8bit

        param = torch.nn.Parameter(self.master)
        param.grad = self.wide_grad
        optimizer = AdamW8bit([param], lr=SETTINGS.lr, weight_decay=SETTINGS.weight_decay)

        def run() -> None:
            self.wide_grad.copy_(self.grad)
            optimizer.step()
            self.out.copy_(self.master)

        return run

    def contenders(self, cores: tuple[int, ...], has_torchao: bool) -> list[Contender]:
        fused, loop, torchao = "torch fused, casts", "torch loop, casts", "torchao 8-bit, casts"
        return [
            Contender("copy", 8, partial(self.wide_grad.copy_, self.master)),
            Contender(fused, 40, partial(self.torch_passes, SETTINGS)),
            Contender("one pass, order of fused", 28, partial(self.one_pass, SETTINGS, cores), fused),
            Contender("the same into other memory", 28, partial(self.one_pass, SETTINGS, cores, self.new), fused),
            Contender(loop, 92, partial(self.torch_passes, LOOP)),
            Contender("one pass, order of loop", 28, partial(self.one_pass, LOOP, cores), loop),
            *([Contender(torchao, 28, self.torchao())] if has_torchao else []),
            Contender("one pass, 8-bit", 16, partial(self.one_pass8, cores), torchao if has_torchao else fused),
        ]


def rows(millions: int, num_threads: int, pages: str, rounds: int, has_torchao: bool) -> list[dict[str, Any]]:
    """One for each contender; the first round is not counted."""
    num_elems = millions << 20
    torch.set_num_threads(num_threads)
    cores = cores_for(0, 1)[:num_threads]
    contenders = Arrays(num_elems, pages).contenders(cores, has_torchao)
    names = [contender.name for contender in contenders]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    busy: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for contender in contenders:
            began, began_busy = time.perf_counter(), time.process_time()
            contender.run()
            if turn:
                seconds[contender.name].append(time.perf_counter() - began)
                busy[contender.name].append(time.process_time() - began_busy)

    def row(contender: Contender) -> dict[str, Any]:
        name, peer, median = contender.name, contender.peer, statistics.median(seconds[contender.name])
        return {
            "elems": num_elems,
            "threads": num_threads,
            "pages": pages,
            "contender": name,
            "seconds": median,
            "giga_elems_per_s": num_elems / median / 1e9,
            "gigabytes_per_s": contender.bytes_per_elem * num_elems / median / 1e9,
            "peer": peer,
            "ratios": quotients(seconds[peer], seconds[name]) if peer else [],
            "busy_ratios": quotients(busy[peer], busy[name]) if peer else [],
        }

    return [row(contender) for contender in contenders]


def quotients(above: list[float], below: list[float]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=True)]


def table_of(measured: list[dict[str, Any]]) -> str:
    heads = ("Mi elements", "threads", "pages", "contender", "G/s", "GB/s", "its peer / it", "in processor time")
    lines = []
    for row in measured:
        name = f"{row['contender']} / {row['peer']}" if row["peer"] else row["contender"]
        speeds = f"{row['giga_elems_per_s']:.3f}", f"{row['gigabytes_per_s']:.1f}"
        ratios = spread(row["ratios"]), spread(row["busy_ratios"])
        lines.append((str(row["elems"] >> 20), str(row["threads"]), row["pages"], name, *speeds, *ratios))
    return table(heads, lines)


def spread(ratios: list[float]) -> str:
    return f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else ""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elems", default="16,64", help="sizes in Mi, which should exceed the caches")
    parser.add_argument("--threads", default=str(len(os.sched_getaffinity(0))))
    parser.add_argument("--pages", default="small", help="small, huge or both")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--torchao", action="store_true", help="its 8-bit AdamW as well, which has to be compiled")
    parser.add_argument("--out", type=Path, help="a folder for the dated results")
    return parser.parse_args()


def main() -> None:
    options = parse()
    now = datetime.datetime.now()
    measured = [
        row
        for size in options.elems.split(",")
        for threads in options.threads.split(",")
        for pages in options.pages.split(",")
        for row in rows(int(size), int(threads), pages, options.rounds, options.torchao)
    ]
    machine = {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "compiled": library() is not None,
        "load": os.getloadavg()[0],
        "commit": commit(),
    }
    note = " ".join((__doc__ or "").split("\n\n")[-1].split())
    page = benchmark_page(
        "host_adamw",
        "Host AdamW beside torch's",
        now,
        machine,
        figures={"rows": measured},
        before=[note],
        after=[table_of(measured)],
    )
    show(page, options.out)


if __name__ == "__main__":
    main()
