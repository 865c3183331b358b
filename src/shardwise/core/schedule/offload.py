"""What rests on the host and on disk, piece by piece: the engine takes its memory by this list, the planner adds it up.

What rests on disk comes to the host to be used. The optimizer's state comes in chunks, through windows: while one is
updated, others are read and written. Parameters come unit by unit, ahead of the computation, into places where they are
staged for the device.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...base.intervals import Interval
from .flat import Flat
from .sizes import arena_bytes, disk_bytes

# A chunk is long enough for the disk to be as fast as it can be.
CHUNK_ELEMS = 8 << 20
NUM_WINDOWS = 4
NUM_STAGED = 3
# Smaller activations stay on the device: they are not worth a copy.
MIN_OFFLOADED_ACTIVATION_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class OffDevice:
    """Bytes of one rank. `host` is all that lies there, windows and staging places too."""

    host: int
    disk: int
    windows: int
    staged: int


def off_device(units: Sequence[Sequence[Flat]], num_rows: float) -> OffDevice:
    """`num_rows`: of the master's length, that the optimizer keeps beside it."""
    flats = [flat for unit in units for flat in unit]
    windows = NUM_WINDOWS * max((window_bytes(flat, num_rows) for flat in flats), default=0)
    staged = NUM_STAGED * max((staged_bytes(unit) for unit in units), default=0)
    resting = arena_bytes(size for flat in flats for size in host_pieces(flat, num_rows))
    disk = disk_bytes(size for flat in flats for size in disk_pieces(flat, num_rows))
    return OffDevice(resting + windows + staged, disk, windows, staged)


def host_pieces(flat: Flat, num_rows: float) -> Iterator[int]:
    if flat.master_on == "host":
        master = flat.num_master * flat.master.itemsize
        yield from _rows(master, num_rows if flat.trainable else 0)
    if flat.has_out:
        yield flat.num_master * flat.compute.itemsize
    if flat.rest_on == "host":
        yield flat.num_rest * flat.compute.itemsize
    if flat.host_updates:
        yield (flat.num_grads if flat.grads_on_host else flat.num_master) * flat.reduce.itemsize


def _rows(master: int, num_rows: float) -> Iterator[int]:
    yield master
    while num_rows > 0:
        yield round(master * min(1.0, num_rows))
        num_rows -= 1


def disk_pieces(flat: Flat, num_rows: float) -> Iterator[int]:
    if flat.master_on == "disk":
        for chunk in chunks_of(flat):
            yield record_bytes(flat, chunk, num_rows)
    if flat.rest_on == "disk":
        yield flat.num_rest * flat.compute.itemsize


def chunks_of(flat: Flat) -> list[Interval]:
    """Of the master of one rank."""
    starts = range(0, flat.num_master, CHUNK_ELEMS)
    return [Interval(start, min(start + CHUNK_ELEMS, flat.num_master)) for start in starts]


def record_bytes(flat: Flat, chunk: Interval, num_rows: float) -> int:
    """A chunk on disk: the master's, and that of every row, one behind the other."""
    return round(chunk.num_elems * flat.master.itemsize * (1 + (num_rows if flat.trainable else 0)))


def window_bytes(flat: Flat, num_rows: float) -> int:
    """A chunk in memory, and the weights that come out of its update, if they go to disk. What rests on the host is
    updated in one."""
    writes = flat.rest_on == "disk" and flat.rest_is_own
    if flat.master_on != "disk":
        return arena_bytes([flat.num_master * flat.compute.itemsize]) if writes and flat.host_updates else 0
    chunk = Interval(0, min(CHUNK_ELEMS, flat.num_master))
    out = chunk.num_elems * flat.compute.itemsize if writes else 0
    return arena_bytes((record_bytes(flat, chunk, num_rows), out))


def staged_bytes(flats: Iterable[Flat]) -> int:
    """The parameters of a unit on their way from disk to the device."""
    return arena_bytes(flat.num_rest * flat.compute.itemsize for flat in flats if is_staged(flat))


def is_staged(flat: Flat) -> bool:
    """Weights for the device come from disk; those that were just updated are on the host."""
    return flat.rest_on == "disk" or (flat.rest_on is None and flat.master_on == "disk" and not flat.has_out)
