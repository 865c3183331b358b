"""Lanes: queues of work that overlaps with the computation. No other file of the engine uses streams and events.

On a GPU a lane is a stream. Its work begins after what was queued on the compute stream before (`after_compute`), and
the compute stream waits for it only at `compute_waits_for` and `join`. On a CPU a lane does nothing: copies happen at
once, and collectives run in the process group's own threads.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.profiler import record_function

# Does what entering torch.cuda.stream does, at a tenth of its cost. A torch without CUDA does not have it.
make_current: Any = getattr(torch._C, "_cuda_setStream", None)
# The events of torch.cuda without their layer of Python: a step records and awaits many of them.
Event: Any = torch.cuda.Event.__base__
# A point on a lane. None on a CPU: there is nothing to wait for.
Mark = Any


class Lane:
    """A queue. Inside `with lane:`, work goes to it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._index = -1 if self._stream is None else self._stream.device_index
        # True on a GPU: a wait on this lane is queued like other work, and does not block the caller.
        self.queues = self._stream is not None
        # One event, recorded again each time: to wait for it means its last recording before the call.
        self._begin = None if self._stream is None else Event()
        self._outside = (0, 0, 0)
        self._has_work = False
        self._range: record_function | None = None

    def __enter__(self) -> None:
        if self._range is not None:
            self._range.__enter__()
        if self._stream is not None:
            self._has_work = True
            self._outside = torch._C._cuda_getCurrentStream(self._index)
            stream_id, device_type = self._stream.stream_id, self._stream.device_type
            make_current(stream_id=stream_id, device_index=self._index, device_type=device_type)

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            stream_id, device_index, device_type = self._outside
            make_current(stream_id=stream_id, device_index=device_index, device_type=device_type)
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def after_compute(self, name: str = "") -> "Lane":
        """Let the next work of this lane run after everything that is queued on the compute stream so far. The work has
        this name in profiler traces."""
        if self._begin is not None:
            self._begin.record(current_stream(self._index))
            self._begin.wait(self._stream)
        if name and profiler._is_profiler_enabled:  # also if it was started by another thread for all threads
            self._range = record_function(f"shardwise::{name}")
        return self

    def after(self, *marks: Mark, name: str = "") -> "Lane":
        """Let the next work of this lane run after these points of other lanes."""
        for mark in marks:
            if mark is not None:
                mark.wait(self._stream)
        if name and profiler._is_profiler_enabled:
            self._range = record_function(f"shardwise::{name}")
        return self

    def mark(self) -> Mark:
        """A point on the lane, for `compute_waits_for`."""
        if self._stream is None:
            return None
        mark = Event()
        mark.record(self._stream)
        return mark

    def mark_for_host(self) -> Mark:
        """A point on the lane that the host can wait for without using a processor."""
        if self._stream is None:
            return None
        mark = Event(blocking=True)
        mark.record(self._stream)
        return mark

    def join(self) -> None:
        """Let the computation wait for all work of the lane."""
        if self._has_work:
            self.compute_waits_for(self.mark())
            self._has_work = False

    def capture(self, graph: torch.cuda.CUDAGraph) -> AbstractContextManager[None]:
        """Record the work inside `with`, on this lane and on lanes that wait for it, instead of running it."""
        # `thread_local`: other threads, such as a communicator's watchdog, may still query events.
        return torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local")

    def mark_compute(self) -> Mark:
        """A point on the compute stream."""
        return None if self._stream is None else current_stream(self._index).record_event()

    def compute_waits_for(self, *marks: Mark) -> None:
        for mark in marks:
            if mark is not None:
                mark.wait(current_stream(self._index))


def host_waits_for(mark: Mark) -> None:
    if mark is not None:
        mark.synchronize()


def has_passed(mark: Mark) -> bool:
    return mark is None or mark.query()


class PendingHostCopy:
    """A small tensor that is copied to the host, to be read later.

    Reading waits for the copy alone, not for work that was queued on the GPU since.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: Mark = None
        if tensor.device.type == "cuda":
            # Pinned, else the copy would wait here. The host allocator keeps it until the copy is over.
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor.detach(), non_blocking=True)
            self._arrived = current_stream(tensor.device.index).record_event()
        else:
            self._host = tensor.detach().clone()

    @property
    def is_here(self) -> bool:
        return has_passed(self._arrived)

    def wait(self) -> None:
        host_waits_for(self._arrived)

    def read(self) -> list[float]:
        host_waits_for(self._arrived)
        return self._host.double().reshape(-1).tolist()


# A cache: to make a stream object costs more than to use it, and a process has only a few.
_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def current_stream(device_index: int) -> torch.cuda.Stream:
    key = torch._C._cuda_getCurrentStream(device_index)
    if key not in _streams:
        _streams[key] = torch.cuda.Stream(stream_id=key[0], device_index=key[1], device_type=key[2])
    return _streams[key]
