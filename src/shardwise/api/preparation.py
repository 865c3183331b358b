"""Everything that `sw.shard` decides and checks before it changes anything: units, layouts, the schedule.

Each rank checks its own model and optimizers; then the ranks compare the facts that must be the same on all of them.
"""

import hashlib
import platform
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..base.dtypes import FP32
from ..base.errors import ConfigurationError, StateError
from ..core.engine.guards import find_engine
from ..core.engine.rank_agreement import Facts
from ..core.layout import Layout, Strategy, layouts_for
from ..core.mesh import Axes, device
from ..core.optim.groups import optimizer_of_each
from ..core.optim.host_updates import is_eight_bit
from ..core.optim.probe import num_moments, refuse_unless_elementwise, refuse_unless_rows, state_tensor_names
from ..core.precision import Precision
from ..core.schedule.flat import Flat, flats_of
from ..core.schedule.model import UnitSpec
from ..core.schedule.step_schedule import Schedule, UnitPlan, make_schedule, require_frozen
from ..core.schedule.units import Units, find_units
from ..core.unit.user_parameter import place_of
from ..planner.assess import Machine
from ..planner.auto import AutoRequest, Batch, choose
from ..planner.planning import Plan
from ..planner.search import changes_after_auto
from ..planner.training import Training, num_bytes_of
from ..version import VERSION
from .casts import fp32_patterns

# Names of wrapper classes of torch and DeepSpeed that shard, gather or reduce by themselves.
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")
# Checksums add the bits as integers. Such sums are exact in any order, so they are equal on all machines.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW_ELEMS = 1024


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of `sw.shard`, and the machine on which "auto" chooses a plan."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    strategy: Strategy
    machine: Machine | None
    precision: Precision
    axes: Axes
    units: Units
    memory_budget: int | None
    early_update: bool
    skip_nonfinite: bool
    seed: int | None
    batch: Batch | None
    disk_path: Path | None
    speculation: int | str


@dataclass(frozen=True, slots=True)
class Prepared:
    request: Request
    specs: list[UnitSpec]
    schedule: Schedule
    chosen: Plan | None  # by "auto"
    keep_fp32: tuple[str, ...]
    row_names: list[tuple[str, ...]]  # for each optimizer: names of its state tensors, if the host updates
    unoptimized: list[str]  # trainable parameters that no optimizer has
    facts: Facts


def prepare(request: Request) -> Prepared:
    model, optimizers, precision, axes = request.model, request.optimizers, request.precision, request.axes
    _refuse_sharded(model)
    specs = find_units(model, request.units)
    _refuse_shared_memory(model)
    if not specs:
        raise ConfigurationError(f"this {type(model).__name__} has no parameters: there is nothing to shard")
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    optimizer_of = optimizer_of_each(optimizers, names)
    # Parameters that no optimizer has get number 0, too.
    numbered = [[replace(each, optimizer=optimizer_of.get(each.name, 0)) for each in unit.params] for unit in specs]
    specs = [replace(unit, params=tuple(params)) for unit, params in zip(specs, numbered, strict=True)]
    trainable = [param.name for params in numbered for param in params if param.trainable]
    unoptimized = [name for name in trainable if name not in optimizer_of]
    keep_fp32 = fp32_patterns(model, precision)
    chosen = None
    if request.machine is not None:
        moves, batch = changes_after_auto(request.strategy) or (), request.batch
        numbers = batch if isinstance(batch, tuple) else (1, 1)
        sizes: dict[str, Any] = dict(zip(("micro_batch", "seq", "num_micro_batches"), numbers, strict=False))
        moments = max((num_moments(each, precision) for each in optimizers), default=0)
        sizes |= {"optimizer": "adamw8bit"} if any(map(is_eight_bit, optimizers)) else {}
        training = Training(precision=precision, moments=moments, speculation=request.speculation, **sizes)
        auto = AutoRequest(training, batch, request.units, request.memory_budget, keep_fp32, moves, request.disk_path)
        chosen = choose(model, specs, auto, request.machine)
    best = None if chosen is None else chosen.recommended
    layouts = _layouts_as_named(request, specs) if best is None else list(best.layouts)
    sizes_and_indices = {axis: (len(ranks), ranks.index(axes.rank)) for axis, ranks in axes.members.items()}
    plans = []
    for unit, layout in zip(specs, layouts, strict=True):
        flats = flats_of(unit, layout, precision, sizes_and_indices, keep_fp32)
        plans.append(UnitPlan(unit.name, layout, flats, unit.holds_units, unit.backward_reads))
        for flat in flats:
            _refuse_codecs_of(flat, unit.name, precision)
    require_frozen(plans)
    schedule = make_schedule(plans, range(len(plans)), request.memory_budget)
    for param, name in names.items():
        if param.grad is not None and bool(param.grad.any()):
            raise ConfigurationError(
                f"parameter {name!r} has a gradient already, which would be lost: call optimizer.step() and "
                "optimizer.zero_grad() before sw.shard"
            )
    trained = [flat for plan in plans for flat in plan.flats if flat.trainable]
    row_names = [
        _check_optimizer(optimizer, [flat for flat in trained if flat.optimizer == number], precision)
        for number, optimizer in enumerate(optimizers)
    ]
    refusals = [
        (len(optimizers) > 1, "several optimizers: a backward would step all of them; leave early_update"),
        (not optimizers, "no optimizer: there is nothing to update"),
        (precision.loss_scaling, "fp16: a step that overflowed is found out after the backward; use bf16"),
        (request.skip_nonfinite, "skip_nonfinite=True: weights change before all gradients are known; leave one"),
        (num_bytes_of(request.speculation), f"speculation={request.speculation!r}, which is for clipping: leave one"),
    ]
    for is_refused, why in refusals:
        if request.early_update and is_refused:
            raise ConfigurationError(f"early_update=True with {why}")
    if any(param.is_meta for param in names) and request.seed is None:
        raise ConfigurationError("the model is on the meta device: give sw.shard a seed= to initialise its weights")
    # General facts first: the error names the first fact in which the ranks differ.
    facts = [
        ("shardwise's version", VERSION),
        ("torch's version", torch.__version__),
        ("Python's version", platform.python_version()),
        ("the precision", repr(precision)),
        ("the ranks per node (node_size)", repr(axes.node_size)),
        *(
            (key, repr(getattr(request, key)))
            for key in ("memory_budget", "early_update", "skip_nonfinite", "seed", "speculation")
        ),
        *_facts_about_model(model, specs, plans),
        *(fact for each in optimizers for fact in _facts_about_optimizer(each, names)),
    ]
    facts += [] if optimizers else [("the optimizer", "None")]
    return Prepared(request, specs, schedule, chosen, keep_fp32, row_names, unoptimized, facts)


def _layouts_as_named(request: Request, specs: list[UnitSpec]) -> list[Layout]:
    strategy, batch, disk_path = request.strategy, request.batch, request.disk_path
    if batch is not None:
        raise ConfigurationError(f"batch={batch} with strategy={strategy!r}: only 'auto' asks for it; leave it out")
    layouts = layouts_for(strategy, [unit.name for unit in specs])
    if disk_path is not None and not any("disk" in layout.places for layout in layouts):
        raise ConfigurationError(
            f"disk_path={str(disk_path)!r} with strategy={strategy!r}, which puts nothing on disk; leave it out, or "
            "say what goes there, as in zero3+optimizer=disk"
        )
    return layouts


# Refusals.


def _refuse_sharded(model: nn.Module) -> None:
    if any(find_engine(module) is not None for module in model.modules()):
        raise StateError(
            f"this {type(model).__name__}, or a part of it, is sharded already: sw.shard may be called once for a model"
        )
    for path, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _WRAPPERS and kind.__module__.startswith(("torch.", "deepspeed.")):
                what = f"its module {path!r}" if path else "it"
                raise ConfigurationError(
                    f"sw.shard was given a model that another library shards already ({what} is a {kind.__name__}): "
                    "give it the plain model, and the optimizer that was built on that one's parameters"
                )


def _refuse_shared_memory(model: nn.Module) -> None:
    """Refuse weights that share memory. In flats they would not share it: updates of one would not change the other."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    named = [(f"parameter {name!r}", tensor) for name, tensor in model.named_parameters()]
    for what, tensor in [*named, *((f"buffer {name!r}", buffer) for name, buffer in model.named_buffers())]:
        if place_of(tensor) is not None:
            raise StateError(
                f"{what} belongs to a model that is sharded already: shard models that share weights together, as "
                "parts of one nn.ModuleList"
            )
        if tensor.layout == torch.strided and type(tensor.data) is Tensor and tensor.numel() and not tensor.is_meta:
            size = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            span = (tensor.data_ptr(), tensor.data_ptr() + size * tensor.element_size(), what)
            spans.setdefault(tensor.untyped_storage()._cdata, []).append(span)
    for shared in spans.values():
        for (_, end, what), (begin, _, other) in pairwise(sorted(shared)):
            if begin < end and "parameter" in what + other:
                raise ConfigurationError(
                    f"{other} lies in the memory of {what}, and would not follow it when it is sharded: tie weights by "
                    "registering one Parameter twice, and make a buffer a copy (.detach().clone())"
                )


def _refuse_codecs_of(flat: Flat, unit_name: str, precision: Precision) -> None:
    """Refuse codecs that do not fit the dtypes. `Layout` itself refuses other mistakes."""
    if flat.params_codec is not None and not flat.params_codec.has_scales and flat.compute.itemsize == 2:
        raise ConfigurationError(
            f"unit {unit_name!r}: params_as='{flat.params_codec}' with parameters in {flat.compute.name}: they would "
            "be sent in as many bits as they have, rounded for nothing; leave it, or use int8 or fp8"
        )
    if flat.grads_codec is not None and flat.grads_codec.has_feedback and precision.loss_scaling:
        raise ConfigurationError(
            f"unit {unit_name!r}: grads_as='{flat.grads_codec}' with loss scaling: what was lost of one gradient "
            "would be added to another under another scale; use bf16, or leave feedback"
        )


def _check_optimizer(optimizer: torch.optim.Optimizer, own: list[Flat], precision: Precision) -> tuple[str, ...]:
    """Refuse an optimizer that cannot update its flats. Return the names of its state tensors if the host updates."""
    row_names = state_tensor_names(optimizer) if any(flat.host_updates for flat in own) else ()
    if any(flat.depth_of_master or flat.master_on == "disk" for flat in own):
        refuse_unless_elementwise(optimizer, device())
    if any(flat.master_on == "disk" for flat in own):
        refuse_unless_rows(optimizer)
    if is_eight_bit(optimizer) and any(flat.host_updates and flat.master != FP32 for flat in own):
        raise ConfigurationError(
            f"optimizer {type(optimizer).__name__} on the host with master weights in {precision.master}: the host "
            "updates 8-bit moments next to fp32 masters; use precision='bf16', or leave the optimizer on the device"
        )
    return row_names


# Facts that must be the same on every rank.


def _facts_about_model(model: nn.Module, specs: list[UnitSpec], plans: list[UnitPlan]) -> Facts:
    facts = [("the units", ", ".join(unit.name for unit in specs))]
    params = dict(model.named_parameters(remove_duplicate=False))
    for unit, plan in zip(specs, plans, strict=True):
        facts.append((f"the layout of unit {unit.name!r}", str(plan.layout)))
        for param in unit.params:
            shape = f"{tuple(param.shape)} {param.dtype}, {'trained' if param.trainable else 'frozen'}"
            facts.append((f"unit {unit.name!r}, parameter {param.name!r}", shape))
        for param in unit.params:
            name = f"the weights of unit {unit.name!r}, {param.name!r} (seed the ranks alike, or load the same weights)"
            facts.append((name, f"checksum {checksum(params[param.name])}"))
    return facts


def _facts_about_optimizer(optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> Facts:
    facts = [("the optimizer", f"{type(optimizer).__name__} with {len(optimizer.param_groups)} groups")]
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(value, (int, float, str, tuple, type(None))):
                facts.append((f"the optimizer's group {index}, {key!r}", repr(value)))
        held = hashlib.sha256(", ".join(names[param] for param in group["params"]).encode()).hexdigest()[:12]
        facts.append((f"the parameters of the optimizer's group {index}", f"{len(group['params'])} ({held})"))
    return facts


def checksum(param: Tensor) -> str:
    """Checksum of the bits that depends on their order: the sums of rows and of columns are weighted by their index."""
    if param.is_meta:
        return "meta"
    bits = param.detach().contiguous().view(-1).view(_BITS[param.dtype.itemsize])
    num_rows = bits.numel() // _ROW_ELEMS
    rows = bits[: num_rows * _ROW_ELEMS].view(num_rows, _ROW_ELEMS)
    rest = bits[num_rows * _ROW_ELEMS :]
    sums = [rows.sum(1, dtype=torch.int64), rows.sum(0, dtype=torch.int64), rest.to(torch.int64)]
    weighed = [(part * torch.arange(1, part.numel() + 1, device=part.device)).sum() for part in sums]
    return "-".join(str(int(value)) for value in weighed)
