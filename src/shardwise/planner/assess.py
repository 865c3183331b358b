"""One strategy, costed: memory at every instant, traffic, seconds, and whether it fits.

Everything is derived from the schedule that the engine would execute. Equal blocks share one set of flats here, because
no cost depends on their names.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from ..core.layout import ALWAYS_WHOLE, Layout
from ..core.schedule.flat import Flat, flats_of
from ..core.schedule.model import UnitSpec, matches
from ..core.schedule.state_bytes import HOST_SHARE, Spares, spares_of
from ..core.schedule.step_schedule import Schedule, UnitPlan, make_schedule, require_frozen
from .cost import peak
from .cost.compute import seconds_of, speed_of, with_copies
from .cost.deepspeed import Zero, deepspeed_copies, deepspeed_events, deepspeed_memory_of
from .cost.fsdp import fsdp_copies, fsdp_memory_of
from .cost.step_time import Timing, step_time
from .events import Event, StepTraffic, step_events, traffic_of
from .hardware.cluster import Cluster
from .hardware.gpus import Efficiency, Overheads
from .training import OURS, Training, num_bytes_of
from .work.work import Work

Works = Callable[[Training], Mapping[str, Work]]
Sum = TypeVar("Sum", StepTraffic, Timing)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to plan: its units, and the work of one micro-batch in each of them."""

    name: str
    units: tuple[UnitSpec, ...]
    works: Works
    flops_per_token: float  # forward and backward, at the training's sequence length
    facts: Mapping[str, object]  # shown with the plan
    head_dim: int = 128


@dataclass(frozen=True, slots=True)
class Machine:
    """A cluster, and the share of its speed that is reached. `free_bytes`: free memory of a GPU, if it was measured;
    the driver's context is already subtracted, the buffers of the collectives are not. `has_reserve`: the device has a
    caching allocator and library workspaces; a CPU has neither, and its memory is the host's."""

    cluster: Cluster
    efficiency: Efficiency
    overheads: Overheads
    free_bytes: int | None = None
    has_reserve: bool = True

    @property
    def context_bytes(self) -> int:
        """Memory outside of the allocator: the driver's context, and the buffers of the collectives."""
        driver = self.cluster.gpu.context_bytes if self.free_bytes is None else 0
        return driver + (NCCL_BYTES if self.cluster.world_size > 1 and self.has_reserve else 0)

    @property
    def memory_bytes(self) -> int:
        return self.cluster.gpu.memory_bytes if self.free_bytes is None else self.free_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory of a node for offloaded state."""
        return round(HOST_SHARE * self.cluster.host_bytes)

    @property
    def shares(self) -> tuple[int, int]:
        """Bytes of host and disk of each rank for offloaded state."""
        return self.host_bytes // self.cluster.node_size, self.cluster.disk_bytes // self.cluster.node_size

    def lacks(self, gpu_bytes: int, host_bytes: int, disk_bytes: int) -> str:
        """Return a sentence about the first memory (GPU, host, disk) that is too small; empty if none is."""
        for what, needed, there, spare in (
            (f"each {self.cluster.gpu.name}", gpu_bytes, self.memory_bytes, ""),
            ("the host of each node", host_bytes if self.has_reserve else 0, self.host_bytes, " to spare"),
            ("the disk of each node", disk_bytes, self.cluster.disk_bytes, ""),
        ):
            if needed > there:
                return f"needs {needed / 1e9:,.1f} GB on {what}, which has {there / 1e9:,.1f} GB{spare}"
        return ""


# Memory of NCCL's communicators on a GPU, from published logs (1 to 2 GiB with a handful of groups).
NCCL_BYTES = 1 << 30
# The share of the memory by which a plan may be too low, unless free memory was measured. Of 120 own runs on one H200
# 9 reserved over 5 % more than planned, 8 of them within the interval. Drivers and other people's code differ more.
PLAN_ERROR = 0.05
# A good plan leaves more: one own run took 10.7 % more than planned, and those of others were missed by 7 to 9 %.
GOOD_ROOM = 0.10
# Maximum number of micro-batches that are simulated; further ones cost the same as one in the middle.
MAX_SIMULATED = 3


@dataclass(frozen=True, repr=False)
class Assessment:
    """Predicted memory, traffic and time of a strategy on a machine. Bytes of host and disk are per node."""

    name: str
    layouts: tuple[Layout, ...]
    training: Training
    machine: Machine
    schedule: Schedule
    works: Mapping[str, Work]
    head_dim: int
    clips: bool
    # Events without copies of activations, of this and other plans: trainings that differ in memory only share them.
    known_events: dict[object, tuple[Schedule, list[Event]]] = field(default_factory=dict)

    @cached_property
    def events(self) -> list[Event]:
        return self._events(min(self.training.num_micro_batches, MAX_SIMULATED))

    def _events(self, num_micro_batches: int) -> list[Event]:
        """The events of a step, including the copies of offloaded activations."""
        key = (id(self.schedule), num_micro_batches, self.clips, moments := self.training.num_moments)
        if key not in self.known_events:
            made = step_events(self.schedule, num_micro_batches, clips=self.clips, num_moments=moments)
            self.known_events[key] = self.schedule, made  # the id is that of a schedule that is still there
        events = self.known_events[key][1]
        if self.training.engine == "deepspeed":
            return deepspeed_events(events, self.schedule, self.training, Zero())
        offloaded = peak.offloaded_activations(self.schedule, self.works)
        return list(peak.with_activation_copies(events, offloaded)) if offloaded else events

    @cached_property
    def memory(self) -> peak.Memory:
        if self.training.engine != OURS:
            memory_of = fsdp_memory_of if self.training.is_fsdp else deepspeed_memory_of
            return memory_of(self.schedule, self.works, self.training)
        workspace_bytes = peak.WORKSPACE_BYTES if self.machine.has_reserve else 0
        keeps_slots = not self.machine.has_reserve
        return peak.memory_of(self.schedule, self.events, self.works, self.training, workspace_bytes, keeps_slots)

    @cached_property
    def reserved(self) -> peak.Reserved:
        if not self.machine.has_reserve:
            return peak.Reserved.exactly(self.memory.peak.total)
        is_recomputed = any(work.recomputed for work in self.works.values())
        reserved = peak.reserved_of(self.schedule, self.memory, self.training, is_recomputed)
        return peak.fragmented(reserved) if self.training.variable_length else reserved

    @cached_property
    def moved(self) -> StepTraffic:
        cluster = self.machine.cluster
        return self._continued(lambda events: traffic_of(events, cluster.num_nodes, cluster.node_size))

    @cached_property
    def timing(self) -> Timing:
        """The time of a step that is clipped, if the norm is computed."""
        return self._timing(frozenset())

    @cached_property
    def unclipped_s(self) -> float | None:
        """The time of a step that needs no clipping; None if the host never updates before the norm."""
        num_ahead = Counter(at for at, _ in self.spares.flats)
        units = {at: sum(flat.host_updates for flat in unit.flats) for at, unit in enumerate(self.schedule.units)}
        ahead = frozenset(self.schedule.units[at].name for at, num in num_ahead.items() if num == units[at])
        return self._timing(ahead).step_s if ahead else None

    def _timing(self, ahead: frozenset[str]) -> Timing:
        machine = self.machine
        speed = speed_of(machine.cluster.gpu, machine.efficiency, self.training, self.head_dim)
        seconds = seconds_of(self.schedule, self.works, speed, self.training)
        if self.training.engine != OURS:
            training, schedule = self.training, self.schedule
            copies = fsdp_copies(training) if training.is_fsdp else deepspeed_copies(schedule, training)
            seconds = with_copies(seconds, schedule, speed, copies)
        return self._continued(
            lambda events: step_time(self.schedule, events, seconds, machine.cluster, machine.overheads, ahead)
        )

    @cached_property
    def spares(self) -> Spares:
        """Host memory of a rank for updates before the norm. Moments in fewer bits are updated after it."""
        training, machine, size = self.training, self.machine, num_bytes_of(self.training.speculation)
        if not self.clips or training.engine != OURS or all(each.optimizer_on == "device" for each in self.layouts):
            return Spares()
        rows, optimizers = int(training.num_moments), set() if training.num_moments % 1 else {0}
        return spares_of(self.schedule, rows, size, machine.shares, machine.has_reserve, optimizers)

    def _continued(self, cost: Callable[[Sequence[Event]], Sum]) -> Sum:
        """Cost a step. Each micro-batch that is not simulated costs what the third one adds to the first two."""
        found = cost(self.events)
        num_more = self.training.num_micro_batches - MAX_SIMULATED
        return found.continued(cost(self._events(MAX_SIMULATED - 1)), num_more) if num_more > 0 else found

    def named(self, name: str) -> "Assessment":
        """Return the same under another name, with what is known of it."""
        found = copy(self)
        object.__setattr__(found, "name", name)
        return found

    @property
    def needed_bytes(self) -> int:
        """Memory that a GPU must have; on a CPU, offloaded state is included."""
        return self.reserved.expected + self._other_bytes

    @property
    def high_bytes(self) -> int:
        """Upper estimate of `needed_bytes`: the allocator wastes more than expected."""
        return self.reserved.high + self._other_bytes

    @property
    def _other_bytes(self) -> int:
        return self.machine.context_bytes + (0 if self.machine.has_reserve else self._rank_host_bytes)

    @property
    def _rank_host_bytes(self) -> int:
        return self.memory.host_bytes + self.spares.host_bytes

    @property
    def room_bytes(self) -> int:
        """Memory of each GPU that is expected to stay free."""
        return self.machine.memory_bytes - self.needed_bytes

    @property
    def error_bytes(self) -> int:
        """Memory by which `needed_bytes` may be too low: up to the upper estimate, and at least `PLAN_ERROR`."""
        machine = self.machine
        is_known = machine.free_bytes is not None or not machine.has_reserve
        return max(self.high_bytes - self.needed_bytes, 0 if is_known else round(PLAN_ERROR * machine.memory_bytes))

    @property
    def safe_bytes(self) -> int:
        return self.needed_bytes + self.error_bytes

    @property
    def is_tight(self) -> bool:
        """True if less memory stays free than the plan may be wrong by."""
        return self.safe_bytes > self.machine.memory_bytes

    @property
    def is_roomy(self) -> bool:
        return not self.is_tight and self.room_bytes >= GOOD_ROOM * self.machine.memory_bytes

    @property
    def is_on_device(self) -> bool:
        return not any(layout.uses_host for layout in self.layouts)

    @property
    def part_on_device(self) -> float:
        """The fraction of the optimizer state that stays on the device; no parameter is divided."""
        flats = self.schedule.trainable_flats
        num_elems = sum(flat.num_master for flat in flats)
        return sum(flat.num_master for flat in flats if not flat.host_updates) / max(num_elems, 1)

    @property
    def host_bytes(self) -> int:
        """Host memory of a node, with what is spare for updates before the norm."""
        return self._rank_host_bytes * self.machine.cluster.node_size

    @property
    def spare_bytes(self) -> int:
        """The spare part of `host_bytes` and `disk_bytes`."""
        return (self.spares.host_bytes + self.spares.disk_bytes) * self.machine.cluster.node_size

    @property
    def disk_bytes(self) -> int:
        return (self.memory.off_device.disk + self.spares.disk_bytes) * self.machine.cluster.node_size

    @property
    def fits(self) -> bool:
        return not self.why_not

    @cached_property
    def why_not(self) -> str:
        """The reason why the plan does not fit; empty if it fits."""
        refused = self.training.why_not_on(layout.optimizer_on for layout in self.layouts)
        lacks = self.machine.lacks(self.needed_bytes, self.host_bytes, self.disk_bytes)
        return refused or lacks or self.spares.why_not

    @property
    def step_s(self) -> float:
        return self.timing.step_s

    def __repr__(self) -> str:
        words = f"{self.needed_bytes / 1e9:,.1f} GB, {self.step_s:.3g} s a step" if self.fits else self.why_not
        return f"<{self.name}: {words}>"

    @property
    def is_exact(self) -> bool:
        """True if no collective is quantised: training then gives the numbers of a single process."""
        return all(layout.is_exact for layout in self.layouts)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second per GPU."""
        return self.training.num_tokens * self.training.num_micro_batches / self.timing.step_s


@dataclass(frozen=True, eq=False)
class Assessor:
    """Assesses strategies for one model on one machine; shared intermediate results are computed once."""

    subject: Subject
    machine: Machine
    _: KW_ONLY
    clips: bool = True
    budget_bytes: int | None = None
    keep_fp32: Sequence[str] = ()
    _flats: dict[object, tuple[Flat, ...]] = field(default_factory=dict, init=False)
    _schedules: dict[object, Schedule] = field(default_factory=dict, init=False)
    _events: dict[object, tuple[Schedule, list[Event]]] = field(default_factory=dict, init=False)
    _found: dict[object, Assessment] = field(default_factory=dict, init=False)

    @cached_property
    def unit_names(self) -> list[str]:
        return [unit.name for unit in self.subject.units]

    @cached_property
    def _alike(self) -> dict[str, int]:
        """A number for each unit, by the unit's name. Units with equal numbers have equal flats."""
        found: dict[str, int] = {}
        kinds: dict[object, int] = {}
        for unit in self.subject.units:
            kept = [bool(self.keep_fp32) and matches(p.sites[0].module, self.keep_fp32) for p in unit.params]
            sizes = ((param.shape, param.dtype, param.trainable, param.is_table) for param in unit.params)
            found[unit.name] = kinds.setdefault((*sizes, *kept), len(kinds))
        return found

    def on(self, machine: Machine) -> "Assessor":
        """Return an assessor for the same model on another machine."""
        return replace(self, machine=machine)

    def __call__(self, name: str, layouts: Layout | Sequence[Layout], training: Training) -> Assessment:
        """Assess a layout for all units, or one for each."""
        if isinstance(layouts, Layout):
            layouts = [layouts] * len(self.unit_names)
        used = tuple(
            Layout() if unit.name == ALWAYS_WHOLE else layout
            for unit, layout in zip(self.subject.units, layouts, strict=True)
        )
        key = (used, training.precision, training.reduce)
        if key not in self._schedules:
            self._schedules[key] = self._schedule(used, training)
        schedule = self._schedules[key]
        known = self._found.get((id(schedule), training))
        if known is not None:
            return known if known.name == name else known.named(name)
        works, head_dim, clips = self.subject.works(training), self.subject.head_dim, self.clips
        found = Assessment(name, used, training, self.machine, schedule, works, head_dim, clips, self._events)
        self._found[id(schedule), training] = found
        return found

    def _schedule(self, layouts: Sequence[Layout], training: Training) -> Schedule:
        plans = []
        for unit, layout in zip(self.subject.units, layouts, strict=True):
            key = (self._alike[unit.name], layout, training.precision, training.reduce)
            if key not in self._flats:
                axes = self.machine.cluster.axes
                self._flats[key] = flats_of(unit, layout, training.formats, axes, self.keep_fp32)
            plans.append(UnitPlan(unit.name, layout, self._flats[key], unit.holds_units, unit.backward_reads))
        require_frozen(plans)
        return make_schedule(plans, range(len(plans)), self.budget_bytes)
