"""Decides whether the blocks of a run are compiled (`--compile auto`), from numbers of the planner alone.

Compilation fuses chains of elementwise operations, which saves memory and a part of every step. It costs time once, for
every kind of block: equal blocks share their code. So it pays for a run that is long enough. Both times are those of
the computation on one GPU, without transfers between GPUs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn

from ..core.schedule.model import UnitSpec
from ..core.schedule.units import find_blocks
from ..planner.assess import Works
from ..planner.cost.compute import speed_of, work_seconds
from ..planner.hardware.gpus import efficiency_of, gpu_named, gpu_of_device
from ..planner.shapes.hf_config import shape_of_config, why_no_shape
from ..planner.shapes.shape import ModelShape
from ..planner.training import Lora, Training
from ..planner.work.activations import block_works
from ..planner.work.work import Work
from .model import Transformer
from .models.build import Built
from .models.llama import IN_TREE_LEAVES, LEAVES
from .models.lora import ADAPTER

# Seconds for one kind of block, forward and backward. One H200 took 13 s for the in-tree block (its first five steps,
# compared with later ones, in benchmarks/results/2026-11-15-1152-trainer.md) and 15 s for Llama's of transformers, with
# empty caches (before the first stretch, in benchmarks/results/2026-11-18-2242-fine-tuning.md).
COMPILE_S = 15.0


@dataclass(frozen=True, slots=True)
class Compilation:
    """The resolved setting, and the reason if it was chosen here; else ""."""

    is_on: bool
    why: str = ""

    @property
    def setting(self) -> Literal["on", "off"]:
        return "on" if self.is_on else "off"

    def __str__(self) -> str:
        return ", ".join(filter(None, [self.setting, self.why]))


@dataclass(frozen=True, slots=True)
class Gain:
    """Predicted seconds of a step on one GPU, and the number of kinds of blocks, each of which is compiled once."""

    eager_s: float
    compiled_s: float
    num_kinds: int = 1


def decide(gain: Gain | str, num_steps: int) -> Compilation:
    """Compile if a run of `num_steps` saves more time than that takes. A string says why it is out of the question."""
    if isinstance(gain, str):
        return Compilation(False, gain)
    total_s, compile_s = num_steps * gain.eager_s, gain.num_kinds * COMPILE_S
    saved_s = num_steps * (gain.eager_s - gain.compiled_s)
    if saved_s > compile_s:
        return Compilation(True, f"saves about {_rough(saved_s - compile_s)} of {_rough(total_s)}")
    steps = "1 step" if num_steps == 1 else f"{num_steps:,} steps"
    return Compilation(
        False, f"the run is {steps}: it would take about {_rough(compile_s)} and save {_rough(max(saved_s, 0.0))}"
    )


def why_not_compiled() -> str:
    """Return why code that was to be compiled runs without compilation, as a whole or in parts; "" if there is none.
    torch.compile itself falls back in silence."""
    counters = torch._dynamo.utils.counters
    reasons, frames = [*counters["unimplemented"], *counters["graph_break"]], counters["frames"]
    if reasons:
        return str(reasons[0]).partition("\n")[0]
    return "" if frames["total"] == frames["ok"] else "torch gives no reason"


def _rough(seconds: float) -> str:
    """Return a time in words, like 42 s, 14 min or 1 h 52 min."""
    minutes = round(seconds / 60)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def gain_of(
    model: nn.Module, known: "KnownBlocks | None", works: Works, training: Training, device_name: str
) -> Gain | str:
    """Predict both times, or say why blocks are not compiled. `works` counts compiled blocks if it is asked for them.
    `device_name`: of the GPU; "": there is none."""
    paths = find_blocks(model)
    if not device_name:
        return "on CPUs it takes longer than it saves"
    if not paths:
        return "the model has no repeated blocks"
    if known is None:
        return "the time that it would save is not known for this kind of model"
    if find_spec("triton") is None:
        return "triton is not installed"
    # As in the planner: an unknown GPU counts as an A100.
    gpu = gpu_of_device(device_name) or gpu_named("A100-80GB")
    speed = speed_of(gpu, efficiency_of(gpu.name), training, known.shape.head_dim)

    def step_s(asked: Training) -> float:
        times = [work_seconds(work, speed, asked) for work in works(asked).values()]
        return asked.num_micro_batches * sum(each.forward + each.backward for each in times)

    eager_s, compiled_s = (step_s(replace(training, compile=is_compiled)) for is_compiled in (False, True))
    kinds = {_kind(model.get_submodule(path)) for path in paths}
    # With adapters, the first block is a kind of its own: its input has no gradient.
    return Gain(eager_s, compiled_s, len(kinds) + (known.lora is not None))


def _kind(block: nn.Module) -> tuple[Any, ...]:
    return type(block), *((name, param.shape, param.requires_grad) for name, param in block.named_parameters())


@dataclass(frozen=True, slots=True)
class KnownBlocks:
    """Blocks that the planner can count as compiled, by their sizes. `lora`: the adapters on them."""

    shape: ModelShape
    lora: Lora | None

    def works(self, training: Training) -> tuple[Work, Work]:
        """Return the work of the first block and of each other one."""
        return block_works(self.shape, replace(training, lora=self.lora))


def known_blocks(built: Built, units: Sequence[UnitSpec]) -> KnownBlocks | None:
    """Return the sizes of a model's blocks, if they are units, all of one kind that the planner knows; else None."""
    shape, paths = _shape_of(built), find_blocks(built.model)
    config = getattr(built.model, "peft_config", {}).get(ADAPTER)
    if shape is None or shape.num_experts > 1 or len(paths) != shape.layers or not {*paths} <= {u.path for u in units}:
        return None
    if config is None:
        return KnownBlocks(shape, None)
    targets = config.target_modules
    if config.use_dora or not isinstance(targets, set) or not targets <= {*LEAVES, *IN_TREE_LEAVES}:
        return None  # a pattern, or projections that are not counted one by one
    return KnownBlocks(shape, Lora(config.r, tuple(sorted(targets))))


def _shape_of(built: Built) -> ModelShape | None:
    if built.facts.kind == "in-tree":
        model = next(part for part in built.model.modules() if isinstance(part, Transformer))
        names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tied")
        sizes = {name: getattr(model.shape, name) for name in names}
        return ModelShape(name=built.facts.origin, code="in-tree", **sizes)
    return None if why_no_shape(built.facts.config) else shape_of_config(built.facts.config)
