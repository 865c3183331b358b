"""Where gathered units lie: shared persistent slots, and memory of a unit's own.

Units gathered until the end of the backward give their own memory back when they are dropped, by resizing
its storage to nothing: autograd's aliases keep the storage, and find the weights again once it is refilled.
"""

import torch
from torch import Tensor

from ..unit import Unit
from .schedule import Schedule, aligned


class GatherMemory:
    def __init__(self, schedule: Schedule, units: list[Unit], device: torch.device) -> None:
        self._device = device
        self._units = units
        self.slots = [self._bytes(size) for size in schedule.slot_bytes]
        self.own: dict[int, Tensor] = {}
        # Addresses of shared slots, by the units that lie in them.
        self.borrowed: dict[int, int] = {}
        self._bind_all(schedule)

    def _bytes(self, num_bytes: int) -> Tensor:
        # Also when it is asked for inside inference mode: training goes on with it afterwards.
        with torch.inference_mode(False):
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def _bind_all(self, schedule: Schedule) -> None:
        for unit in self._units:
            slot = schedule.slot_of[unit.index]
            if slot is None:
                self.give_own(unit.index, schedule)
                if schedule.units[unit.index].layout.gathered_until == "backward":
                    self.give_back(unit.index)
            else:
                self._borrow(unit, slot)

    def _borrow(self, unit: Unit, slot: int) -> None:
        self._bind(unit, self.slots[slot])
        self.borrowed[unit.index] = self.slots[slot].untyped_storage().data_ptr()

    def give_own(self, index: int, schedule: Schedule) -> None:
        self.own[index] = self._bytes(schedule.units[index].gathered_bytes)
        self.borrowed.pop(index, None)
        self._bind(self._units[index], self.own[index])

    def rearrange(self, schedule: Schedule) -> None:
        """Take over another order of units; nothing may be gathered or in flight."""
        self.slots = [
            old if old.numel() >= size else self._bytes(size)
            for old, size in zip(self.slots, schedule.slot_bytes, strict=True)
        ]
        for unit in self._units:
            slot = schedule.slot_of[unit.index]
            if slot is not None:
                self.own.pop(unit.index, None)
                self._borrow(unit, slot)

    def fetch(self, index: int) -> None:
        """Make sure that a unit's memory is there before it is gathered into."""
        own = self.own.get(index)
        if own is not None and own.untyped_storage().nbytes() != own.numel():
            own.untyped_storage().resize_(own.numel())

    def give_back(self, index: int) -> None:
        self.own[index].untyped_storage().resize_(0)

    @staticmethod
    def _bind(unit: Unit, memory: Tensor) -> None:
        start = 0
        for state in unit.states:
            flat = state.flat
            if flat.master_is_whole:
                state.bind(state.master)
                continue
            num_bytes = flat.num_elems * flat.compute.itemsize
            state.bind(memory[start : start + num_bytes].view(flat.compute))
            start += aligned(num_bytes)
