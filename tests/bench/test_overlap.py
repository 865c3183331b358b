"""What of a step went on at the same time: intervals that are known, and traces as torch writes them."""

import gzip
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import record_function

from shardwise.bench.overlap import Interval, from_trace, in_words, overlap_in, overlap_of, segments, trace


def test_a_step_in_figures() -> None:
    seen = overlap_of(
        {
            "compute": [(10, 14), (13, 16), (18, 19)],
            "host to device": [(8, 11)],
            "device to host": [(15, 17), (15.5, 16.5)],
            "host update": [(17, 25)],
            "collectives": [],
        },
        window=(10, 20),
    )
    assert seen.step_s == 10
    assert seen.busy_s == {"compute": 7, "host to device": 1, "device to host": 2, "host update": 3}
    assert seen.beside_compute_s == {"host to device": 1, "device to host": 1, "host update": 1}
    assert seen.idle_s == 0
    assert in_words(seen).splitlines() == [
        "step               10.0000 s",
        "compute             7.0000 s   70.0% of the step",
        "host to device      1.0000 s   10.0% of the step, 100.0% of it during compute",
        "device to host      2.0000 s   20.0% of the step,  50.0% of it during compute",
        "host update         3.0000 s   30.0% of the step,  33.3% of it during compute",
        "nothing             0.0000 s    0.0% of the step",
    ]


lists = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1])))


def instants(intervals: list[Interval]) -> set[int]:
    return {instant for begin, end in intervals for instant in range(int(begin), int(end))}


@settings(deadline=None)
@given(lists, lists)
def test_intervals_are_sets_of_instants(some: list[Interval], others: list[Interval]) -> None:
    window, one, two = set(range(5, 35)), instants(some), instants(others)
    seen = overlap_of({"compute": some, "collectives": others}, (5, 35))
    assert seen.busy_s.get("compute", 0) == len(one & window)
    assert seen.busy_s.get("collectives", 0) == len(two & window)
    assert seen.beside_compute_s.get("collectives", 0) == len(one & two & window)
    assert seen.idle_s == len(window - one - two)
    alone = [piece for piece, kinds in segments({"one": some, "two": others}) if kinds == {"one"}]
    assert instants(alone) == one - two


def event(category: str, name: str, begin: float, end: float, correlation: int = 0, thread: int = 1) -> dict[str, Any]:
    args = {"correlation": correlation} if correlation else {}
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin, "tid": thread, "args": args}


def test_a_trace_of_a_gpu_is_read_from_the_first_kernel_of_its_second_step() -> None:
    """The host runs ahead: it launches at 100 what the device begins at 150."""
    steps = [event("user_annotation", f"ProfilerStep#{n}", 100 * n, 100 * n + 90) for n in range(3)]
    launches = [event("cuda_runtime", "cudaLaunchKernel", 100 * n + 5, 100 * n + 6, n + 1) for n in range(3)]
    kernels = [event("kernel", "gemm", 100 * n + 50, 100 * n + 110, n + 1, 7) for n in range(3)]
    others = [
        event("kernel", "ncclDevKernel_AllGather", 160, 170, 9, 8),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 140, 170, 0, 9),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 230, 240, 0, 9),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 220, 225, 0, 7),
        event("user_annotation", "shardwise::host update blocks.3", 60, 180, 0, 3),
        event("user_annotation", "shardwise::gather blocks.3", 60, 180, 0, 1),
        event("cpu_op", "aten::mm", 150, 160),
        {"ph": "M", "name": "process_name"},
    ]
    seen = from_trace([*steps, *launches, *kernels, *others], "shardwise::host update")
    assert seen.step_s == pytest.approx(100e-6)
    assert seen.busy_s == pytest.approx(
        {
            "compute": 60e-6,
            "collectives": 10e-6,
            "host to device": 20e-6,
            "device to host": 10e-6,
            "host update": 30e-6,
        }
    )
    assert seen.beside_compute_s == pytest.approx(
        {"collectives": 10e-6, "host to device": 20e-6, "device to host": 0, "host update": 30e-6}
    )
    assert seen.idle_s == pytest.approx(30e-6)
    assert "host update" not in from_trace([*steps, *launches, *kernels, *others], "").busy_s


def test_updates_of_another_thread_are_in_the_trace(tmp_path: Path) -> None:
    """Each step leaves an update to a thread, which is at work while the step computes on."""
    x = torch.randn(128, 128)
    wants, is_done, stop = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

    def update() -> None:
        while wants.acquire() and not stop.is_set():
            with record_function("shardwise::host update blocks.0"):
                time.sleep(0.005)  # as one long operation that leaves the interpreter to others
            is_done.release()

    def step() -> None:
        wants.release()
        while not is_done.acquire(blocking=False):
            x @ x

    thread = threading.Thread(target=update)
    thread.start()
    file = tmp_path / "zero3-0.6.trace.json.gz"
    try:
        trace(step, lambda: None, "cpu", file)
    finally:
        stop.set()
        wants.release()
        thread.join()
    with gzip.open(file) as opened:
        names = {event["name"] for event in json.load(opened)["traceEvents"]}
    assert {"aten::mm", "shardwise::host update blocks.0"} <= names
    seen = overlap_in(file, "shardwise::host update")
    assert 0 < seen.busy_s["compute"] <= seen.step_s
    assert 0 < seen.beside_compute_s["host update"] <= seen.busy_s["host update"]
    assert "host update" in (tmp_path / "zero3-0.6.overlap.txt").read_text()
