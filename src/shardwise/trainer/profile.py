"""A trace of three steps, for chrome://tracing or Perfetto, with the engine's gathers, reductions and updates by unit.

The first two steps are left out: they allocate, compile, and learn the order of the units.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule

FILE = "trace-rank-0.json.gz"
NUM_BEFORE = 2
NUM_TRACED = 3


@contextmanager
def traced_steps(
    folder: Path, device_type: str, settle: Callable[[], None], drain: Callable[[], None]
) -> Iterator[Callable[[], None]]:
    """Trace what runs in the context. Yield a function that has to be called at the end of each step.

    `settle` must wait for every collective in flight: torch's profiler crashes on a gloo operation that begins while it
    runs and ends when it does not. `drain` must wait for updates on the host. It is called only before the first and
    after the last step: between them updates overlap with the next forward, as they do without the profiler.
    """
    profiler = profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device_type == "cuda" else [])],
        schedule=schedule(wait=NUM_BEFORE - 1, warmup=1, active=NUM_TRACED, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(folder / FILE)),
        experimental_config=_ExperimentalConfig(profile_all_threads=True),  # host updates run in a thread
        acc_events=True,  # otherwise torch warns about discarded cycles
    )
    num_left = NUM_BEFORE + NUM_TRACED

    def step() -> None:
        nonlocal num_left
        if num_left == 0:
            return
        settle()
        if num_left in (NUM_TRACED + 1, 1):
            drain()
        profiler.step()
        num_left -= 1
        if num_left == 0:
            profiler.stop()

    profiler.start()
    # No `finally`: after an error, collectives may never end. Waiting would hide the error, and stopping could crash.
    yield step
    if num_left:
        settle()
        drain()
        profiler.stop()
