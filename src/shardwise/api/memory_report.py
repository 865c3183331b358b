"""Memory of one rank at this moment, in bytes by class: measured on the tensors themselves, and predicted.

Every storage is counted once: views, ties and tensors that wrap others lead to the same one. Some memory is released
for a time: that of gradients on a GPU by `zero_grad`, and that of units gathered until the backward. The tensors stay,
so their largest size is known at any time. All else that the GPU's allocator has allocated counts as activations. A
CPU's allocator does not report its memory: there only the memory of the whole process is known.
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
from ..core.schedule.step_schedule import NUM_REDUCTIONS, NUM_ROW_SLOTS
from ..core.unit.state import OnDisk


@dataclass(frozen=True, slots=True)
class Memory:
    """`params` are copies that stay between steps, in the compute dtype or encoded. `grads` are gradients and their
    encoding errors. `optimizer` is masters and moments. `buffers` are gather slots, reduction slots, buffers of
    modules, and counters.

    `now` and `peak` are all that is allocated on a GPU, or the resident memory of the process on a CPU.
    """

    params: int
    grads: int
    optimizer: int
    buffers: int
    activations: int | None  # all else that is allocated, libraries' workspaces too; None on a CPU
    peak_grads: int
    peak_buffers: int
    peak_activations: int | None  # `peak` minus the peaks of the other classes
    now: int
    peak: int
    reserved: int | None  # memory that a GPU's allocator has taken from the driver
    host: int  # the used part of the arena, and moments that an optimizer has on the host outside it
    disk: int
    planned: StateBytes  # equal to `seen` after the first step, except that padding has no moments
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
        """The larger of two, class by class; the planned values are those of `self`."""
        larger: dict[str, Any] = {}
        for name in [entry.name for entry in fields(self) if not entry.name.startswith("planned")]:
            mine, theirs = getattr(self, name), getattr(other, name)
            larger[name] = None if mine is None or theirs is None else max(mine, theirs)
        return replace(self, **larger)


def memory(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Memory:
    """Count the memory of a sharded model on this rank, and of its optimizer if given. Nothing waits for the GPU."""
    engine = engine_of(model)
    if optimizer is not None and not isinstance(optimizer, ShardedOptimizer):
        raise StateError(
            f"sw.memory was given the {type(optimizer).__name__} that sw.shard was given: give it the optimizer that "
            "sw.shard returned"
        )
    # Only the storage of stand-ins for state on disk is read, which needs no check.
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
    # Lists: updates on the host may add to them meanwhile.
    inner = None if optimizer is None else optimizer.inner
    entries = [] if inner is None else [(param, list(state.items())) for param, state in list(inner.state.items())]
    tensors = [(param, key, value) for param, state in entries for key, value in state if isinstance(value, Tensor)]
    moments = [value for param, key, value in tensors if value.shape == param.shape and key != "step"]
    # Compute copies that are never dropped. They lie in memory that their units share, and are params; only the gaps
    # between them are buffers.
    undropped = [flat for flat in flats if flat.depth_of_params == 0 and not flat.master_is_whole]
    whole = sum(flat.num_elems * flat.compute.itemsize for flat in undropped)
    # Copies between master and whole, and masters that are the parameters themselves.
    params = whole + count(each.rest for each in states if each.rest is not None and each.flat.rest_on == "device")
    params += count(each.master for each in states if each.flat.master == each.flat.compute or not each.flat.trainable)
    grads = count(gradients) + count(lost for state in states for lost in state.carrier.lost.values())
    masters_and_moments = count(state.master for state in states) + count(moments)
    registered = count(model.buffers())
    buffers = registered + count([*gathered.slots, *gathered.row_slots, *own, *slots]) - whole
    # Counters, flags, and the single numbers that the user's parameters are views of.
    numbers = [value for value in (engine.reductions.all_used, engine.scale.loss_scale) if value is not None]
    buffers += count([*(value for _, _, value in tensors), *(state.blank for state in states), *numbers])
    peak_grads, peak_buffers = grads + _released(gradients), buffers + _released([*own, *slots])
    # Memory of units' own counts while all of it is there, the scratch in runs with several micro-batches.
    planned_buffers = registered - whole + sum(schedule.slot_bytes) + NUM_ROW_SLOTS * schedule.row_slot_bytes
    planned_buffers += sum(status.plan.gathered_bytes for status in engine.statuses if status.slot is None)
    planned_buffers += NUM_REDUCTIONS * schedule.reduction_slot_bytes
    planned_buffers += 0 if reduced.scratch_memory is None else schedule.scratch_bytes
    now, peak, reserved = _in_use(device)
    held = params + masters_and_moments
    outside_arena = 0
    if inner is not None and not host.row_names:
        # Moments that an optimizer of another package keeps for masters on the host.
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
    the host or to disk is not counted, also if the device is a CPU."""
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
    """Bytes that tensors with a storage of their own have released."""
    return sum(tensor.nbytes - tensor.untyped_storage().nbytes() for tensor in tensors)


def _in_use(device: torch.device) -> tuple[int, int, int | None]:
    """Now, at the peak, and reserved: on the device, or by the process."""
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
