"""Offload of activations to host memory between a unit's forward and its backward.

While a model runs forward, autograd passes every tensor that it saves to hooks. A tensor that a unit with
offloaded activations saves is copied to the host. With full checkpointing these are only the unit's inputs: inside a
checkpointed region, autograd calls the checkpoint's own hooks instead, and they save nothing.

A stretch is the part of a forward between two unit boundaries. The tensors saved in it are copied together, while the
next stretch runs. Whole storages are copied, because autograd would have held whole storages. Each is copied once, even
if several views of it are saved. After the copy back, the views share one storage again. The states of a storage:

    here      on the device, until the next stretch begins
    leaving   its copy to the host is queued on the lane; its device memory is held until the computation has waited for
              the copy, which it does when the stretch after the next begins
    on host   on the host only
    arriving  its copy back is queued, while the backward of the stretch after it runs; device memory is held as above
    here      the computation has waited for the copy; freed with the graph, or when the backward leaves the stretch

The last stretch of a forward is not copied, and the one before it is still here when the backward begins. The host
waits for no copy, so the speed of copies does not change which storages are copied. Both directions and all host
buffers use one lane, so a buffer may be used again as soon as the graph drops it.

If a unit holds other units, the tensors that it saves stay on the device. One exception: a checkpoint around the call
of an inner unit saves its inputs before its forward begins, so the tensors saved last before it are offloaded with it.
"""

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ...base.errors import StateError
from ..offload.arena import Arena, HostBuffers
from ..offload.host_memory import HostMemory
from ..schedule.state_bytes import MIN_OFFLOADED_ACTIVATION_BYTES
from ..unit.state import Unit
from .streams import Lane, Mark, host_waits_for

# A storage stays on the device if autograd saves a smaller part of it: something else holds it (a batch of data).
MIN_PART = 1 / 16


class _Memory:
    """A storage of saved tensors. `here`: a tensor in it while the storage is on the device, else None."""

    def __init__(self, buffers: HostBuffers, here: Tensor) -> None:
        self._buffers = buffers
        self.copy: Arena | None = None  # its place on the host, from the first copy on
        self.num_bytes = here.untyped_storage().nbytes()
        self.here: Tensor | None = here
        self.version = here._version
        self.is_overwritten = False

    @property
    def host(self) -> Tensor:
        """Its place on the host, allocated at the first use."""
        if self.copy is None:
            self.copy = self._buffers.lend(self.num_bytes)
        return self.copy.row[: self.num_bytes]

    def __del__(self) -> None:
        if self.copy is not None:
            self._buffers.take_back(self.copy)


@dataclass(slots=True, eq=False, weakref_slot=True)
class _ForwardSegment:
    """The storages that were saved in one stretch. They live as long as the autograd graph that holds them."""

    serial: int
    unit: str
    memories: weakref.WeakKeyDictionary[_Memory, None] = field(default_factory=weakref.WeakKeyDictionary)


class _Part(NamedTuple):
    memory: _Memory
    stretch: _ForwardSegment
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Saved:
    """The stand-in that autograd holds for a tensor that a unit saved: the tensor, or where to find it."""

    unit: str
    found: Tensor | _Part
    version: int


class HostActivations:
    """Offloads activations. The engine reports each unit's forward with `before` and `after`, except recomputes.

    `hosted` are the units whose activations are offloaded; none of them holds other units. `host` counts the bytes.
    """

    def __init__(self, units: Sequence[Unit], hosted: Collection[int], device: torch.device, host: HostMemory) -> None:
        self._units = units
        self.hosted = frozenset(hosted)
        self._host = host
        self._device = torch.empty(0, device=device).device  # with its index
        self._lane = Lane(device)
        self.buffers = HostBuffers(device.type == "cuda", lambda: host_waits_for(self._lane.mark_for_host()))
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        # Units whose forward runs, and the storages their weights are gathered in.
        self._open: list[tuple[int, frozenset[int]]] = []
        # In this forward: the storages to offload, and tensors that may be offloaded with the unit that begins next.
        self._known: weakref.WeakValueDictionary[tuple[StorageWeakRef, int], _Memory] = weakref.WeakValueDictionary()
        self._undecided: list[weakref.ref[_Saved]] = []
        self._num_stretches = 0
        self._stretches: weakref.WeakValueDictionary[int, _ForwardSegment] = weakref.WeakValueDictionary()
        # The stretch that runs, and the last one that is over.
        self._running: _ForwardSegment | None = None
        self._last: _ForwardSegment | None = None
        # Copies in flight: a mark behind them on the lane, and the device memory that they read or write.
        self._in_flight: list[tuple[Mark, list[Tensor]]] = []
        # Stretches that are copied and may be on the device as well, and the one that the backward has reached.
        self._here: list[_ForwardSegment] = []
        self._reached: _ForwardSegment | None = None

    # Reports of the engine.

    def before(self, index: int) -> None:
        """Report that a unit's forward begins; its weights are gathered. Not needed if no unit is `hosted`."""
        if not self._open:
            self.join()
            self._release_all_but(self._last)
            self._reached = None
            # If other hooks are active, such as those of a checkpoint around the whole model, those decide.
            if _top_pack() is None:
                self._hooks.__enter__()
        states = self._units[index].states
        weights = frozenset(state.compute_params[0].untyped_storage().data_ptr() for state in states)
        undecided = self._pass_boundary()
        self._open.append((index, weights))
        if index in self.hosted and _top_pack() != self._pack:
            for saved in [ref() for ref in undecided]:
                if saved is not None:
                    self._take(saved)

    def after(self, index: int) -> None:
        """Report that a unit's forward ended, or failed, perhaps before `before` was called."""
        if self._open and self._open[-1][0] == index:
            self._open.pop()
            self._pass_boundary()
            if not self._open:
                self.abandon_forward()

    def abandon_forward(self) -> None:
        """Forget a forward that ended or failed, and remove the hooks."""
        while _top_pack() == self._pack:
            self._hooks.__exit__()
        self._open.clear()
        self._known.clear()
        self._pass_boundary()

    def join(self) -> None:
        """Let the computation wait for every copy in flight."""
        self._lane.compute_waits_for(*(mark for mark, _ in self._in_flight))
        self._in_flight.clear()

    def _pass_boundary(self) -> list[weakref.ref[_Saved]]:
        if self._running is not None:
            self._last, self._running = self._running, None
        undecided, self._undecided = self._undecided, []
        return undecided

    # Forward: to the host.

    def _pack(self, tensor: Tensor) -> _Saved:
        # Detached, to avoid a cycle: the graph of the tensor holds the object that is returned here.
        held = tensor if tensor.is_leaf else tensor.detach()
        saved = _Saved(self._units[self._open[-1][0]].name, held, tensor._version)
        if torch._C._current_graph_task_id() == -1 and self._is_worth_it(tensor):
            if self._open[-1][0] in self.hosted:
                self._take(saved)
            else:
                self._undecided.append(weakref.ref(saved))
        return saved

    def _is_worth_it(self, tensor: Tensor) -> bool:
        if (
            type(tensor) is not Tensor
            or tensor.device != self._device
            or tensor.layout != torch.strided
            or (tensor.is_leaf and tensor.requires_grad)
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return False
        storage = tensor.untyped_storage()
        num_bytes, address = storage.nbytes(), storage.data_ptr()
        if num_bytes < MIN_OFFLOADED_ACTIVATION_BYTES or tensor.nbytes < MIN_PART * num_bytes:
            return False
        return all(address not in weights for _, weights in self._open)

    def _take(self, saved: _Saved) -> None:
        """Offload a saved tensor with the stretch that runs, together with other views of the same storage."""
        tensor = saved.found
        assert isinstance(tensor, Tensor)
        if tensor._version != saved.version:
            return  # overwritten since; its backward will raise
        if self._running is None:
            self._running = self._begin_stretch()
        key = (StorageWeakRef(tensor.untyped_storage()), saved.version)
        memory = self._known.get(key)
        if memory is None:
            memory = self._known[key] = _Memory(self.buffers, tensor)
        elif memory.here is None:
            memory.here = tensor
        self._running.memories[memory] = None
        offset = int(tensor.storage_offset())
        saved.found = _Part(memory, self._running, tensor.dtype, offset, tensor.shape, tensor.stride())

    def _begin_stretch(self) -> _ForwardSegment:
        """Begin a stretch: queue the last one's copy to the host, release the one before it from the device."""
        self.join()
        self._release_all_but(self._last)
        if self._last is not None and len(self._last.memories):
            self._start_sending(self._last)
        self._num_stretches += 1
        stretch = _ForwardSegment(self._num_stretches, self._units[self._open[-1][0]].name)
        self._stretches[stretch.serial] = stretch
        return stretch

    def _start_sending(self, stretch: _ForwardSegment) -> None:
        tensors = []
        with self._lane.after_compute(f"activations of {stretch.unit} to host"):
            for memory in list(stretch.memories):
                if memory.here is not None and memory.copy is None:
                    storage = torch.empty(0, dtype=torch.uint8, device=self._device).set_(memory.here.untyped_storage())
                    memory.host.copy_(storage, non_blocking=True)
                    tensors.append(memory.here)
                    self._host.moves.add("to_host", memory.num_bytes)
        self._in_flight.append((self._lane.mark(), tensors))
        self._here.append(stretch)

    # Backward: to the device.

    def _unpack(self, saved: _Saved) -> Tensor:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            raise StateError(
                "create_graph=True in a model whose activations are offloaded: what comes back has no history to go "
                "through a second time; use activations_on='device'"
            )
        found = saved.found
        if isinstance(found, Tensor):
            tensor, is_overwritten = found, found._version != saved.version
        else:
            memory, stretch = found.memory, found.stretch
            if stretch is not self._reached:
                self._reach(stretch)
            if memory.here is None:
                self._start_fetching(stretch)
                self.join()
            assert memory.here is not None
            is_overwritten = memory.is_overwritten or memory.here._version != memory.version
            tensor = torch.empty(0, dtype=found.dtype, device=self._device)
            tensor.set_(memory.here.untyped_storage(), found.offset, found.shape, found.stride)
        if is_overwritten:  # autograd does not check tensors that it passed to hooks
            raise StateError(
                "one of the variables needed for gradient computation has been modified by an inplace operation since "
                f"unit {saved.unit!r} saved it: a tensor of shape {tuple(tensor.shape)}; change a copy of it instead"
            )
        return tensor

    def _reach(self, stretch: _ForwardSegment) -> None:
        """Called when the backward reaches a stretch: release others, fetch this one, prefetch the one before it."""
        self._reached = stretch
        self.join()
        earlier = [other for other in self._stretches.values() if other.serial < stretch.serial]
        ahead = next((other for other in reversed(earlier) if len(other.memories)), None)
        self._release_all_but(stretch, ahead)
        self._start_fetching(stretch)
        self.join()
        if ahead is not None:
            self._start_fetching(ahead)

    def _release_all_but(self, *stretches: _ForwardSegment | None) -> None:
        kept = {memory for stretch in stretches if stretch is not None for memory in stretch.memories}
        for memory in [memory for stretch in self._here for memory in stretch.memories]:
            if memory not in kept and memory.here is not None and memory.copy is not None:
                memory.is_overwritten |= memory.here._version != memory.version
                memory.here = None
        self._here.clear()

    def _start_fetching(self, stretch: _ForwardSegment) -> None:
        self._here.append(stretch)
        on_host = [memory for memory in stretch.memories if memory.here is None]
        if not on_host:
            return
        # Allocated on the compute stream, where work that was queued before may still use this memory.
        here = [torch.empty(memory.num_bytes, dtype=torch.uint8, device=self._device) for memory in on_host]
        with self._lane.after_compute(f"activations of {stretch.unit} to device"):
            for memory, tensor in zip(on_host, here, strict=True):
                tensor.copy_(memory.host, non_blocking=True)
                memory.here, memory.version = tensor, tensor._version
                self._host.moves.add("to_device", memory.num_bytes)
        self._in_flight.append((self._lane.mark(), here))


def _top_pack() -> Any:
    """The pack hook that autograd calls at present, or None."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]
