"""Save in the background: copy to the host, and write in a thread while training goes on.

A rank may notice a failure a step earlier than another, and would leave the others waiting in a collective. So the
threads agree on a step that no rank has begun yet, and every rank raises there.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary, finalize

import torch

from ..base.intervals import round_up
from ..core.engine.runtime import Engine
from ..core.wire.collectives import Channel, exchange
from .share import Share

_ALIGNMENT_BYTES = 64


class HostCopy:
    """Host memory for a rank's share of a save, allocated once; page-locked if it is copied from a device.

    torch's own page-locked memory comes in powers of two, which could be twice as much.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._unlock: finalize[..., HostCopy] | None = None

    def take(self, share: Share) -> Share:
        """Copy a share to the host, so that training does not change it any more."""
        sizes = [round_up(portion.num_bytes, _ALIGNMENT_BYTES) for portion in share.portions]
        if sum(sizes) > self._memory.numel():
            self._make(sum(sizes))
        copies = []
        for portion, place in zip(share.portions, self._memory[: sum(sizes)].split(sizes), strict=True):
            copy = place[: portion.num_bytes].view(portion.dtype)
            for row in portion.rows():
                copy.copy_(row, non_blocking=True)
            copies.append(replace(portion, rows=partial(iter, (copy,))))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return replace(share, portions=copies)

    def _make(self, num_bytes: int) -> None:
        if self._unlock is not None:
            self._unlock()
        self._memory = torch.empty(0, dtype=torch.uint8)  # free the old memory before the new one is allocated
        self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        if self._device.type == "cuda":
            address, cuda = self._memory.data_ptr(), torch.cuda.cudart()
            torch.cuda.check_error(cuda.cudaHostRegister(address, num_bytes, 0))
            self._unlock = finalize(self, cuda.cudaHostUnregister, address)
            self._unlock.atexit = False  # at exit there is no device any more


class Saving:
    """A save that is under way."""

    def __init__(self, engine: Engine, channel: Channel, write: Callable[[], None]) -> None:
        self._engine = engine
        self._channel = channel
        self._write = write
        self._failure: Exception | None = None
        self._began = self._ended = time.perf_counter()
        self._num_steps = 0
        self._lock = threading.Lock()
        self._has_failed = False
        self._agreed = threading.Event()  # on the step at which a failure is raised
        self._raise_at = 0
        # Not a daemon: a program that ends waits until its checkpoint is written.
        self._thread = threading.Thread(target=self._run, name="shardwise-save")

    def start(self) -> None:
        self._thread.start()
        _under_way.append(self)
        self._engine.at_step.append(self._at_step)

    @property
    def is_finished(self) -> bool:
        return not self._thread.is_alive()

    @property
    def is_complete(self) -> bool:
        """True when the checkpoint is complete. A failure is raised elsewhere, on all ranks at once."""
        return self.is_finished and self._failure is None

    @property
    def seconds(self) -> float:
        """Seconds from the copy to the end of the writing."""
        return self._ended - self._began

    def finish(self) -> None:
        """Wait until the checkpoint is complete, or raise why it is not. Every rank calls it."""
        self._thread.join()
        self._forget()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:  # noqa: BLE001  it is raised again in the training loop
            self._failure = error
            with self._lock:
                self._has_failed = True
                num_steps = self._num_steps
            with suppress(Exception):  # if the other ranks are gone, this one raises alone
                num_steps = max(exchange(self._channel, num_steps))
            self._raise_at = num_steps + 1
            self._agreed.set()
        finally:
            self._ended = time.perf_counter()

    def _at_step(self) -> None:
        with self._lock:
            self._num_steps += 1
            has_failed = self._has_failed
        if has_failed:
            self._agreed.wait()
            if self._num_steps >= self._raise_at:
                self._forget()
                assert self._failure is not None
                raise self._failure
        elif self.is_complete:
            self._forget()

    def _forget(self) -> None:
        if self._at_step in self._engine.at_step:
            self._engine.at_step.remove(self._at_step)
        if self in _under_way:
            _under_way.remove(self)


# At most one, for all models: the threads of two would use one channel at the same time.
_under_way: list[Saving] = []
_copies: "WeakKeyDictionary[Engine, HostCopy]" = WeakKeyDictionary()


def host_copy_of(engine: Engine) -> HostCopy:
    if engine not in _copies:
        _copies[engine] = HostCopy(engine.mesh.device)
    return _copies[engine]


def finish_last() -> None:
    """Wait for the save that is under way; raise if it failed and that was not raised before."""
    for last in tuple(_under_way):
        last.finish()
