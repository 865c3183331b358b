"""A real module as something that can be planned: its units are found, and one block of each kind is probed on the meta
device, with the activation checkpointing that the module has."""

from collections.abc import Mapping

from torch import nn

from ..errors import ConfigurationError
from .assess import Subject
from .model import FoundUnit
from .training import Training
from .units import Units, find_units
from .work.probe import probe_works
from .work.work import Work


def subject_of_module(model: nn.Module, training: Training, units: Units = "auto") -> Subject:
    """For language models that take token ids; `training` says how many."""
    if training.lora is not None or training.checkpointing != "none" or training.compile:
        raise ConfigurationError(
            "a module is planned as it is: put adapters, activation checkpointing and compiled blocks into it, and "
            "leave lora, checkpointing and compile out of the training"
        )
    found = find_units(model, units)
    known: dict[tuple[int, int], Mapping[str, Work]] = {}

    def works(asked: Training) -> Mapping[str, Work]:
        key = (asked.micro_batch, asked.seq)
        if key not in known:
            known[key] = probe_works(
                model,
                batch=asked.micro_batch,
                seq=asked.seq,
                compute=asked.formats.compute.torch,
                units=units,
                loss=asked.loss,
            )
        return known[key]

    try:
        works(training)
    except Exception as error:  # any model's own code runs here
        raise ConfigurationError(
            f"this {type(model).__name__} could not be run on ({training.micro_batch}, {training.seq}) token ids, as "
            f"a language model can: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error
    # As `flops_per_token` counts them: attention in full, of which a causal kernel computes half.
    flops = sum(work.flops + work.attention_flops for work in works(training).values())
    name = type(model).__name__
    return Subject(
        name, tuple(found), works, 3 * flops / training.num_tokens, {"name": name, "num_params": _size(found)}
    )


def _size(units: list[FoundUnit]) -> int:
    return sum(param.num_elems for unit in units for param in unit.params)
