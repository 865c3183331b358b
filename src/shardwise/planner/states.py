"""Parameters, gradients and optimizer alone, as the papers count them, for a model of which only the size is known.

Mixed precision is 2 + 2 + 12 bytes a parameter: weights and gradients in 16 bits, and fp32 masters with Adam's two
moments; pure bf16 is 2 + 2 + 4. Each is divided by the ranks it is split over. The engine itself differs in two places,
which a plan of a real model counts: under zero3 it keeps no 16-bit shard in addition to the masters, and gradients are
fp32 by default. Traffic is that of one matrix of this size, with gradients in 16 bits.
"""

from dataclasses import dataclass, replace

from ..base.dtypes import BF16, FP16
from ..base.errors import ConfigurationError
from ..core.layout import PRESETS, Layout, Split, Strategy, layouts_for
from ..core.schedule.flat import Pass, flats_of
from ..core.schedule.model import ROOT, Param, Site, UnitSpec
from ..core.schedule.state_bytes import kept_losses
from ..core.schedule.step_schedule import UnitPlan
from ..core.schedule.unit_status import FlatGather
from .assess import Machine
from .cost.peak import Instant, Memory, Reserved
from .events import StepTraffic, gather_event, reduce_event, traffic_of, update_event
from .search import moved_presets, moves_behind_auto
from .shapes.shape import StatesOnly
from .training import Training

ROOM = 0.75


@dataclass(frozen=True, slots=True)
class StatesRow:
    """The states of a strategy: one instant of memory. Bytes of host and disk are per node."""

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
        return Reserved(self.total, self.total, self.total)

    @property
    def part_on_device(self) -> float:
        return self.layout.kept if self.layout.optimizer_on != "device" else 1.0

    @property
    def why_not(self) -> str:
        return self.machine.lacks(self.total + self.machine.context_bytes, self.host_bytes, self.disk_bytes)


@dataclass(frozen=True, slots=True)
class States:
    """Memory of the training state for each strategy. Recommended is the least split row that leaves a quarter of the
    GPU to activations, else the least split row that fits. Rows that need the host come after those that do not."""

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
    if training.lora is not None:
        raise ConfigurationError(f"{shape.name} with adapters: where they go needs a real shape")
    moves = moves_behind_auto(strategy)
    layouts = PRESETS
    if strategy is not None and moves != []:
        asked = moved_presets(moves) if moves else layouts_for(strategy, [ROOT])
        layouts = {layout.name: layout for layout in asked}
    rows = [_row(name, layout, shape.num_params, machine, training) for name, layout in layouts.items()]
    return States(shape, machine, training, tuple(rows))


def _row(name: str, layout: Layout, num_params: int, machine: Machine, training: Training) -> StatesRow:
    formats, cluster = training.formats, machine.cluster
    half = formats.compute.itemsize
    moments = training.num_moments * formats.master.itemsize
    has_master = formats.master != formats.compute
    share = {"whole": 1, "node": cluster.node_size, "world": cluster.world_size}

    def part(bytes_each: float, split: Split) -> int:
        return round(num_params * bytes_each / share[split])

    unit = _unit(layout, num_params, machine, training)
    params, grads = part(half, layout.params), part(half, layout.grads)
    if all(flat.copy_is_encoded for flat in unit.flats):
        params = sum(flat.rest_bytes for flat in unit.flats)
    optimizer = part(moments + (formats.master.itemsize if has_master else 0), layout.optimizer)
    on_device = {"params": params, "grads": grads, "optimizer": optimizer}
    elsewhere = {"host": 0, "disk": 0}
    for what, place in (("params", layout.params_on), ("grads", layout.grads_on), ("optimizer", layout.optimizer_on)):
        if place != "device":
            kept = round(layout.kept * on_device[what])
            elsewhere[place] += (on_device[what] - kept) * cluster.node_size
            on_device[what] = kept
    on_device["grads"] += kept_losses(unit.flats)
    held = (on_device["params"], on_device["grads"], on_device["optimizer"], 0, 0, 0, 0)
    memory = Memory((Instant("between backward and step", held),), (), training.num_moments, 0)
    return StatesRow(
        name, layout, training, machine, memory, elsewhere["host"], elsewhere["disk"], _moved(unit, machine, training)
    )


def _unit(layout: Layout, num_params: int, machine: Machine, training: Training) -> UnitPlan:
    """Return a unit that consists of one matrix with all parameters."""
    formats = training.formats
    if formats.compute in (BF16, FP16):
        formats = replace(formats, reduce=formats.compute)
    param = Param("weight", (1, num_params), formats.master, True, (Site("", "weight"),))
    found = UnitSpec(ROOT, "", (param,), False, True)
    return UnitPlan(ROOT, layout, flats_of(found, layout, formats, machine.cluster.axes, ()), False, True)


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
