"""Lanes: queues of work beside the computation. Streams and events are used here only.

On a GPU a lane is a stream. Work on it begins after what the compute stream had been given before, and the
compute stream waits for it only where it is told to. On a CPU a lane is nothing: copies happen at once,
and collectives run in the process group's own threads.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

# A point on a lane; on a CPU there is nothing to wait for.
Mark = torch.cuda.Event | None

_NOTHING: AbstractContextManager[None] = nullcontext()


class Lane:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def after_compute(self) -> AbstractContextManager[object]:
        """Inside, work goes to the lane, behind everything the compute stream has been given so far."""
        if self._stream is None:
            return _NOTHING
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def beside_compute(self) -> AbstractContextManager[object]:
        """Inside, work goes to the lane, behind the lane's own work only."""
        return _NOTHING if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        """A point on the lane that `compute_waits_for` can name."""
        return None if self._stream is None else self._stream.record_event()

    def compute_waits_for(self, mark: Mark) -> None:
        if mark is not None:
            torch.cuda.current_stream().wait_event(mark)


def trace_range(name: str) -> AbstractContextManager[object]:
    """A named range in profiler traces; costs nothing while no profiler runs."""
    return record_function(f"shardwise::{name}") if torch._C._autograd._profiler_enabled() else _NOTHING
