"""A trace of three steps, for chrome://tracing or Perfetto, with the engine's gathers, reductions and updates by unit.

The first two steps are left out: they allocate, compile, and learn the order of the units.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Self

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule

FILE = "trace-rank-0.json.gz"
NUM_BEFORE = 2
NUM_TRACED = 3


class Profile:
    """A context manager; `step` is called at the end of each step. Does nothing unless it is enabled.

    `settle` must wait for every collective in flight: torch's profiler crashes on a gloo operation that begins while it
    runs and ends when it does not. `drain` must wait for the host's updates. It is called only before the first and
    after the last step: between them updates overlap with the next forward, as they do without the profiler.
    """

    def __init__(
        self,
        folder: Path,
        enabled: bool,
        device_type: str,
        settle: Callable[[], None],
        drain: Callable[[], None] = lambda: None,
    ) -> None:
        self.file = folder / FILE
        self._settle, self._drain = settle, drain
        self._num_left = NUM_BEFORE + NUM_TRACED
        self._profiler: profile | None = None
        if enabled:
            self._profiler = profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device_type == "cuda" else [])],
                schedule=schedule(wait=NUM_BEFORE - 1, warmup=1, active=NUM_TRACED, repeat=1),
                on_trace_ready=self._write,
                experimental_config=_ExperimentalConfig(profile_all_threads=True),  # host updates run in a thread
                acc_events=True,  # otherwise torch warns about discarded cycles
            )

    def __enter__(self) -> Self:
        if self._profiler is not None:
            self._profiler.start()
        return self

    def step(self) -> None:
        if self._profiler is None:
            return
        self._settle()
        if self._num_left in (NUM_TRACED + 1, 1):
            self._drain()
        self._profiler.step()
        self._num_left -= 1
        if self._num_left == 0:
            self._profiler.stop()
            self._profiler = None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error collectives may never end: waiting would hide it, and stopping now could crash.
        if self._profiler is not None and kind is None:
            self._settle()
            self._drain()
            self._profiler.stop()

    def _write(self, profiler: profile) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.file))
