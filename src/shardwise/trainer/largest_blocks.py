"""What lies on a rank's device: the allocator's books, and names for its largest blocks.

The engine's tensors give names to what is state. What autograd keeps for the backward has no name in Python: it is what
is left. A CPU keeps no books: there only what has a name is found.
"""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..core.engine.runtime import Engine
from ..core.mesh import device

NUM_LARGEST = 5


@dataclass(frozen=True, slots=True)
class Pool:
    """What a GPU's allocator tells."""

    allocated: int
    reserved: int
    limit: int  # what this process may have at most
    grows: bool  # segments do: then nearly nothing is lost between blocks

    @property
    def unused(self) -> int:
        return self.reserved - self.allocated


def pool_here() -> Pool | None:
    where = device()
    if where.type != "cuda":
        return None
    grows = any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())
    allocated, reserved = torch.cuda.memory_allocated(where), torch.cuda.memory_reserved(where)
    free, total = torch.cuda.mem_get_info(where)
    allowed = round(torch.cuda.get_per_process_memory_fraction(where) * total)
    return Pool(allocated, reserved, min(reserved + free, allowed), grows)


def largest(engine: Engine | None, optimizer: Any) -> list[dict[str, Any]]:
    """The largest blocks of the device, with names where they have some; those that are alike are counted."""
    names = _names(engine, optimizer)
    blocks = _blocks()
    if not blocks:
        blocks = {address: num_bytes for address, (_, num_bytes) in names.items()}
    nameless = "kept for the backward, or on its way"
    named = Counter((num_bytes, names.get(address, (nameless, 0))[0]) for address, num_bytes in blocks.items())
    found = sorted(named.items(), key=lambda block: -block[0][0])[:NUM_LARGEST]
    return [{"bytes": num_bytes, "name": name, "count": count} for (num_bytes, name), count in found]


def _blocks() -> dict[int, int]:
    if device().type != "cuda":
        return {}
    return {
        block["address"]: block.get("requested_size", block["size"])
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def _names(engine: Engine | None, optimizer: Any) -> dict[int, tuple[str, int]]:
    """What tensors are, by the address of their storages; the engine's own names before what can be seen of others."""
    found: dict[int, tuple[str, int]] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for tensor, name in [*_of_engine(engine, optimizer), *_of_python()]:
            if tensor.device.type == device().type:
                storage = tensor.untyped_storage()
                with suppress(RuntimeError):  # what has a storage in name only has no address
                    if storage.nbytes():
                        found.setdefault(storage.data_ptr(), (name, storage.nbytes()))
    return found


def _of_engine(engine: Engine | None, optimizer: Any) -> Iterator[tuple[Tensor, str]]:
    if engine is None:
        return
    part_of: dict[int, str] = {}
    for unit in engine.units:
        for state in unit.states:
            what = "parameters" if state.flat.master == state.flat.compute else "masters"
            if state.flat.master_on != "disk":
                yield state.master, f"{what} of {unit.name}"
            part_of.update((id(param), unit.name) for param in state.resting_params)
            if state.rest is not None:
                yield state.rest, f"parameters at rest of {unit.name}"
            if state.gradient.grads is not None:
                yield state.gradient.grads, f"gradients of {unit.name}"
    yield from ((slot, "a slot for gathered units") for slot in engine.gathers.memory.slots)
    yield from ((own, f"{engine.units[index].name}, gathered") for index, own in engine.gathers.memory.own.items())
    yield from ((slot, "a slot for reductions") for slot in engine.reductions.memory.slots if slot is not None)
    for param, entries in ({} if optimizer is None else optimizer.inner.state).items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                yield value, f"{key} of {part_of.get(id(param), 'the optimizer')}"


def _of_python() -> Iterator[tuple[Tensor, str]]:
    for value in gc.get_objects():
        # By type: isinstance asks the object itself, and wakes whatever is lazy. Fake tensors have no memory.
        if issubclass(type(value), Tensor) and not issubclass(type(value), FakeTensor):
            yield value, f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
