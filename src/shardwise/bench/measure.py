"""The worker process of a benchmark: sets up one contender, times its steps, and writes the result to a file.

    python -m shardwise.bench.measure CASE ANSWER

CASE is a `Case` as JSON, ANSWER the file for the result or the error. The host does not synchronise between timed
steps: on a GPU, an event is recorded on the compute stream at the end of each step. If a step already starts work of
the next one (a gather, for example), waiting for that work counts in the next step.
"""

import gc
import itertools
import json
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from ..base.errors import ConfigurationError
from ..base.processes import end_with_parent
from ..planner.hardware.links import parse
from . import fabric
from .case import OFFLOADED_FSDP2, SINGLE_PROCESS, Case, case_from_json
from .contenders import find
from .launch import Calls
from .model import batches_of, device_of
from .overlap import TRACED_STEPS, overlap_in, trace, trace_file

SETTLE = 2  # warm-up steps that follow `Clock.forget`, while the allocator reserves its memory again
STEPS_BEFORE_CALLS = 4
LONGEST = 300  # characters of an error message; the first line of a compiler's error can be very long

STATUS = Path("/proc/self/status")
Answer = dict[str, Any]


def main(case: Case, file: Path) -> int:
    try:
        answer = measure(case, int(os.environ["RANK"]))
    except Exception as error:  # noqa: BLE001, a rank reports whatever was raised
        traceback.print_exc()
        # The earliest failure of all ranks is the cause; the others failed because of it.
        file.write_text(json.dumps({"at": time.time(), **failure(error)}))
        return 1
    file.write_text(json.dumps(answer))
    if dist.is_initialized():
        dist.barrier()
        with suppress(Exception):  # the answer is written already
            dist.destroy_process_group()
    return 0


def failure(error: Exception) -> Answer:
    """Return the status and the error message for this contender's row of the table."""
    first_line = str(error).strip().partition("\n")[0]
    if isinstance(error, ModuleNotFoundError):
        return {"status": "missing", "error": f"{error.name} is not installed"}
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
        return {"status": "oom", "error": first_line}
    if isinstance(error, ConfigurationError):
        return {"status": "refused", "error": first_line}
    return {"status": "failed", "error": f"{type(error).__name__}: {first_line[:LONGEST]}"}


def measure(case: Case, rank: int) -> Answer:
    begin_s = time.perf_counter()
    if case.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    join(case)
    run = find(case.contender)(case)
    device = device_of(case)
    clock = Clock(case.device == "cuda")
    clock.synchronise()
    setup_s = time.perf_counter() - begin_s
    num_steps = STEPS_BEFORE_CALLS + 1 if case.count_calls else case.warmup + case.steps
    batches = batches_of(case, rank, device, run.input_dtype, num_steps)
    if case.count_calls:
        for batch in batches[:-1]:
            run.step(batch)
        return {"calls": count_calls(lambda: run.step(batches[-1]))}

    losses = []
    for step, batch in enumerate(batches[: case.warmup]):
        if step == max(case.warmup - SETTLE, 0):
            clock.forget()
        losses.append(run.step(batch))
    clock.synchronise()
    warmup_s = time.perf_counter() - begin_s - setup_s
    wires_before = wires(case)
    clock.tick()
    for batch in batches[case.warmup :]:
        losses.append(run.step(batch))
        clock.tick()
    answer = {
        "seconds": clock.seconds(),
        "memory": clock.memory(),
        "setup_s": setup_s,
        "warmup_s": warmup_s,
        "losses": torch.stack(losses).tolist(),
        "wires": {
            wire: {key: (total - wires_before[wire][key]) / case.steps for key, total in totals.items()}
            for wire, totals in wires(case).items()
        },
        "moved_bytes": run.moved_bytes(),
        "device": torch.cuda.get_device_name() if case.device == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    if case.trace and rank == 0:
        file = trace_file(case)
        trace(lambda: run.step(batches[-1]), clock.synchronise, case.device, file)
        answer["overlap"] = asdict(overlap_in(file, run.host_updates))
    elif case.trace:
        for _ in range(TRACED_STEPS):
            run.step(batches[-1])
    return answer


def join(case: Case) -> None:
    """Create the process group, unless the contender needs none."""
    if case.contender in SINGLE_PROCESS:
        return
    if case.fabric:
        fabric.start(parse(case.fabric))
    elif case.device == "cuda":
        # When gradients are clipped, offloaded FSDP2 reduces norms on the host, which needs gloo.
        backend = "cpu:gloo,cuda:nccl" if case.contender == OFFLOADED_FSDP2 else "nccl"
        dist.init_process_group(backend, device_id=device_of(case), timeout=timedelta(minutes=10))
    else:
        dist.init_process_group("gloo", timeout=timedelta(minutes=10))


def wires(case: Case) -> dict[str, dict[str, float]]:
    """Return busy seconds and bytes of this rank since the start, for each wire of the emulated fabric."""
    if not case.fabric or case.contender in SINGLE_PROCESS:
        return {}
    seconds, moved = fabric.busy_s(), fabric.moved_bytes()
    return {wire: {"seconds": seconds[wire], "bytes": moved[wire]} for wire in seconds}


class Clock:
    """Times steps and reads peak memory. On a GPU it records events on the compute stream."""

    def __init__(self, is_cuda: bool) -> None:
        self.is_cuda = is_cuda
        self.ticks: list[Any] = []  # events, or seconds

    def synchronise(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def forget(self) -> None:
        """Release memory that the allocator cached during the set-up, and reset the peaks."""
        if self.is_cuda:
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def tick(self) -> None:
        if self.is_cuda:
            self.ticks.append(torch.cuda.Event(enable_timing=True))
            self.ticks[-1].record()
        else:
            self.ticks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        self.synchronise()
        pairs = itertools.pairwise(self.ticks)
        return [begin.elapsed_time(end) * 1e-3 if self.is_cuda else end - begin for begin, end in pairs]

    def memory(self) -> dict[str, float]:
        """Return peak memory in GB. That of the host (Linux only) includes the set-up, but no child processes."""
        peaks = torch.cuda.memory_stats() if self.is_cuda else {}
        kinds = ("allocated", "active", "reserved") if self.is_cuda else ()
        return {f"{kind}_gb": peaks[f"{kind}_bytes.all.peak"] / 1e9 for kind in kinds} | host_memory()


def count_calls(function: Callable[[], object]) -> Calls:
    """Count the Python calls that one call of `function` makes, by "folder/file.py:function", also in new threads.

    Each start of a function and each resumption of a generator counts as a call. The backward is made to run in this
    thread, because calls in threads that torch has started cannot be counted.
    """
    by_name: Counter[str] = Counter()
    by_code: Counter[CodeType] = Counter()

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            by_code[frame.f_code] += 1

    threading.setprofile(on_event)
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(on_event)
        try:
            function()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    for code, times in list(by_code.items()):  # a thread that was started meanwhile may still count
        by_name[f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_qualname}"] += times
    return dict(by_name)


def host_memory() -> dict[str, float]:
    """Return the peak host memory of this process in GB. The process runs one contender only."""
    if not STATUS.exists():
        return {}
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return {"host_gb": int(lines["VmHWM"].split()[0]) * 1024 / 1e9}


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(case_from_json(sys.argv[1]), Path(sys.argv[2])))
