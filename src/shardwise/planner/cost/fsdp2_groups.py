"""How FSDP2 (`fully_shard`) is told to wrap a model, and what it then gathers and reduces together."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...base.errors import ConfigurationError
from ...core.schedule.step_schedule import Schedule, UnitPlan
from ..work.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapping:
    """How `fully_shard` is called, as far as memory depends on it; torchtitan's ways since the middle of 2025.

    `ends_apart`: the embedding is a unit, and so is the head with the last norm; else they are the root's, as in
    torchtitan before and with accelerate. `keeps_last`: the last unit stays gathered from its forward to its backward.
    `root_stays`: the root does so, too, unless it is told otherwise. `kept_logit_bytes`: of each logit, where the loop
    has a name for them and so holds those of the last step until it has new ones: 2, or 4 where they are in fp32.
    `compiles_loss`: cast, log-softmax and cross-entropy are one kernel, and the gradient of the logits another.
    `is_foreach`: the optimizer makes a temporary of everything that it updates; fused, it makes none.
    """

    ends_apart: bool = True
    keeps_last: bool = True
    root_stays: bool = True
    kept_logit_bytes: int = 0
    compiles_loss: bool = False
    is_foreach: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that are gathered together: what the collective makes, and what is copied out of it. `part_bytes` is
    this rank's, cast for the collective. One rank alone casts and copies."""

    gathered_bytes: int
    collected_bytes: int
    part_bytes: int
    rest_bytes: int  # stays after the forward, where the backward gathers within a node
    summed_bytes: int  # what goes into the reduction
    grad_bytes: int  # what comes out of it
    stays: bool  # gathered, from its forward to its backward


def grouped(
    schedule: Schedule, works: Mapping[str, Work], wrapping: Wrapping
) -> tuple[str, list[str], dict[str, Group]]:
    """The root's name, the names of what runs after it in this order, and the group of each."""
    units = {unit.name: unit for unit in schedule.units}
    root = next((unit.name for unit in schedule.units if unit.holds_units), schedule.units[0].name)
    names = [name for name in works if name != root]
    if not names:
        raise ConfigurationError(f"engine 'fsdp2': all of the model is one unit, {root!r}; it is planned for blocks")
    last = names[-1]
    ends = [name for name in names if name in units and (works[name].kind == "loss" or not units[name].backward_reads)]
    inside: dict[str, list[UnitPlan]] = {name: [units[name]] for name in (root, *names) if name in units}
    if not wrapping.ends_apart:
        for name in ends:
            inside[root] += inside.pop(name)
    elif last in inside:
        inside[last] += inside[root]
        inside[root] = []
    groups = {name: _group(plans) for name, plans in inside.items()}
    return root, names, {name: groups.get(name, groups[root]) for name in (root, *names)}


def _group(units: Iterable[UnitPlan]) -> Group:
    units = tuple(units)
    flats = [flat for unit in units for flat in unit.flats]
    whole = [flat for flat in flats if not flat.master_is_whole]
    split = [flat for flat in whole if flat.spans[flat.depth_of_master].num_elems < flat.num_elems]
    cast = [flat for flat in split if flat.master != flat.compute]
    trained = [flat for flat in flats if flat.trainable]
    return Group(
        gathered_bytes=sum(flat.num_elems * flat.compute.itemsize for flat in whole),
        collected_bytes=sum(flat.num_elems * flat.compute.itemsize for flat in split),
        part_bytes=sum(flat.spans[flat.depth_of_master].num_elems * flat.compute.itemsize for flat in cast),
        rest_bytes=sum(
            flat.spans[flat.depth_of_params].num_elems * flat.compute.itemsize for flat in split if flat.rest_on
        ),
        summed_bytes=sum(flat.num_elems * flat.reduce.itemsize for flat in trained),
        grad_bytes=sum(flat.spans[flat.depth_of_master].num_elems * flat.master.itemsize for flat in trained),
        stays=any(unit.layout.gathered_until != "forward" for unit in units),
    )
