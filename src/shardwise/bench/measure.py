"""What one worker process does: set one contender up, run its steps, and write down what was seen.

    python -m shardwise.bench.measure CASE ANSWER

CASE is a case as JSON, ANSWER the file that the result goes to, or what went wrong. The steps are timed without the
host ever waiting in between: on a GPU by events recorded at the end of consecutive steps on the compute stream. So
work that is started early for the next step counts where it belongs.
"""

import gc
import gzip
import itertools
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..base.errors import ConfigurationError
from ..base.processes import end_with_parent
from . import fabric
from .calls import count_calls
from .case import Case, case_from_json
from .contenders import find
from .model import batches_of
from .names import OFFLOADED_FSDP2, SOLO, label
from .overlap import from_trace, in_words
from .step import device_of

SETTLE = 2  # steps in which the allocator takes again what the reset gave back
STEPS_BEFORE_CALLS = 4
LONGEST = 300  # characters of an error; a compiler's first line may be a page

Answer = dict[str, Any]


def main(case: Case, file: Path) -> int:
    try:
        answer = measure(case, int(os.environ["RANK"]))
    except Exception as error:  # noqa: BLE001, a rank reports whatever was raised
        traceback.print_exc()
        # The earliest of all ranks is the cause, the others lost their partner.
        file.write_text(json.dumps({"at": time.time(), **failure(error)}))
        return 1
    file.write_text(json.dumps(answer))
    if dist.is_initialized():
        dist.barrier()
        with suppress(Exception):  # everything is written down
            dist.destroy_process_group()
    return 0


def failure(error: Exception) -> Answer:
    """What happened, in words for a row of the table."""
    said = str(error).strip().partition("\n")[0]
    if isinstance(error, ModuleNotFoundError):
        return {"status": "missing", "error": f"{error.name} is not installed"}
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
        return {"status": "oom", "error": said}
    if isinstance(error, ConfigurationError):
        return {"status": "refused", "error": said}
    return {"status": "failed", "error": f"{type(error).__name__}: {said[:LONGEST]}"}


def measure(case: Case, rank: int) -> Answer:
    begin_s = time.perf_counter()
    if case.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    join(case)
    run = find(case.contender)(case)
    device = device_of(case)
    clock = DeviceClock() if case.device == "cuda" else HostClock()
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
    before = wires(case)
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
            wire: {what: (total - before[wire][what]) / case.steps for what, total in totals.items()}
            for wire, totals in wires(case).items()
        },
        "moved_bytes": run.moved_bytes(),
        "device": torch.cuda.get_device_name() if case.device == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    if case.trace and rank == 0:
        file = trace_file(case)
        trace(lambda: run.step(batches[-1]), clock.synchronise, case.device, file)
        answer["overlap"] = overlap_in(file, run.host_updates)
    elif case.trace:
        for _ in range(TRACED_STEPS):
            run.step(batches[-1])
    return answer


def join(case: Case) -> None:
    """The process group that the contender will find."""
    if case.contender in SOLO:
        return
    if case.fabric:
        fabric.start(fabric.parse(case.fabric))
    elif case.device == "cuda":
        # What FSDP2 has on the host is summed there when gradients are clipped.
        backend = "cpu:gloo,cuda:nccl" if case.contender == OFFLOADED_FSDP2 else "nccl"
        dist.init_process_group(backend, device_id=device_of(case), timeout=timedelta(minutes=10))
    else:
        dist.init_process_group("gloo", timeout=timedelta(minutes=10))


def wires(case: Case) -> dict[str, dict[str, float]]:
    """Traffic of this rank since the start, by wire of the emulated fabric."""
    if not case.fabric or case.contender in SOLO:
        return {}
    seconds, moved = fabric.busy_s(), fabric.moved_bytes()
    return {wire: {"seconds": seconds[wire], "bytes": moved[wire]} for wire in seconds}


class DeviceClock:
    """Ends of steps as events on the compute stream, and the allocator's peaks since `forget`."""

    def __init__(self) -> None:
        self.events: list[torch.cuda.Event] = []

    def synchronise(self) -> None:
        torch.cuda.synchronize()

    def forget(self) -> None:
        """What the set-up left in the allocator is given back; the next steps say what is needed."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def tick(self) -> None:
        self.events.append(torch.cuda.Event(enable_timing=True))
        self.events[-1].record()

    def seconds(self) -> list[float]:
        torch.cuda.synchronize()
        return [earlier.elapsed_time(later) * 1e-3 for earlier, later in itertools.pairwise(self.events)]

    def memory(self) -> dict[str, float]:
        peaks = torch.cuda.memory_stats()
        kinds = ("allocated", "active", "reserved")
        return {f"{kind}_gb": peaks[f"{kind}_bytes.all.peak"] / 1e9 for kind in kinds} | host_memory()


class HostClock:
    """The same for the CPU."""

    def __init__(self) -> None:
        self.instants: list[float] = []

    def synchronise(self) -> None:
        pass

    def forget(self) -> None:
        pass

    def tick(self) -> None:
        self.instants.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.instants)]

    def memory(self) -> dict[str, float]:
        return host_memory()


STATUS = Path("/proc/self/status")


def host_memory() -> dict[str, float]:
    """The most that this process ever had in the host's memory, the set-up included; Linux alone says it.

    Every contender has a process of its own, so this is nobody else's. What its own children have is not counted.
    """
    if not STATUS.exists():
        return {}
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return {"host_gb": int(lines["VmHWM"].split()[0]) * 1024 / 1e9}


STEPS_IN_TRACE = 3  # as `overlap` wants them
TRACED_STEPS = 1 + STEPS_IN_TRACE


def trace_file(case: Case) -> Path:
    words = [label(case.contender), case.shape.name, str(case.shape.tokens), case.reduce]
    if case.fabric:
        where = fabric.parse(case.fabric)
        words.append(f"{where.num_nodes}x{where.node_size}-{where.intra.gigabytes_per_s:g}GBs")
    return Path(case.trace) / (re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(words)) + ".trace.json.gz")


def trace(step: Callable[[], object], synchronise: Callable[[], None], device: str, file: Path) -> None:
    """A chrome trace of steps that run into each other, with what all threads of this process do."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile, schedule

    file.parent.mkdir(parents=True, exist_ok=True)
    with profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda"),
        schedule=schedule(wait=0, warmup=1, active=STEPS_IN_TRACE, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(file)),
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
        acc_events=True,  # of the one cycle there is; without it torch warns of cycles that are forgotten
    ) as profiler:
        for number in range(TRACED_STEPS):
            step()
            if number == TRACED_STEPS - 1:
                synchronise()
            profiler.step()


def overlap_in(file: Path, host_updates: str) -> Answer:
    """In figures; in words it goes beside the trace."""
    with gzip.open(file) as trace:
        seen = from_trace(json.load(trace)["traceEvents"], host_updates)
    file.with_suffix("").with_suffix("").with_suffix(".overlap.txt").write_text(in_words(seen) + "\n")
    return asdict(seen)


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(case_from_json(sys.argv[1]), Path(sys.argv[2])))
