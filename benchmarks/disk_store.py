"""The store's disk beside plain readers and writers of the same disk, in one run.

    python -m benchmarks.disk_store --folder /nvme [--gigabytes 4] [--repetitions 5] [--out benchmarks/results]

Plain ones do nothing but read or write a reserved file with O_DIRECT, in order: one thread with large blocks, or
several with smaller ones; the best of them counts, in each repetition anew. Ours moves the same bytes in chunks as the
optimizer does, with checksums, through a few windows of memory; where it does both at once, a chunk is written back as
soon as it was read, while the next ones are being read. Needs torch, and a C compiler for what ours does in C.
"""

import argparse
import datetime
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CDLL
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.base.files import is_direct, read_at, write_at
from shardwise.bench.pages import commit, processor
from shardwise.core.native.library import library
from shardwise.core.offload.arena import Arena
from shardwise.core.offload.disk import Disk, reserve
from shardwise.core.schedule.state_bytes import padded_bytes

from .pages import benchmark_page, show, spread, table

CHUNK_BYTES = 96 << 20  # master and two moments of 8Mi elements
NUM_WINDOWS = 4
PLAIN = {"1 thread, 64 MiB": (1, 64 << 20), "1 thread, 8 MiB": (1, 8 << 20), "4 threads, 8 MiB": (4, 8 << 20)}
DOING: dict[str, tuple[Callable[[int, memoryview, int], Any], ...]] = {
    "write": (write_at,),
    "read": (read_at,),
    "both at once": (read_at, write_at),
}
Found = dict[str, dict[str, list[dict[str, float]]]]  # by way and contender, one for each repetition


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to use; nothing is left in it")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="to move each time; a file has as many")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a folder for the dated results")
    return parser.parse_args()


# ---------------------------------------------------------------------------------------------------------
# the disk itself


class Plain:
    """Threads that take one block after the other of a file, and read or write it."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.file = reserve(folder, num_bytes)
        size = 2 * max(num * block for num, block in PLAIN.values())
        self._memory = Arena(size, pin=False).take(size, torch.uint8, "blocks")  # with huge pages, as ours
        fill(self._memory)

    def go(self, way: str, num_threads: int, block_bytes: int) -> None:
        threads, view = [], memoryview(self._memory.numpy())
        for do in DOING[way]:
            blocks = iter(range(0, self._num_bytes, block_bytes))  # one `next` at a time: the interpreter's lock
            for _ in range(num_threads):
                threads.append(threading.Thread(target=self._work, args=(do, view[:block_bytes], blocks)))
                view = view[block_bytes:]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, do: Callable[[int, memoryview, int], Any], view: memoryview, blocks: Iterator[int]) -> None:
        for offset in blocks:
            do(self.file, view[: self._num_bytes - offset], offset)

    def close(self) -> None:
        os.close(self.file)


# ---------------------------------------------------------------------------------------------------------
# ours


class Ours:
    def __init__(self, folder: Path, num_bytes: int, library: CDLL | None) -> None:
        self.disk = Disk(folder, num_bytes, library)
        self._regions = [self.disk.region(CHUNK_BYTES, f"chunk {n}") for n in range(num_bytes // CHUNK_BYTES)]
        arena = Arena(padded_bytes([CHUNK_BYTES] * NUM_WINDOWS), pin=False)
        self._windows = [arena.take(CHUNK_BYTES, torch.uint8, f"window {n}") for n in range(NUM_WINDOWS)]
        for window in self._windows:
            fill(window)

    def go(self, way: str) -> None:
        if way == "both at once":
            self._update()
            return
        start = self.disk.put if way == "write" else self.disk.fetch
        free, leaving = deque(self._windows), deque[Any]()
        for region in self._regions:
            if not free:
                window, pending = leaving.popleft()
                pending.wait()
                free.append(window)
            window = free.popleft()
            leaving.append((window, start(region, window)))
        for _, pending in leaving:
            pending.wait()

    def go_beside_python(self, way: str) -> None:
        with busy_interpreter():
            self.go(way)

    def _update(self) -> None:
        """As an optimizer: chunk after chunk is read ahead, and written back."""
        free, coming, leaving = deque(self._windows), deque[Any](), deque[Any]()
        ahead = iter(self._regions)
        for region in self._regions:
            while len(coming) < 2 and (free or leaving) and (following := next(ahead, None)) is not None:
                if not free:
                    window, pending = leaving.popleft()
                    pending.wait()
                    free.append(window)
                window = free.popleft()
                coming.append((window, self.disk.fetch(following, window)))
            window, pending = coming.popleft()
            pending.wait()
            leaving.append((window, self.disk.put(region, window)))
        for _, pending in leaving:
            pending.wait()


@contextmanager
def busy_interpreter() -> Iterator[None]:
    """Python that computes beside it, as the training's own may, and gives the lock away only when it must."""
    is_over = False

    def spin() -> None:
        while not is_over:
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        is_over = True
        thread.join()


# ---------------------------------------------------------------------------------------------------------
# figures


def fill(row: Tensor) -> None:
    """Bytes that no disk can compress."""
    some = torch.randint(-(2**63), 2**63 - 1, (1 << 20,))
    for part in row.view(torch.int64).split(some.numel()):
        part.copy_(some[: part.numel()])


def measured(do: Callable[[], object], num_bytes: int) -> dict[str, float]:
    began, used = time.perf_counter(), time.process_time()
    do()
    took, used = time.perf_counter() - began, time.process_time() - used
    return {"gigabytes_per_s": num_bytes / 1e9 / took, "processor_ms_per_gigabyte": 1e12 * used / num_bytes}


def measure(options: argparse.Namespace) -> Found:
    num_bytes = max(1, round(options.gigabytes * 1e9 / CHUNK_BYTES)) * CHUNK_BYTES
    plain = Plain(options.folder, num_bytes)
    ours, in_python = (Ours(options.folder, num_bytes, how) for how in (library(), None))
    print(f"{num_bytes / 1e9:.2f} GB each; O_DIRECT: {is_direct(plain.file)}", flush=True)
    contenders: dict[str, Callable[[str], None]] = {
        f"plain, {name}": partial(plain.go, num_threads=num, block_bytes=block) for name, (num, block) in PLAIN.items()
    }
    contenders["shardwise"] = ours.go
    contenders["shardwise, interpreter busy"] = ours.go_beside_python
    contenders["shardwise without C"] = in_python.go
    for name in contenders:  # blocks that were never written are not on the disk yet
        contenders[name]("write")
    names = deque(contenders)
    found: Found = {way: {name: [] for name in names} for way in DOING}
    for repetition in range(options.repetitions):
        for way in DOING:
            for name in names:
                seen = measured(partial(contenders[name], way), len(DOING[way]) * num_bytes)
                found[way][name].append(seen)
                told = f"{seen['gigabytes_per_s']:.2f} GB/s"
                print(f"{repetition + 1}/{options.repetitions} {way}: {name} {told}", flush=True)
        names.rotate(1)
    for each in (ours.disk, in_python.disk, plain):
        each.close()
    return found


def tables(found: Found) -> list[str]:
    each_way = []
    for way, by_name in found.items():
        rates = {name: [one["gigabytes_per_s"] for one in each] for name, each in by_name.items()}
        best = [max(each) for each in zip(*(rates[f"plain, {name}"] for name in PLAIN), strict=True)]
        rows = []
        for name, each in rates.items():
            shares = [a / b for a, b in zip(each, best, strict=True)]
            used = [one["processor_ms_per_gigabyte"] for one in by_name[name]]
            rows.append((name, spread(each), spread(shares), spread(used, 0)))
        each_way.append(table((way, "GB/s", "of the best plain one", "processor ms/GB"), rows))
    return each_way


NOTE = """Medians over the repetitions (min-max). Shares are of the best plain one within a repetition; of both at once,
all bytes read and written count. `interpreter busy`: a thread of the same process runs Python that gives its lock away
only when it must. `without C`: as where there is no compiler, and torch sums."""


def main() -> None:
    options = parse()
    found = measure(options)
    machine = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "torch": torch.__version__,
        "commit": commit(),
    }
    note = " ".join(NOTE.split())
    page = benchmark_page(
        "disk_store",
        "The store's disk beside the disk itself",
        datetime.datetime.now(),
        machine,
        figures={"note": note, "runs": found},
        before=[f"{options.gigabytes:g} GB, {options.repetitions} repetitions. {note}"],
        after=tables(found),
    )
    show(page, options.out)


if __name__ == "__main__":
    main()
