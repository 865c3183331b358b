"""Bytes of training state per rank, from the flats alone: on the device, on the host and on disk.

State off the device is a list of pieces: the engine allocates them, the planner adds them up. State on disk is read
into host memory before it is used. Optimizer state is read in chunks, each into a buffer called a window: while one
chunk is updated, others are read and written. Parameters are read unit by unit into staging buffers, ahead of use.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

from ...base.dtypes import BF16, DType
from ...base.files import ALIGNMENT
from ...base.intervals import Interval, round_up
from ..layout import Place
from .flat import Flat
from .step_schedule import Schedule

# The dtype of encoding errors that are saved for feedback.
LOST = BF16
# Directions in which bytes move between the memories of a rank.
Way = Literal["to_device", "to_host", "read", "write"]

# A chunk is long enough for the disk to reach its full speed.
CHUNK_ELEMS = 8 << 20
NUM_WINDOWS = 4
NUM_STAGED = 3  # staging buffers, each for the parameters of one unit
# Usable fraction of free host memory; the system, the processes themselves and their data need the rest.
HOST_SHARE = 0.9
# Smaller activations stay on the device: they are not worth a copy.
MIN_OFFLOADED_ACTIVATION_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of state on the device of one rank. `params` are copies that stay between steps, in the compute dtype or
    encoded. `optimizer` is master and moments. `grads` includes encoding errors that are saved for feedback."""

    params: int
    grads: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.params + self.grads + self.optimizer

    def __str__(self) -> str:
        return ", ".join(f"{name} {num_bytes / 1e6:.1f} MB" for name, num_bytes in asdict(self).items())


def state_bytes(flats: Iterable[Flat], num_moments: float = 2) -> StateBytes:
    """State on the device of a rank between backward and step, padding included. Adam has two moments in the master's
    dtype; moments in fewer bits count as fractions."""
    flats = list(flats)
    states = [device_state(flat, num_moments) for flat in flats]
    grads = resting_grads(flats) + saved_error_bytes(flats)
    return StateBytes(sum(params for params, _ in states), grads, sum(optimizer for _, optimizer in states))


def device_state(flat: Flat, num_moments: float) -> tuple[int, int]:
    """Bytes of parameters and of the optimizer that stay on the device between steps. A master that is frozen or has
    the compute dtype counts as parameters."""
    params = flat.rest_bytes if flat.rest_on == "device" else 0
    if flat.layout.gathered_until == "always" and not flat.master_is_whole:
        params += flat.num_elems * flat.compute.itemsize
    master = flat.num_master * flat.master.itemsize if flat.master_on == "device" else 0
    moments = round(master * num_moments) if flat.trainable else 0
    if flat.trainable and flat.master != flat.compute:
        return params, moments + master
    return params + master, moments


def resting_grads(flats: Iterable[Flat]) -> int:
    """Bytes of gradients on the device between micro-batches."""
    return sum(flat.num_grads * flat.reduce.itemsize for flat in flats if flat.trainable and not flat.grads_on_host)


def saved_error_bytes(flats: Iterable[Flat]) -> int:
    """Bytes of the saved encoding errors of gradients. They are on the device from the first reduction on."""
    return sum(flat.num_lost * LOST.itemsize for flat in flats)


class OffDevice(NamedTuple):
    """Bytes of one rank off the device. `host` includes all windows and all staging buffers."""

    host: int
    disk: int
    windows: int
    staged: int


def off_device(units: Sequence[Sequence[Flat]], num_rows: float) -> OffDevice:
    """Add up the pieces of all units. A row is one optimizer tensor of the master's length: Adam has two."""
    times, kinds = Counter(map(id, units)), {id(unit): unit for unit in units}  # equal units share their flats
    flats = [(flat, times[kind]) for kind, unit in kinds.items() for flat in unit]
    windows = NUM_WINDOWS * max((window_bytes(flat, num_rows) for flat, _ in flats), default=0)
    staged = NUM_STAGED * max((padded_bytes(flat.staged_bytes for flat in unit) for unit in kinds.values()), default=0)
    host = sum(num * padded_bytes(host_pieces(flat, num_rows)) for flat, num in flats)
    disk = sum(num * padded_bytes(disk_pieces(flat, num_rows)) for flat, num in flats)
    return OffDevice(host + windows + staged, disk, windows, staged)


def padded_bytes(sizes: Iterable[int]) -> int:
    """Bytes for pieces of these sizes in a row, each aligned for O_DIRECT."""
    return sum(round_up(size, ALIGNMENT) for size in sizes)


def host_tensors(flat: Flat) -> dict[str, tuple[int, DType]]:
    """Elements and dtype of a flat's tensors on the host, apart from its master and the optimizer's rows.

    out     updated weights in the compute dtype, on their way to the device
    rest    the copy at rest, if it is on the host (`Flat.rest_on`)
    grads   gradients until the update reads them
    """
    found: dict[str, tuple[int, DType]] = {}
    if flat.has_out:
        found["out"] = flat.num_master, flat.compute
    if flat.rest_on == "host":
        found["rest"] = flat.num_rest, flat.compute
    if flat.host_updates:
        found["grads"] = flat.num_grads if flat.grads_on_host else flat.num_master, flat.reduce
    return found


def host_pieces(flat: Flat, num_rows: float) -> Iterator[int]:
    if flat.master_on == "host":
        master = flat.num_master * flat.master.itemsize
        yield master
        while flat.trainable and num_rows > 0:
            yield round(master * min(1.0, num_rows))
            num_rows -= 1
    for num_elems, dtype in host_tensors(flat).values():
        yield num_elems * dtype.itemsize


def spare_bytes(flat: Flat, num_rows: int) -> tuple[int, int]:
    """Bytes of spare host memory, and on disk, for an update ahead of the step: for rows and updated weights."""
    on_host = [flat.num_master * flat.compute.itemsize] * flat.updates_copy
    if flat.master_on == "disk":
        return padded_bytes(on_host), padded_bytes(record_bytes(flat, chunk, num_rows) for chunk in chunks_of(flat))
    return padded_bytes(on_host + [flat.num_master * flat.master.itemsize] * (1 + num_rows)), 0


class Spares(NamedTuple):
    """Spare memory of one rank for updates ahead of the step. `flats`: each with the index of its unit; flats of one
    size share the memory. `why_not`: why the requested size cannot be used; empty if it can."""

    flats: tuple[tuple[int, Flat], ...] = ()
    host_bytes: int = 0
    disk_bytes: int = 0
    why_not: str = ""


def spares_of(
    schedule: Schedule, num_rows: int, speculation: int | None, shares: tuple[int, int], is_gpu: bool, able: set[int]
) -> Spares:
    """Choose the flats that get spare memory: those whose gradients come first in a backward. `speculation`: its bytes
    on host and disk together, or None for half of what this rank's share of the host has left next to the arena, and
    nothing on disk. `shares`: of host and disk. `able`: the numbers of the optimizers whose updates can run ahead."""
    units = schedule.units
    # On CPUs updates take the model's cores. Nobody knows yet how much memory offloaded activations will take.
    is_off = not is_gpu or any(unit.layout.activations_on == "host" for unit in units)
    if speculation == 0 or (speculation is None and is_off):
        return Spares()
    flats = [(at, flat) for at in schedule.reduce_order for flat in units[at].flats if flat.may_update_ahead]
    flats = [(at, flat) for at, flat in flats if flat.optimizer in able]
    taken = off_device([unit.flats for unit in units], num_rows)
    left, disk_left = max(shares[0] - taken.host, 0), max(shares[1] - taken.disk, 0)
    budget, on_host, on_disk, found = left // 2 if speculation is None else speculation, 0, 0, []
    sizes = [spare_bytes(flat, num_rows) for _, flat in flats]
    for each, (host, disk) in zip(flats, sizes, strict=True):
        fits = on_host + host <= left and on_host + host + on_disk + disk <= budget
        if fits and not (disk and speculation is None):
            found.append(each)
            on_host, on_disk = on_host + host, on_disk + disk
    why_not, places, least = "", {flat.master_on for _, flat in flats}, min(map(sum, sizes), default=0)
    if speculation is not None and not (why_not := why_no_spares(speculation, places, left, disk_left)) and not found:
        why_not = f"speculation is {speculation:,} bytes, and the smallest unit needs {least:,}: give more, or 0"
    return Spares(why_not=why_not) if why_not else Spares(tuple(found), on_host, on_disk)


def why_no_spares(speculation: int, places: set[Place], on_host: int, on_disk: int) -> str:
    """Return why no rank can use this size; empty if it may. `places`: of the state that can be updated ahead. The rest
    are a rank's bytes of host and disk: all of its share, if its model is not known yet, or what is left."""
    has, room = ("host and disk have", on_host + on_disk) if "disk" in places else ("the host has", on_host)
    why = f"{has} {room:,} left for each rank: give less, or 0 for none" if speculation > room else ""
    why = why if places else "no state that can be updated ahead is off the device (docs/offload.md): set it to 'auto'"
    return why and f"speculation is {speculation:,} bytes, and {why}"


def disk_pieces(flat: Flat, num_rows: float) -> Iterator[int]:
    if flat.master_on == "disk":
        yield from (record_bytes(flat, chunk, num_rows) for chunk in chunks_of(flat))
    if flat.rest_on == "disk":
        yield flat.num_rest * flat.compute.itemsize


def chunks_of(flat: Flat) -> list[Interval]:
    """Cut this rank's part of the master into chunks."""
    starts = range(0, flat.num_master, CHUNK_ELEMS)
    return [Interval(start, min(start + CHUNK_ELEMS, flat.num_master)) for start in starts]


def record_bytes(flat: Flat, chunk: Interval, num_rows: float) -> int:
    """Size of a chunk on disk: its part of the master and of every row, one behind the other."""
    return round(chunk.num_elems * flat.master.itemsize * (1 + (num_rows if flat.trainable else 0)))


def window_bytes(flat: Flat, num_rows: float) -> int:
    """Bytes of a window: for a chunk of the master and its rows, and for updated weights if those are written to disk.
    A master on the host is updated in one piece and needs only the second."""
    writes = flat.rest_on == "disk" and flat.rest_is_own
    if flat.master_on != "disk":
        return padded_bytes([flat.num_master * flat.compute.itemsize]) if writes and flat.host_updates else 0
    chunk = Interval(0, min(CHUNK_ELEMS, flat.num_master))
    out = chunk.num_elems * flat.compute.itemsize if writes else 0
    return padded_bytes((record_bytes(flat, chunk, num_rows), out))
