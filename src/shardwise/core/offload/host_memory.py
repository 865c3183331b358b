"""The offloaded state of a rank's flats: tensors on the host, regions on disk.

    rows      the master, and the optimizer's tensors of the same length, by name
    out       updated weights in the compute dtype, on their way to the device
    rest      the copy at rest, if it is offloaded (`Flat.rest_on`)
    grads     gradients until the update reads them

On the host all tensors are pieces of one arena. On disk rows are cut into chunks. A chunk's rows are read together into
a window of host memory, to be updated. Parameters are read ahead into staging memory, and copied to the device.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...base.direct_io import ALIGNMENT
from ...base.errors import ConfigurationError
from ...base.intervals import Interval, round_up
from ..native.library import library
from ..schedule.flat import Flat
from ..schedule.offload import NUM_STAGED, NUM_WINDOWS, Way, chunks_of, host_tensors, off_device, record_bytes
from .arena import Arena, temporary_zeros
from .disk import Disk, Pending, Region

MASTER = "master"
# At most this many windows are read ahead: the disk should have something to write at the same time.
NUM_ASKED = NUM_WINDOWS - 2


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


class HostMemory:
    """The host's memory and the disk's file of one rank, sized once for all units."""

    def __init__(
        self, units: Sequence[Sequence[Flat]], row_names: Sequence[str], disk_path: Path | None, pin: bool
    ) -> None:
        self.size = off_device(units, len(row_names))
        self.row_names = tuple(row_names)
        self.moves, self.last_moves = Moves(), Moves()  # of this step, and of the last complete one
        self.disk: Disk | None = None
        if self.size.disk:
            if disk_path is None:
                raise ConfigurationError(
                    "something rests on disk and no folder is named for it: give disk_path=, a folder on a local disk "
                    f"with {self.size.disk:,} bytes of room for each rank"
                )
            self.disk = Disk(disk_path, self.size.disk, library())
        self.arena = Arena(self.size.host, pin=pin)
        self.windows = Windows(self, self._buffers(NUM_WINDOWS, self.size.windows, "a window"))
        self.staging = Staging(self._buffers(NUM_STAGED, self.size.staged, "staging"))

    def _buffers(self, num: int, total_bytes: int, what: str) -> list[Tensor]:
        return [self.arena.take(total_bytes // num, torch.uint8, what) for _ in range(num if total_bytes else 0)]

    def away_for(self, flat: Flat, unit_name: str) -> "OffloadedState | None":
        if flat.master_on == "device" and flat.rest_on in (None, "device"):
            return None
        rows = None
        if flat.master_on != "device":
            rows = Rows(self, flat, (MASTER, *(self.row_names if flat.trainable else ())), unit_name)
        taken = {
            name: self.arena.take(num_elems, dtype.torch, f"{name} of {unit_name}")
            for name, (num_elems, dtype) in host_tensors(flat).items()
        }
        region = None
        if flat.rest_on == "disk":
            assert self.disk is not None
            region = self.disk.region(flat.num_rest * flat.compute.itemsize, f"parameters of unit {unit_name!r}")
        return OffloadedState(self, flat, rows, taken.get("out"), taken.get("rest"), region, taken.get("grads"))

    def close_step(self) -> None:
        self.last_moves, self.moves = self.moves, Moves()


class Rows:
    """Tensors of the master's length that belong together, as tensors on the host or as chunks on disk."""

    def __init__(self, memory: HostMemory, flat: Flat, names: Sequence[str], unit_name: str) -> None:
        self._memory = memory
        self.names = tuple(names)
        self.dtype = flat.master.torch
        self.num_elems = flat.num_master
        self.tensors: dict[str, Tensor] = {}
        self.regions: list[Region] = []
        if flat.master_on == "host":
            self.chunks = [Interval(0, flat.num_master)]
            self.tensors = {
                name: memory.arena.take(flat.num_master, self.dtype, f"{name} of {unit_name}") for name in names
            }
        else:
            assert memory.disk is not None
            self.chunks = chunks_of(flat)
            what = f"the optimizer's state of unit {unit_name!r}" if flat.trainable else f"unit {unit_name!r}"
            self.regions = [
                memory.disk.region(record_bytes(flat, chunk, len(names) - 1), f"{what}, chunk {number}")
                for number, chunk in enumerate(self.chunks)
            ]
            self._is_written = [False] * len(self.chunks)

    @property
    def on_disk(self) -> bool:
        return not self.tensors

    def views(self, number: int, record: Tensor | None) -> dict[str, Tensor]:
        """The rows of a chunk: in `record`, if it came from disk."""
        chunk = self.chunks[number]
        if record is None:
            return {name: row[chunk.start : chunk.stop] for name, row in self.tensors.items()}
        parts = record.view(self.dtype).split(chunk.num_elems)
        return dict(zip(self.names, parts, strict=True))

    def record_bytes(self, number: int) -> int:
        return self.chunks[number].num_elems * self.dtype.itemsize * len(self.names)

    def take(self, number: int) -> Tensor | None:
        """A window with a chunk read from disk, or zeros if it was never written; None if rows are on the host."""
        if not self.on_disk:
            return None
        if self._is_written[number]:
            return self._memory.windows.take(self.regions[number], self.record_bytes(number))
        return self._memory.windows.take_empty(self.record_bytes(number)).zero_()

    def ask(self, number: int) -> None:
        """Read a chunk ahead, if there is a window for it."""
        if self.on_disk and self._is_written[number]:
            self._memory.windows.ask(self.regions[number], self.record_bytes(number))

    def put(self, number: int, record: Tensor | None, beside: Sequence[Pending] = ()) -> None:
        """Start to write a chunk. Its window is free after this write and those in `beside`, from the same window."""
        if record is not None:
            self._is_written[number] = True
            self._memory.windows.put(self.regions[number], record, beside)

    def part(self, name: str, where: slice) -> Tensor:
        """Elements of a row: a view of it on the host, a copy of what is on disk."""
        if not self.on_disk:
            return self.tensors[name][where]
        found = temporary_zeros(where.stop - where.start, self.dtype)
        for number, here, inside in self._places(name, where):
            if self._is_written[number]:
                assert self._memory.disk is not None
                self._memory.disk.fetch(self.regions[number], found[here], inside).wait()
        return found

    def set_part(self, name: str, where: slice, values: Tensor) -> None:
        """Set elements of a row from outside. The other elements of a chunk that was never written become zero."""
        if not self.on_disk:
            self.tensors[name][where].copy_(values)
            return
        values = values.to("cpu", self.dtype)
        for number, here, inside in self._places(name, where):
            assert self._memory.disk is not None
            if self._is_written[number]:
                self._memory.disk.put(self.regions[number], values[here], inside).wait()
                continue
            windows, part = self._memory.windows, values[here].contiguous().view(torch.uint8)
            record = windows.take_empty(self.record_bytes(number)).zero_()
            record[inside : inside + part.numel()].copy_(part)
            self._memory.disk.put(self.regions[number], record).wait()
            windows.give_back(record)
            self._is_written[number] = True

    def _places(self, name: str, where: slice) -> Iterator[tuple[int, slice, int]]:
        """The chunks that hold elements of a row: the chunk's number, which elements, and their first byte in it."""
        wanted = Interval(where.start, where.stop)
        for number, chunk in enumerate(self.chunks):
            common = wanted.overlap(chunk)
            if common.num_elems:
                first = self.names.index(name) * chunk.num_elems + common.start - chunk.start
                yield number, common.within(wanted), first * self.dtype.itemsize

    def all_of(self, name: str) -> Tensor:
        return self.part(name, slice(0, self.num_elems))


@dataclass(frozen=True, slots=True)
class OffloadedState:
    """The offloaded state of one flat. `region` is the copy at rest on disk."""

    memory: HostMemory
    flat: Flat
    rows: Rows | None
    out: Tensor | None
    rest: Tensor | None
    region: Region | None
    grads: Tensor | None

    @property
    def updated(self) -> Tensor | None:
        """The tensor for updated weights in the compute dtype; None if that is the master itself, or the disk."""
        return self.rest if self.rest is not None and self.flat.rest_is_own else self.out

    def start_writing(self, values: Tensor, at: int, moves: Moves) -> list[Pending]:
        """Start to write this rank's weights in the compute dtype to disk, at element `at` of the copy at rest."""
        if self.region is None or not self.flat.rest_is_own:
            return []
        assert self.memory.disk is not None
        moves.add("write", values.nbytes)
        return [self.memory.disk.put(self.region, values, at * values.element_size())]

    def publish(self, master: Tensor, moves: Moves) -> None:
        """Renew the copies of the master after something else than an update on the host has changed it."""
        if self.updated is not None:
            self.updated.copy_(master)
        if self.region is not None and self.flat.rest_is_own:
            weights = temporary_zeros(master.numel(), self.flat.compute.torch).copy_(master)
            for pending in self.start_writing(weights, 0, moves):
                pending.wait()


class Windows:
    """Host memory for chunks of rows on disk while they are read, updated and written, and for updated weights that are
    written to disk."""

    def __init__(self, memory: HostMemory, windows: list[Tensor]) -> None:
        self._memory = memory
        self._free = deque(windows)
        self._asked: dict[Region, tuple[Tensor, Pending]] = {}
        self._whole: dict[int, Tensor] = {window.data_ptr(): window for window in windows}
        self._leaving: deque[tuple[Tensor, list[Pending]]] = deque()
        # The counter of the step whose updates run now.
        self.moves = memory.moves

    def ask(self, region: Region, num_bytes: int) -> None:
        while self._leaving and all(pending.is_done for pending in self._leaving[0][1]):
            self._wait_for_oldest()
        if self._free and len(self._asked) < NUM_ASKED and region not in self._asked:
            self._start(region, num_bytes)

    def _start(self, region: Region, num_bytes: int) -> None:
        assert self._memory.disk is not None
        window = self._free.popleft()[:num_bytes]
        self.moves.add("read", num_bytes)
        self._asked[region] = (window, self._memory.disk.fetch(region, window))

    def _wait_for_oldest(self) -> None:
        window, writing = self._leaving.popleft()
        for pending in writing:
            pending.wait()
        self.give_back(window)

    def take(self, region: Region, num_bytes: int) -> Tensor:
        if region not in self._asked:
            self._make_room()
            self._start(region, num_bytes)
        window, pending = self._asked.pop(region)
        pending.wait()
        return window

    def take_empty(self, num_bytes: int) -> Tensor:
        self._make_room()
        return self._free.popleft()[:num_bytes]

    def _make_room(self) -> None:
        while not self._free and self._leaving:
            self._wait_for_oldest()
        if not self._free:
            # Drop a window that was read ahead for a later chunk, which must be read again.
            window, pending = self._asked.pop(next(reversed(self._asked)))
            pending.wait()
            self.moves.add("read", -window.nbytes)
            self.give_back(window)

    def room_beside(self, window: Tensor) -> Tensor:
        """The unused part of a window, behind the record in it."""
        return self._whole[window.data_ptr()][round_up(window.nbytes, ALIGNMENT) :]

    def put(self, region: Region, window: Tensor, beside: Sequence[Pending]) -> None:
        assert self._memory.disk is not None
        self.moves.add("write", window.nbytes)
        self.leave(window, [self._memory.disk.put(region, window), *beside])

    def leave(self, window: Tensor, writing: list[Pending]) -> None:
        """Free a window once its writes are done."""
        self._leaving.append((window, writing))

    def give_back(self, window: Tensor) -> None:
        self._free.append(self._whole[window.data_ptr()])

    def flush(self) -> None:
        """Wait for all writes."""
        while self._leaving:
            self._wait_for_oldest()


class Staging:
    """Host memory into which the parameters of units are read ahead from disk, to be copied to the device."""

    def __init__(self, places: list[Tensor]) -> None:
        # Each with a function that waits until it may be written again.
        self._free: deque[tuple[Tensor, Callable[[], None]]] = deque((place, lambda: None) for place in places)
        self._asked: dict[int, tuple[Tensor, Sequence[OffloadedState], list[Pending]]] = {}

    def ask(self, unit: int, wanted: Sequence["OffloadedState"]) -> bool:
        """Start to read these flats of a unit, if a place is free; False if none is."""
        if unit in self._asked:
            return True
        if not self._free:
            return False
        place, wait = self._free.popleft()
        wait()
        self._asked[unit] = (
            place,
            wanted,
            [part for view, away in _views(place, wanted) for part in _read(view, away)],
        )
        return True

    def take(self, unit: int, wanted: Sequence["OffloadedState"]) -> tuple[Tensor, dict[Flat, Tensor]]:
        """The memory with a unit's parameters, to be given back when the device has read it, and each flat's part."""
        if unit in self._asked and not _are_same(self._asked[unit][1], wanted):
            self._forget_one(unit)
        if not self.ask(unit, wanted):
            self._forget_one(next(reversed(self._asked)))
            self.ask(unit, wanted)
        place, _, pending = self._asked.pop(unit)
        for part in pending:
            part.wait()
        return place, {away.flat: view for view, away in _views(place, wanted)}

    def give_back(self, place: Tensor, wait: Callable[[], None] = lambda: None) -> None:
        self._free.append((place, wait))

    def _forget_one(self, unit: int) -> None:
        place, _, pending = self._asked.pop(unit)
        for part in pending:
            part.wait()
        self.give_back(place)

    def forget(self) -> None:
        """Drop everything that was read ahead: it is out of date."""
        for unit in list(self._asked):
            self._forget_one(unit)


def _are_same(some: Sequence["OffloadedState"], others: Sequence["OffloadedState"]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def _views(place: Tensor, wanted: Sequence["OffloadedState"]) -> list[tuple[Tensor, "OffloadedState"]]:
    found, start = [], 0
    for away in wanted:
        num_bytes = away.flat.num_rest * away.flat.compute.itemsize
        found.append((place[start : start + num_bytes].view(away.flat.compute.torch), away))
        start += round_up(num_bytes, ALIGNMENT)
    return found


def _read(view: Tensor, away: "OffloadedState") -> list[Pending]:
    disk = away.memory.disk
    assert disk is not None
    away.memory.moves.add("read", view.nbytes)
    if away.region is not None:
        return [disk.fetch(away.region, view)]
    assert away.rows is not None  # frozen: rows are the master alone
    return [
        disk.fetch(region, view[chunk.start : chunk.stop])
        for region, chunk in zip(away.rows.regions, away.rows.chunks, strict=True)
    ]
