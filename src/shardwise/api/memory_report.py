"""Memory of one rank at this moment, in bytes by class: measured on the tensors themselves, and predicted.

Each storage is counted once, also if views, tied weights or wrapper tensors share it. Some tensors release their memory
for a time: gradients on a GPU after `zero_grad`, and the memory of units that stay gathered until their backward. The
tensor objects stay, so their largest size is always known. All other memory of the GPU's allocator counts as
activations. On a CPU there are no such numbers: only the memory of the whole process is known.
"""

import resource
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..base.errors import StateError
from ..core.engine.guards import engine_of
from ..core.engine.runtime import Engine
from ..core.optim.probe import num_moments
from ..core.optim.sharded_optimizer import ShardedOptimizer
from ..core.schedule.state_bytes import StateBytes, state_bytes
from ..core.schedule.step_schedule import NUM_ROW_SLOTS
from ..core.unit.state import OnDisk


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank. `params` are copies of weights that stay between steps, in the compute dtype or encoded.
    `grads` are gradients, and encoding errors that are saved for feedback. `optimizer` is masters and moments.
    `buffers` are gather slots, reduction slots, buffers of modules, and counters.

    `now` and `peak` are all that is allocated on a GPU, or the resident memory of the process on a CPU.
    """

    params: int
    grads: int
    optimizer: int
    buffers: int
    activations: int | None  # all other allocated memory, also workspaces of libraries; None on a CPU
    peak_grads: int
    peak_buffers: int
    peak_activations: int | None  # `peak` minus the peaks of the other classes
    now: int
    peak: int
    reserved: int | None  # memory that a GPU's allocator has taken from the driver
    host: int  # the used part of the pinned arena, and moments that an optimizer has outside it
    disk: int
    planned: StateBytes  # equal to `seen` after the first step, except that it also counts moments of padding
    planned_buffers: int
    planned_host: int
    planned_disk: int

    @property
    def seen(self) -> StateBytes:
        """The largest measured state, to compare with `planned`."""
        return StateBytes(self.params, self.peak_grads, self.optimizer)

    def by_class(self) -> dict[str, int]:
        """Bytes now, by the classes that are known here."""
        parts = {"params": self.params, "grads": self.grads, "optimizer": self.optimizer, "buffers": self.buffers}
        return parts if self.activations is None else {**parts, "activations": self.activations}

    def highest(self, other: "Memory") -> "Memory":
        """Return the larger value of every field; planned values are those of `self`."""
        larger: dict[str, Any] = {}
        for name in [entry.name for entry in fields(self) if not entry.name.startswith("planned")]:
            mine, theirs = getattr(self, name), getattr(other, name)
            larger[name] = None if mine is None or theirs is None else max(mine, theirs)
        return replace(self, **larger)


def memory(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Memory:
    """Count the memory of a sharded model on this rank, and of its optimizer if given. It does not wait for the GPU."""
    engine = engine_of(model)
    if optimizer is not None and not isinstance(optimizer, ShardedOptimizer):
        raise StateError(
            f"sw.memory was given the {type(optimizer).__name__} that sw.shard was given: give it the optimizer that "
            "sw.shard returned"
        )
    # Stand-ins for state on disk refuse operations. Here only their attributes are read, so the check is off.
    with torch._C.DisableTorchFunctionSubclass():
        return _count(engine, model, optimizer)


def _count(engine: Engine, model: nn.Module, optimizer: ShardedOptimizer | None) -> Memory:
    states, device, host, schedule = engine.all_states, engine.mesh.device, engine.host, engine.schedule
    flats = [state.flat for state in states]
    count = _counter(device.type, host.arena.owns)
    on_device = [state.gradient.grads for state in states if not state.flat.grads_on_host]
    gradients = [grads for grads in on_device if grads is not None]
    gathered, reduced = engine.gathers.memory, engine.reductions.memory
    own = list(gathered.own.values())
    slots = [memory for memory in (*reduced.slots, reduced.scratch_memory) if memory is not None]
    # Copied into lists: updates on the host may add entries at the same time.
    inner = None if optimizer is None else optimizer.inner
    entries = [] if inner is None else [(param, list(state.items())) for param, state in list(inner.state.items())]
    tensors = [(param, key, value) for param, state in entries for key, value in state if isinstance(value, Tensor)]
    moments = [value for param, key, value in tensors if value.shape == param.shape and key != "step"]
    # Whole copies in the compute dtype that are never dropped. They count as params. They lie in the memory of their
    # units, of which only the gaps between the copies count as buffers.
    undropped = [flat for flat in flats if flat.layout.gathered_until == "always" and not flat.master_is_whole]
    whole = sum(flat.num_elems * flat.compute.itemsize for flat in undropped)
    # Copies at rest, and masters that are the parameters themselves: in the compute dtype, or frozen.
    params = whole + count(each.rest for each in states if each.rest is not None and each.flat.rest_on == "device")
    params += count(each.master for each in states if each.flat.master == each.flat.compute or not each.flat.trainable)
    grads = count(gradients) + count(lost for state in states for lost in state.carrier.lost.values())
    masters_and_moments = count(state.master for state in states) + count(moments)
    registered = count(model.buffers())
    buffers = registered + count([*gathered.slots, *gathered.row_slots, *own, *slots]) - whole
    # Counters, flags, and `blank`: one element per flat, of which the user's parameters are expanded views.
    numbers = [value for value in (engine.reductions.all_used, engine.scale.loss_scale) if value is not None]
    buffers += count([*(value for _, _, value in tensors), *(state.blank for state in states), *numbers])
    peak_grads, peak_buffers = grads + _released(gradients), buffers + _released(own)
    peak_buffers += reduced.peak_bytes - sum(map(reduced.num_bytes, range(len(reduced.slots))))
    # Units' own memory counts as if none were released. The scratch exists only with several micro-batches.
    planned_buffers = registered - whole + sum(schedule.slot_bytes) + NUM_ROW_SLOTS * schedule.row_slot_bytes
    planned_buffers += sum(status.plan.gathered_bytes for status in engine.statuses if status.slot is None)
    planned_buffers += schedule.reduction_bytes(keeps_slots=not reduced.gives_back)
    planned_buffers += 0 if reduced.scratch_memory is None else schedule.scratch_bytes
    now, peak, reserved = _in_use(device)
    held = params + masters_and_moments
    outside_arena = 0
    if inner is not None and not host.row_names:
        # An optimizer of another package keeps its own moments for masters on the host.
        offloaded = {param for state in states if state.flat.host_updates for param in state.resting_params}
        on_host = (value for param in offloaded for value in inner.state.get(param, {}).values())
        outside_arena = _counter("cpu", host.arena.owns)(on_host)
    return Memory(
        params=params,
        grads=grads,
        optimizer=masters_and_moments,
        buffers=buffers,
        activations=None if reserved is None else now - held - grads - buffers,
        peak_grads=peak_grads,
        peak_buffers=peak_buffers,
        peak_activations=None if reserved is None else max(peak - held - peak_grads - peak_buffers, 0),
        now=now,
        peak=peak,
        reserved=reserved,
        planned=state_bytes(flats, num_moments(inner, engine.precision)),
        planned_buffers=planned_buffers,
        host=host.arena.taken_bytes + outside_arena,
        disk=host.size.disk,
        planned_host=host.size.host,
        planned_disk=host.size.disk,
    )


def _counter(device_type: str, is_on_host: Callable[[Tensor], bool]) -> Callable[[Iterable[Any]], int]:
    """Make a function that counts the bytes of storages on one device, each storage once. State that is offloaded to
    the host or to disk is not counted, even if the device is a CPU."""
    counted: set[int] = set()

    def count(tensors: Iterable[Any]) -> int:
        num_bytes = 0
        for tensor in tensors:
            if is_traceable_wrapper_subclass(tensor):
                num_bytes += count(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            elif tensor.device.type == device_type and not isinstance(tensor, OnDisk) and not is_on_host(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in counted:
                    counted.add(storage._cdata)
                    num_bytes += storage.nbytes()
        return num_bytes

    return count


def _released(tensors: list[Tensor]) -> int:
    """Return the bytes that tensors have released. Each has a storage of its own."""
    return sum(tensor.nbytes - tensor.untyped_storage().nbytes() for tensor in tensors)


def _in_use(device: torch.device) -> tuple[int, int, int | None]:
    """Return the bytes in use now, at the peak, and reserved: of the GPU, or of the process on a CPU."""
    if device.type == "cuda":
        now, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return now, peak, torch.cuda.memory_reserved(device)
    status = Path("/proc/self/status")
    if not status.exists():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak, peak, None
    # getrusage alone may give the peak of the parent process.
    found = dict(line.split(":", 1) for line in status.read_text().splitlines())
    now, peak = (int(found[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
    return now, max(now, peak), None
