"""Where gathered units lie: shared persistent slots, and memory of a unit's own. Where gradients are reduced.

Units gathered until the end of the backward give their own memory back when they are dropped, by resizing
its storage to nothing: autograd's aliases keep the storage, and find the weights again once it is refilled.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..schedule.step_schedule import NUM_REDUCTIONS, NUM_ROW_SLOTS, Schedule, aligned
from ..unit.unit import Unit
from .streams import Mark


class GatherMemory:
    def __init__(self, schedule: Schedule, units: list[Unit], device: torch.device) -> None:
        self._device = device
        self._units = units
        self.slots = [self._bytes(size) for size in schedule.slot_bytes]
        # For rows of encoded parameters under way.
        self.row_slots = [self._bytes(schedule.row_slot_bytes) for _ in range(NUM_ROW_SLOTS)]
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
        # There may be fewer than before: units that are kept gathered need none.
        self.slots = [
            old if old.numel() >= size else self._bytes(size)
            for old, size in zip(self.slots, schedule.slot_bytes, strict=False)
        ]
        for unit in self._units:
            slot = schedule.slot_of[unit.index]
            if slot is not None:
                self.own.pop(unit.index, None)
                self._borrow(unit, slot)

    @staticmethod
    def rows_in(row_slot: Tensor, unit: Unit) -> list[Tensor]:
        """A part of it for every flat of a unit; of one that is not encoded, nothing."""
        found: list[Tensor] = []
        start = 0
        for state in unit.states:
            num_bytes = state.flat.gathered_row_bytes
            found.append(row_slot[start : start + num_bytes])
            start += aligned(num_bytes)
        return found

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
            state.bind(memory[start : start + num_bytes].view(flat.compute.torch))
            start += aligned(num_bytes)


@dataclass(frozen=True, slots=True)
class Room:
    """Of a flat in a reduction slot: for its gradient, if that rests split, and for the rows under way, if encoded."""

    grads: Tensor | None
    rows: Tensor | None


class ReductionMemory:
    """The slots in which gradients travel, there from the first reduction of a backward to its end.

    A GPU's allocator keeps what it is given back and lends it to the activations of the next forward. A CPU's gives
    large blocks back to the system, and fresh pages cost more than the gradient that is written there: it keeps them.
    """

    def __init__(self, schedule: Schedule, device: torch.device) -> None:
        self._num_bytes = schedule.reduction_slot_bytes
        self._device = device
        self.gives_back = device.type == "cuda"
        self.slots: list[Tensor | None] = [None] * NUM_REDUCTIONS
        self._views: dict[tuple[int, int | None], list[Room]] = {}
        # When a slot may be written by the computation again.
        self.freed: list[tuple[Mark, ...]] = [()] * NUM_REDUCTIONS
        self._scratch: Tensor | None = None
        self._scratch_bytes = schedule.scratch_bytes

    def rooms(self, unit: Unit, slot: int | None) -> list[Room]:
        """For every flat of a unit, in the slot."""
        memory = None if slot is None else self._fetch(slot)
        key = (unit.index, slot)
        if key not in self._views:
            found: list[Room] = []
            start = 0

            def take(num_bytes: int) -> Tensor:
                nonlocal start
                assert memory is not None
                start += aligned(num_bytes)
                return memory[start - aligned(num_bytes) :][:num_bytes]

            for state in unit.trainable_states:
                flat = state.flat
                in_slot = slot is not None and flat.reduces_in_slot  # a unit without elements has none
                grads = take(flat.num_elems * flat.reduce.itemsize) if in_slot else None
                rows = take(flat.exchanged_bytes) if flat.exchanged_bytes else None
                found.append(Room(None if grads is None else grads.view(flat.reduce.torch), rows))
            self._views[key] = found
        return self._views[key]

    def _fetch(self, index: int) -> Tensor:
        memory = self.slots[index]
        if memory is None:
            memory = self.slots[index] = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
        elif memory.untyped_storage().nbytes() == 0:
            memory.untyped_storage().resize_(self._num_bytes)
        return memory

    @property
    def lent(self) -> list[Tensor]:
        """All that was ever asked for."""
        return [memory for memory in (*self.slots, self._scratch) if memory is not None]

    @property
    def has_scratch(self) -> bool:
        return self._scratch is not None

    def scratch(self, num_bytes: int) -> Tensor:
        """For gradients that come back from the host to be added to, one after the other."""
        if self._scratch is None:
            self._scratch = torch.empty(self._scratch_bytes, dtype=torch.uint8, device=self._device)
        return self._scratch[:num_bytes]

    def give_back(self) -> None:
        """The computation has waited for all reductions. Views of the slots stay, and find the next memory."""
        if self.gives_back:
            self.freed = [()] * NUM_REDUCTIONS
            for memory in self.slots:
                if memory is not None:
                    memory.untyped_storage().resize_(0)
