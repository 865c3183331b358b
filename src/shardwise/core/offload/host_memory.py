"""The offloaded state of a rank's flats: tensors on the host, regions on disk.

    rows      the master, and the optimizer's tensors of the same length, by name
    out       updated weights in the compute dtype, on their way to the device
    rest      the copy at rest, if it is offloaded (`Flat.rest_on`)
    grads     gradients until the update reads them
    spares    memory for updates ahead of the step, which changes places with rows and updated weights, also on disk

On the host all tensors are pieces of one arena. On disk rows are cut into chunks. A chunk's rows are read together into
a window of host memory, to be updated. Parameters are read ahead into staging memory, and copied to the device.
"""

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ...base.errors import ConfigurationError
from ...base.files import ALIGNMENT
from ...base.intervals import Interval, round_up
from ..native.library import library
from ..schedule.flat import Flat
from ..schedule.state_bytes import (
    NUM_STAGED,
    NUM_WINDOWS,
    Way,
    chunks_of,
    host_tensors,
    off_device,
    record_bytes,
    spare_bytes,
)
from .arena import Arena, temporary_zeros
from .disk import Disk, Pending, Region

MASTER = "master"


class Moves:
    """Bytes that a step moves between the memories of its rank, by direction."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()
        # Updates run in a thread of their own.
        self._lock = threading.Lock()

    def add(self, way: Way, num_bytes: int) -> None:
        with self._lock:
            self._bytes[way] += num_bytes

    def by_way(self) -> dict[str, int]:
        with self._lock:
            return {way: num_bytes for way, num_bytes in sorted(self._bytes.items()) if num_bytes}


class ReadAhead:
    """Buffers of host memory into which state is read ahead from disk, at most `most` of them at a time.

    A key names the state, and `read` starts to read it into a buffer. A buffer that was given back is used again once
    the writes that read from it are done, and `wait`, which waits for the device, has returned.
    """

    def __init__(self, buffers: Sequence[Tensor], most: int) -> None:
        self._free: deque[tuple[Tensor, Sequence[Pending], Callable[[], None]]] = deque()
        self._ahead: dict[Hashable, tuple[Tensor, list[Pending]]] = {}
        self._most = most
        for buffer in buffers:
            self.give_back(buffer)

    def ask(self, key: Hashable, read: Callable[[Tensor], list[Pending]]) -> bool:
        """Start to read ahead. Return False if no buffer can be used now."""
        if key in self._ahead:
            return True
        if len(self._ahead) == self._most or not self._free or not all(each.is_done for each in self._free[0][1]):
            return False
        buffer = self.take_empty()
        self._ahead[key] = buffer, read(buffer)
        return True

    def take(self, key: Hashable, read: Callable[[Tensor], list[Pending]]) -> Tensor:
        """Return a buffer that holds the state, to be given back."""
        if key not in self._ahead:
            buffer = self.take_empty()
            self._ahead[key] = buffer, read(buffer)
        return self._wait_for(key)

    def take_empty(self) -> Tensor:
        if not self._free:
            # Take the buffer that was read ahead last. Its state must be read again later.
            self.give_back(self._wait_for(next(reversed(self._ahead))))
        buffer, writing, wait = self._free.popleft()
        for pending in writing:
            pending.wait()
        wait()
        return buffer

    def give_back(
        self, buffer: Tensor, writing: Sequence[Pending] = (), wait: Callable[[], None] = lambda: None
    ) -> None:
        self._free.append((buffer, writing, wait))

    def _wait_for(self, key: Hashable) -> Tensor:
        buffer, reading = self._ahead.pop(key)
        for pending in reading:
            pending.wait()
        return buffer

    def forget(self) -> None:
        """Drop everything that was read ahead: it is out of date."""
        for key in list(self._ahead):
            self.give_back(self._wait_for(key))

    def flush(self) -> None:
        """Wait for all writes."""
        for _, writing, _ in list(self._free):
            for pending in writing:
                pending.wait()


class HostMemory:
    """The host's memory and the disk's file of one rank, sized once for all units."""

    def __init__(
        self,
        units: Sequence[Sequence[Flat]],
        row_names: Sequence[str],
        disk_path: Path | None,
        pin: bool,
        spared: Sequence[Flat] = (),
    ) -> None:
        size, spare = off_device(units, len(row_names)), [spare_bytes(flat, len(row_names)) for flat in spared]
        on_host, on_disk = (sum(sizes) for sizes in zip((0, 0), *spare, strict=True))
        self.spare_bytes = on_host + on_disk
        self.size = size._replace(host=size.host + on_host, disk=size.disk + on_disk)
        self.row_names = tuple(row_names)
        self.moves, self.last_moves = Moves(), Moves()  # of this step, and of the last complete one
        self.disk: Disk | None = None
        if self.size.disk:
            if disk_path is None:
                fix = f"give disk_path=, a folder on a local disk with {self.size.disk:,} bytes of room for each rank"
                raise ConfigurationError(f"state is offloaded to disk and no folder is named for it: {fix}")
            self.disk = Disk(disk_path, self.size.disk, library())
        self.arena = Arena(self.size.host, pin=pin)
        # Two windows are not used for reading ahead, so that the disk can write at the same time.
        self.windows = ReadAhead(self._buffers(NUM_WINDOWS, self.size.windows, "a window"), NUM_WINDOWS - 2)
        self.staging = ReadAhead(self._buffers(NUM_STAGED, self.size.staged, "staging"), NUM_STAGED)
        self.spares: defaultdict[Hashable, list[Spare]] = defaultdict(list)
        for flat in spared:
            rows = Rows(self, flat, (MASTER, *row_names), "spare memory")
            weights = flat.compute.torch if flat.updates_copy else None
            updated = None if weights is None else self.arena.take(flat.num_master, weights, "spare memory")
            self.spares[_spare_kind(flat)].append(Spare(rows.tensors, rows.regions, updated))

    def _buffers(self, num: int, total_bytes: int, what: str) -> list[Tensor]:
        return [self.arena.take(total_bytes // num, torch.uint8, what) for _ in range(num if total_bytes else 0)]

    @property
    def store(self) -> Disk:
        """The disk, for state that is there."""
        assert self.disk is not None
        return self.disk

    def state_of(self, flat: Flat, unit_name: str) -> "OffloadedState | None":
        """Take memory for the offloaded state of a flat. Return None if all of its state is on the device."""
        if flat.master_on == "device" and flat.rest_on in (None, "device"):
            return None
        names = (MASTER, *self.row_names) if flat.trainable else (MASTER,)
        rows = None if flat.master_on == "device" else Rows(self, flat, names, unit_name)
        taken = {
            name: self.arena.take(num_elems, dtype.torch, f"{name} of {unit_name}")
            for name, (num_elems, dtype) in host_tensors(flat).items()
        }
        region = None
        if flat.rest_on == "disk":
            region = self.store.region(flat.num_rest * flat.compute.itemsize, f"parameters of unit {unit_name!r}")
        return OffloadedState(self, flat, rows, taken.get("out"), taken.get("rest"), region, taken.get("grads"))

    def take_spare(self, flat: Flat) -> "Spare | None":
        """Return memory for an update of this flat, if some is free."""
        free = self.spares[_spare_kind(flat)] if flat.may_update_ahead else []
        return free.pop() if free else None

    def give_back_spare(self, flat: Flat, spare: "Spare") -> None:
        self.spares[_spare_kind(flat)].append(spare)

    def close_step(self) -> None:
        self.last_moves, self.moves = self.moves, Moves()

    # Parameters of units on disk, which are read into staging memory and copied to the device.

    def ask_staged(self, wanted: tuple["OffloadedState", ...]) -> bool:
        """Start to read these flats of a unit. Return False if there is no room for them now."""
        return self.staging.ask(wanted, partial(_read_staged, wanted))

    def take_staged(self, wanted: tuple["OffloadedState", ...]) -> Tensor:
        """Return memory with a unit's parameters (`staged_views`). Give it back once the device has read it."""
        place = self.staging.take(wanted, partial(_read_staged, wanted))
        self.moves.add("read", sum([state.flat.staged_bytes for state in wanted]))
        return place


@dataclass(slots=True, eq=False)
class Spare:
    """Memory for the rows and the updated weights of one flat, on the host or, as `regions`, on disk. Its
    contents are old, or a result that is not used yet. Flats of one size share it."""

    rows: dict[str, Tensor]
    regions: list[Region]
    updated: Tensor | None


def _spare_kind(flat: Flat) -> Hashable:
    return flat.num_master, flat.master, flat.compute if flat.updates_copy else None, flat.master_on


class Rows:
    """Tensors of the master's length that belong together, as tensors on the host or as chunks on disk."""

    def __init__(self, memory: HostMemory, flat: Flat, names: Sequence[str], unit_name: str) -> None:
        self._memory = memory
        self.names = tuple(names)
        self.dtype = flat.master.torch
        self.on_disk = flat.master_on == "disk"
        self.chunks = chunks_of(flat) if self.on_disk else [Interval(0, flat.num_master)]
        what = f"the optimizer's state of unit {unit_name!r}" if flat.trainable else f"unit {unit_name!r}"
        self.tensors = {
            name: memory.arena.take(flat.num_master, self.dtype, f"{name} of {unit_name}")
            for name in (() if self.on_disk else names)
        }
        self.regions = [
            memory.store.region(record_bytes(flat, chunk, len(names) - 1), f"{what}, chunk {number}")
            for number, chunk in enumerate(self.chunks if self.on_disk else ())
        ]

    def views(self, number: int, window: Tensor | None) -> dict[str, Tensor]:
        """The rows of a chunk: in its window, if it came from disk."""
        if window is None:
            return self.tensors
        record = window[: self.regions[number].num_bytes].view(self.dtype)
        return dict(zip(self.names, record.split(self.chunks[number].num_elems), strict=True))

    def take(self, number: int, moves: Moves) -> Tensor | None:
        """Return a window with a chunk from disk (zeros if it was never written); None if rows are on the host."""
        if not self.on_disk:
            return None
        region = self.regions[number]
        if region.is_new:
            return self._empty_window(region)
        moves.add("read", region.num_bytes)
        return self._memory.windows.take(region, partial(self._read, region))

    def ask(self, number: int) -> None:
        """Read a chunk ahead, if it exists and there is a window for it."""
        if number < len(self.regions) and not self.regions[number].is_new:
            self._memory.windows.ask(self.regions[number], partial(self._read, self.regions[number]))

    def _read(self, region: Region, window: Tensor) -> list[Pending]:
        return [self._memory.store.fetch(region, window[: region.num_bytes])]

    def _empty_window(self, region: Region) -> Tensor:
        window = self._memory.windows.take_empty()
        window[: region.num_bytes].zero_()
        return window

    def put(self, region: Region, window: Tensor, moves: Moves) -> Pending:
        """Start to write a chunk from its window, to its region or to a spare one."""
        moves.add("write", region.num_bytes)
        return self._memory.store.put(region, window[: region.num_bytes])

    def part(self, name: str, where: slice) -> Tensor:
        """Elements of a row: a view of it on the host, a copy of what is on disk."""
        if not self.on_disk:
            return self.tensors[name][where]
        found = temporary_zeros(where.stop - where.start, self.dtype)
        for region, here, inside in self._places(name, where):
            if not region.is_new:
                self._memory.store.fetch(region, found[here], inside).wait()
        return found

    def address(self, name: str, start: int) -> int | None:
        """The address of an element of a row; None if it is on disk."""
        return None if self.on_disk else self.tensors[name][start:].data_ptr()

    def set_part(self, name: str, where: slice, values: Tensor) -> None:
        """Set elements of a row to `values`. The other elements of a chunk that was never written become zero."""
        if not self.on_disk:
            self.tensors[name][where].copy_(values)
            return
        values, store = values.to("cpu", self.dtype), self._memory.store
        for region, here, inside in self._places(name, where):
            if not region.is_new:
                store.put(region, values[here], inside).wait()
                continue
            window, part = self._empty_window(region), values[here].contiguous().view(torch.uint8)
            window[inside : inside + part.numel()].copy_(part)
            store.put(region, window[: region.num_bytes]).wait()
            self._memory.windows.give_back(window)

    def _places(self, name: str, where: slice) -> Iterator[tuple[Region, slice, int]]:
        """The chunks that hold elements of a row: the region, which elements, and their first byte in it."""
        wanted = Interval(where.start, where.stop)
        for region, chunk in zip(self.regions, self.chunks, strict=True):
            common = wanted.overlap(chunk)
            if common.num_elems:
                first = self.names.index(name) * chunk.num_elems + common.start - chunk.start
                yield region, common.within(wanted), first * self.dtype.itemsize


@dataclass(slots=True, eq=False)
class OffloadedState:
    """The offloaded state of one flat. `region` is the copy at rest on disk. Only `swap` replaces its tensors."""

    memory: HostMemory
    flat: Flat
    rows: Rows | None
    out: Tensor | None
    rest: Tensor | None
    region: Region | None
    grads: Tensor | None

    @property
    def updated(self) -> Tensor | None:
        """The tensor for updated weights in the compute dtype; None if they are the master itself, or go to disk."""
        return self.rest if self.rest is not None and self.flat.rest_is_own else self.out

    def swap(self, spare: Spare) -> None:
        """Let rows and updated weights change places with `spare`."""
        assert self.rows is not None
        self.rows.tensors, spare.rows = spare.rows, self.rows.tensors
        self.rows.regions, spare.regions = spare.regions, self.rows.regions
        for one, other in zip(self.rows.regions, spare.regions, strict=True):  # errors name the unit
            one.what, other.what = other.what, one.what
        if self.updated is self.rest:
            self.rest, spare.updated = spare.updated, self.rest
        else:
            self.out, spare.updated = spare.updated, self.out

    @property
    def writes_weights(self) -> bool:
        """True if an update writes its weights to the copy at rest on disk."""
        return self.region is not None and self.flat.rest_is_own

    def start_writing(self, weights: Tensor, at: int, moves: Moves) -> Pending:
        """Start to write this rank's weights in the compute dtype to disk, at element `at` of the copy at rest."""
        assert self.region is not None
        moves.add("write", weights.nbytes)
        return self.memory.store.put(self.region, weights, at * weights.element_size())


def staged_views(wanted: Sequence[OffloadedState], place: Tensor) -> Iterator[tuple[OffloadedState, Tensor]]:
    """Yield each state with its part of staging memory."""
    start = 0
    for state in wanted:
        num_bytes = state.flat.num_rest * state.flat.moved.itemsize
        yield state, place[start : start + num_bytes].view(state.flat.moved.torch)
        start += round_up(num_bytes, ALIGNMENT)


def _read_staged(wanted: Sequence[OffloadedState], place: Tensor) -> list[Pending]:
    reading = []
    for state, view in staged_views(wanted, place):
        if state.region is not None:
            reading.append(state.memory.store.fetch(state.region, view))
            continue
        assert state.rows is not None  # frozen: rows are the master alone
        for region, chunk in zip(state.rows.regions, state.rows.chunks, strict=True):
            if region.is_new:  # it has only padding
                view[chunk.start : chunk.stop].zero_()
            else:
                reading.append(state.memory.store.fetch(region, view[chunk.start : chunk.stop]))
    return reading
