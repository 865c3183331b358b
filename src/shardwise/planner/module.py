"""A real module as something that can be planned: its units are found, and one block of each kind is probed on the meta
device, with the module's own activation checkpointing, or with the requested one if the planner built the module."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from ..base.errors import ConfigurationError
from ..core.schedule.model import UnitSpec
from ..core.schedule.units import Units, find_units
from .assess import Subject
from .shapes.shape import StatesOnly
from .training import Training
from .work.probe import probe_works
from .work.probe_meter import Forward
from .work.work import Work


class NotRunError(ConfigurationError):
    """The model does not run on token ids alone, so the memory of its activations is unknown."""


def subject_of_module(model: nn.Module, training: Training, units: Units = "auto", built_from: str = "") -> Subject:
    """Probe a language model that takes token ids; `training` gives their number. `built_from`: the source of a module
    that was built for the plan only; the plan then chooses the activation checkpointing of its blocks."""
    checkpointings = ("none", "full") if built_from else ("none",)
    if training.lora is not None or training.checkpointing not in checkpointings or training.compile:
        if built_from:
            raise ConfigurationError(
                f"model {built_from!r}: its module is counted, without lora, compile and selective checkpointing; "
                "leave them out"
            )
        raise ConfigurationError(
            "a module is planned as it is: put adapters, activation checkpointing and compiled blocks into it, and "
            "leave lora, checkpointing and compile out of the training"
        )
    found = find_units(model, units)
    known: dict[tuple[int, int, str], Mapping[str, Work]] = {}

    def works(asked: Training) -> Mapping[str, Work]:
        key = (asked.micro_batch, asked.seq, asked.checkpointing)
        if key not in known:
            probed = probe_works(
                model,
                batch=asked.micro_batch,
                seq=asked.seq,
                compute=asked.formats.compute.torch,
                units=units,
                around=_checkpointed if asked.checkpointing == "full" else None,
                loss=asked.loss,
            )
            known[key] = {**{unit.name: _NOTHING for unit in found}, **probed}
        return known[key]

    try:
        works(training)
    except Exception as error:  # any model's own code runs here
        raise NotRunError(
            f"this {type(model).__name__} could not be run on ({training.micro_batch}, {training.seq}) token ids, as "
            f"a language model can: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error
    # Counted like `flops_per_token`: attention in full, although a causal kernel computes only half of it.
    flops = sum(work.flops + work.attention_flops for work in works(training).values())
    facts: dict[str, object] = {"name": built_from or type(model).__name__, "num_params": num_elems_of(found)}
    if built_from:
        facts["class"] = type(model).__name__
    if note := _idle(found, works(training)):
        facts["note"] = note
    return Subject(str(facts["name"]), tuple(found), works, 3 * flops / training.num_tokens, facts)


def subject_of_built(name: str, model: nn.Module, training: Training) -> Subject | StatesOnly:
    """Plan a module that was built from a config.json; if it does not run, only its states can be planned."""
    try:
        short, longer = (_num_kernels(model, replace(training, seq=seq), name) for seq in _SHORT)
        if longer > 2 * short:
            raise NotRunError(
                f"this {type(model).__name__} runs token by token on the meta device, as no kernel of a GPU does; its "
                "activations and time are not known"
            )
        return subject_of_module(model, training, built_from=name)
    except NotRunError as error:
        return StatesOnly(num_elems_of(find_units(model)), name, str(error))


# Lengths of two short sequences: the probe checks whether the number of operations grows with the length.
_SHORT = (4, 32)


def _num_kernels(model: nn.Module, training: Training, name: str) -> int:
    works = subject_of_module(model, training, built_from=name).works(training)
    return sum(work.num_kernels for work in works.values())


_NOTHING = Work(0, 0, 0, 0)


def _checkpointed(forward: Forward) -> Forward:
    return partial(checkpoint, forward, use_reentrant=False)


def _idle(found: list[UnitSpec], works: Mapping[str, Work]) -> str:
    """Name the units that token ids alone do not reach, such as a vision encoder."""
    idle = [unit for unit in found if works[unit.name] is _NOTHING and not unit.holds_units]
    if not idle:
        return ""
    return (
        f"activations and time are those of token ids alone: {len(idle)} units with {num_elems_of(idle) / 1e6:,.0f}M "
        f"parameters ({idle[0].name}, ...) do not run on them, and only their state and traffic are counted"
    )


def num_elems_of(units: list[UnitSpec]) -> int:
    return sum(param.num_elems for unit in units for param in unit.params)
