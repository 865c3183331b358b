"""Parameters, gradients and optimizer alone, as the papers count them, for a model of which only the size is known.

Mixed precision is 2 + 2 + 12 bytes a parameter: weights and gradients in 16 bits, and fp32 masters with Adam's two
moments; pure bf16 is 2 + 2 + 4. Each is divided by the ranks it is split over. The engine itself differs in two points,
which only the plan of a real model takes into account: under zero3 it keeps no 16-bit shard in addition to the masters,
and gradients are fp32 by default. Traffic is that of one matrix of this size, with gradients in 16 bits.
"""

from dataclasses import dataclass, replace

from ..base.dtypes import BF16, FP16
from ..core.layout import Layout, Strategy
from ..core.schedule.flat import Pass, flats_of
from ..core.schedule.model import ROOT, Param, Site, UnitSpec
from ..core.schedule.state_bytes import OffDevice, saved_error_bytes
from ..core.schedule.step_schedule import UnitPlan
from ..core.schedule.unit_status import FlatGather
from .assess import Machine
from .cost.peak import Instant, Memory, Reserved
from .events import StepTraffic, gather_event, reduce_event, traffic_of, update_event
from .search import tried_layouts
from .shapes.shape import StatesOnly
from .training import Training

# Settings that decide the states; every other one is refused.
STATE_FIELDS = ("precision", "optimizer", "moments", "num_micro_batches")
ROOM = 0.75  # share of the GPU's memory for the states; activations need the rest


@dataclass(frozen=True, slots=True)
class StatesRow:
    """The training state of one strategy. `memory` has one instant only. Bytes of host and disk are per node."""

    name: str
    layout: Layout
    training: Training
    machine: Machine
    memory: Memory
    host_bytes: int
    disk_bytes: int
    moved: StepTraffic

    @property
    def total(self) -> int:
        return self.memory.peak.total

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return (self.layout,)

    @property
    def reserved(self) -> Reserved:
        return Reserved.exactly(self.total)

    @property
    def part_on_device(self) -> float:
        return self.layout.kept if self.layout.optimizer_on != "device" else 1.0

    @property
    def why_not(self) -> str:
        lacks = self.machine.lacks(self.total + self.machine.context_bytes, self.host_bytes, self.disk_bytes)
        return self.training.why_not_on([self.layout.optimizer_on]) or lacks


@dataclass(frozen=True, slots=True)
class States:
    """Memory of the training state for each strategy. `recommended`: the row that splits least and leaves a quarter of
    the GPU to activations, else the one that splits least and fits; with the host only if no row fits without it."""

    shape: StatesOnly
    machine: Machine
    training: Training
    rows: tuple[StatesRow, ...]

    @property
    def recommended(self) -> StatesRow | None:
        fitting = [row for row in self.rows if not row.why_not]
        fitting = [row for row in fitting if row.layout.is_exact] or fitting
        fitting = [row for row in fitting if not row.layout.uses_host] or fitting
        roomy = [row for row in fitting if row.total <= ROOM * self.machine.memory_bytes]
        return next(iter(roomy or fitting), None)

    @property
    def facts(self) -> dict[str, object]:
        note = {"note": self.shape.note} if self.shape.note else {}
        return {"name": self.shape.name, "num_params": self.shape.num_params, **note}

    @property
    def why(self) -> str:
        words = "the states alone, as the papers count them: activations, buffers and time need a real shape"
        return "; ".join(filter(None, [words, "" if self.recommended else "they fit nowhere", self.shape.note]))


def states_of(shape: StatesOnly, machine: Machine, training: Training, strategy: Strategy | None = None) -> States:
    """Return the states of every preset, with the changes that follow `auto+`, or of the one requested strategy."""
    layouts = tried_layouts(strategy, [ROOT])
    rows = [_row(layout.name, layout, shape.num_params, machine, training) for layout in layouts]
    return States(shape, machine, training, tuple(rows))


def _row(name: str, layout: Layout, num_params: int, machine: Machine, training: Training) -> StatesRow:
    formats, cluster = training.formats, machine.cluster
    half, master = formats.compute.itemsize, formats.master.itemsize
    ranks = {"whole": 1, "node": cluster.node_size, "world": cluster.world_size}
    # A unit that consists of one matrix with all parameters.
    param = Param("weight", (1, num_params), formats.master, True, (Site("", "weight"),))
    sent = replace(formats, reduce=formats.compute) if formats.compute in (BF16, FP16) else formats
    spec = UnitSpec(ROOT, "", (param,), False, True)
    unit = UnitPlan(ROOT, layout, flats_of(spec, layout, sent, cluster.axes, ()), False, True)
    each = {"params": half, "grads": half, "optimizer": training.num_moments * master}
    if formats.master != formats.compute:
        each["optimizer"] += master
    on_device: list[int] = []
    elsewhere = {"host": 0, "disk": 0}
    for what, bytes_each in each.items():
        num_bytes = round(num_params * bytes_each / ranks[getattr(layout, what)])
        if what == "params" and all(flat.copy_is_encoded for flat in unit.flats):
            num_bytes = sum(flat.rest_bytes for flat in unit.flats)
        place = getattr(layout, f"{what}_on")
        if place != "device":
            elsewhere[place] += (num_bytes - round(layout.kept * num_bytes)) * cluster.node_size
            num_bytes = round(layout.kept * num_bytes)
        on_device.append(num_bytes + (saved_error_bytes(unit.flats) if what == "grads" else 0))
    memory = Memory((Instant("the end of the backward", (*on_device, 0, 0, 0, 0)),), OffDevice(0, 0, 0, 0))
    moved = _moved(unit, machine, training)
    return StatesRow(name, layout, training, machine, memory, elsewhere["host"], elsewhere["disk"], moved)


def _moved(unit: UnitPlan, machine: Machine, training: Training) -> StepTraffic:
    cluster = machine.cluster
    num = training.num_micro_batches
    until = unit.layout.gathered_until
    passes: tuple[Pass, ...] = ("forward", "backward") if until == "forward" else ("forward",)
    flats = list(enumerate(unit.flats))
    events = [
        gather_event(unit, [FlatGather(at, index == 0, flat.is_encoded_for(pass_)) for at, flat in flats])
        for index, pass_ in enumerate(passes * (1 if until == "always" else num))
    ]
    events += [reduce_event(unit, is_first=index == 0, is_last=index == num - 1) for index in range(num)]
    events.append(update_event(unit, training.num_moments))
    return traffic_of(events, cluster.num_nodes, cluster.node_size)
