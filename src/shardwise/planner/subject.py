"""Models that can be planned: by name, by config.json, by sizes, or the module itself.

For a real module, the planner finds the units and runs one block of each kind on the meta device: with the module's own
activation checkpointing or, if the planner built the module, with the requested one. Only this needs torch.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Union

from ..base.errors import ConfigurationError
from ..core.layout import AUTO
from ..core.schedule.model import UnitSpec
from .assess import Subject
from .cost.peak import FRAGMENTED, MOST_FRAGMENTED
from .hardware.gpus import flops_per_token
from .shapes.hf_config import module_of_config, num_positions_in, read_config, shape_of_config, why_no_shape
from .shapes.names import NOTES, coded, is_file, shape_of
from .shapes.shape import ModelShape, StatesOnly, units_of
from .training import Training
from .work.activations import works_of
from .work.work import Work

if TYPE_CHECKING:
    from torch import nn

    from ..core.schedule.units import Units
    from .work.probe import Forward

Planned = Union[str, Mapping[str, Any], ModelShape, StatesOnly, "nn.Module"]
_FACTS = ("name", "num_params", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied", "code")


@dataclass(frozen=True, slots=True)
class Built:
    """A module built from a config.json. `num_positions`: its maximum sequence length; 0: the config gives none."""

    name: str
    module: "nn.Module"
    num_positions: int


def model_of(model: Planned) -> "ModelShape | StatesOnly | Built | nn.Module":
    """Look up a name, turn a config into a shape or a module, and return everything else unchanged."""
    if isinstance(model, str) and not is_file(model):
        return shape_of(model)
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedConfig):
        model = model.to_dict()
    if isinstance(model, (str, Mapping)):
        name, config = read_config(model)
        if not (why := why_no_shape(config)):
            return shape_of_config(model)
        module = module_of_config(name, config, why)
        return Built(name, module, num_positions_in(module))
    is_module = "torch" in sys.modules and isinstance(model, sys.modules["torch"].nn.Module)
    if not is_module and not isinstance(model, (ModelShape, StatesOnly)):
        raise ConfigurationError(
            f"sw.plan takes a model's name, the path of its config.json or what is in it, a shape or a module, not "
            f"{type(model).__name__} {model!r}"
        )
    return model


def subject_for(model: "ModelShape | StatesOnly | Built | nn.Module", training: Training) -> Subject | StatesOnly:
    if isinstance(model, ModelShape):
        return subject_of(model, training)
    if training.code not in (AUTO, "hf"):
        raise ConfigurationError(f"code {training.code!r} needs a model that is known by its sizes; leave it out")
    if isinstance(model, StatesOnly):
        return model
    if not isinstance(model, Built):
        return subject_of_module(model, training)
    from ..core.schedule.units import find_units

    module, made = model.module, partial(subject_of_module, model.module, built_from=model.name)
    try:
        # If the number of operations grows with the length, the model runs token by token.
        lengths = (replace(training, seq=4), replace(training, seq=32))
        short, longer = (sum(work.num_kernels for work in made(some).works(some).values()) for some in lengths)
        if longer > 2 * short:
            raise NotRunError(
                f"this {type(module).__name__} runs token by token on the meta device, as no kernel of a GPU does; its "
                "activations and time are not known"
            )
        return made(training)
    except NotRunError as error:  # only the states can be planned
        return StatesOnly(num_elems_of(find_units(module)), model.name, str(error))


def subject_of(shape: ModelShape, training: Training) -> Subject:
    shape = coded(shape, training)
    if 0 < shape.num_positions < training.seq:
        raise ConfigurationError(
            f"model {shape.name!r} has {shape.num_positions} positions, but sequences of {training.seq} tokens were "
            f"asked for; give --seq {shape.num_positions} or less"
        )
    facts = {name: getattr(shape, name) for name in _FACTS}
    if shape.num_experts > 1:
        facts |= {"num_experts": shape.num_experts, "num_active_experts": shape.num_active_experts}
    if note := "; ".join(filter(None, _notes(shape, training))):
        facts["note"] = note
    units, num_multiplying = tuple(units_of(shape, training.lora)), float(shape.num_matmul_params)
    if training.lora is not None:  # weights that are frozen have no gradient: 4 FLOP instead of 6, as in the trainer
        adapters = sum(param.num_elems for unit in units for param in unit.params if param.trainable)
        num_multiplying = adapters + num_multiplying * 2 / 3
    return Subject(
        name=shape.name,
        units=units,
        works=lambda asked: works_of(shape, asked),
        flops_per_token=flops_per_token(
            num_multiplying,
            sum(not kind.linear_value_heads for kind in shape.kinds),
            shape.attention_width,
            training.seq,
        ),
        facts=facts,
        head_dim=shape.head_dim,
    )


def _notes(shape: ModelShape, training: Training) -> Iterator[str]:
    """Yield what the plan assumes or leaves out."""
    yield shape.note
    yield NOTES["eager"] if shape.attention == "eager" else ""
    yield NOTES["sends_all"] if shape.sends_all else ""
    yield NOTES["linear"] if shape.attention_every > 1 else ""
    yield NOTES["dora"] if training.lora is not None and training.lora.dora else ""
    if training.variable_length:
        yield NOTES["variable_length"].format(training.seq, FRAGMENTED, MOST_FRAGMENTED)


class NotRunError(ConfigurationError):
    """The model does not run on token ids alone, so the memory of its activations is unknown."""


def subject_of_module(model: "nn.Module", training: Training, units: "Units" = "auto", built_from: str = "") -> Subject:
    """Probe a language model that takes token ids; `training` gives their number. `built_from`: the source of a module
    that the planner built; only for such a module may `training` ask for activation checkpointing."""
    checkpointings = ("none", "full") if built_from else ("none",)
    if training.lora is not None or training.checkpointing not in checkpointings or training.compile:
        raise ConfigurationError(
            f"model {built_from!r}: its module is counted, without lora, compile and selective checkpointing; leave "
            "them out"
            if built_from
            else "a module is planned as it is: put adapters, activation checkpointing and compiled blocks into it, "
            "and leave lora, checkpointing and compile out of the training"
        )
    from ..core.schedule.units import find_units
    from .work.probe import probe_works

    found = find_units(model, units)
    known: dict[tuple[int, int, str, str], Mapping[str, Work]] = {}

    def works(asked: Training) -> Mapping[str, Work]:
        key = (asked.micro_batch, asked.seq, asked.checkpointing, asked.loss_chunk)
        if key not in known:
            around = _checkpointed if asked.checkpointing == "full" else None
            probed = probe_works(model, asked, units=units, around=around)
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
    ran = works(training).values()
    flops: float = sum(product.flops * (3 if product.trainable else 2) for work in ran for product in work.products)
    flops += 6 * sum(work.attention_flops for work in ran)
    facts: dict[str, object] = {"name": built_from or type(model).__name__, "num_params": num_elems_of(found)}
    if built_from:
        facts["class"] = type(model).__name__
    # Units that token ids alone do not reach, such as a vision encoder.
    idle = [unit for unit in found if works(training)[unit.name] is _NOTHING and not unit.holds_units]
    if idle:
        facts["note"] = (
            f"activations and time are those of token ids alone: {len(idle)} units with "
            f"{num_elems_of(idle) / 1e6:,.0f}M parameters ({idle[0].name}, ...) do not run on them, and only their "
            "state and traffic are counted"
        )
    return Subject(str(facts["name"]), tuple(found), works, flops / training.num_tokens, facts)


_NOTHING = Work(0, 0, 0, 0)


def _checkpointed(forward: "Forward") -> "Forward":
    from torch.utils.checkpoint import checkpoint

    return partial(checkpoint, forward, use_reentrant=False)


def num_elems_of(units: list[UnitSpec]) -> int:
    return sum(param.num_elems for unit in units for param in unit.params)
