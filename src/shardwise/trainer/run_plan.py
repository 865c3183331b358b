"""The plan of a run: the module is probed before it is sharded, and its cost is that of the engine's own schedule.

`plan.json` in the run folder lists the strategy that is used, and then, with `auto`, all others that were considered.
`traffic.json` compares the traffic of a step with the plan. Planning never fails a run: if a model cannot be probed,
the plan has no activations and says so.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

from torch import nn

from ..api.memory_report import memory
from ..api.sharded_model import num_cores, traffic
from ..api.sharding import chosen_plan
from ..base.errors import ConfigurationError
from ..core.engine.guards import engine_of
from ..core.layout import layouts_for
from ..core.optim.probe import num_moments
from ..core.schedule.model import UnitSpec
from ..core.schedule.state_bytes import Way, state_bytes
from ..core.schedule.units import find_blocks, find_units
from ..core.wire.collectives import exchange
from ..core.wire.ledger import add_up
from ..planner.assess import Assessment, Assessor, Machine, Subject, Works
from ..planner.auto import Batch, Workload
from ..planner.events import step_events
from ..planner.plan_json import plan_as_json
from ..planner.planning import Plan
from ..planner.search import assess_named, batches_of, choices
from ..planner.training import Training
from ..planner.work.activations import assign_to_units
from ..planner.work.probe import on_meta, probe_works
from ..planner.work.work import Work
from .checkpointing import checkpoint_blocks
from .checks import Checked
from .compilation import Compilation, KnownBlocks, decide, gain_of, known_blocks
from .models.build import Built
from .models.headloss import path_of
from .offload import speculation_of, strategy_of, updates_early
from .run_folder import PLAN, TRAFFIC, replace_file
from .settings import Settings, parse_units


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The plan of a run. `entry`: the strategy in use; `assess` plans others; `note`: why activations are unknown."""

    entry: Assessment
    assess: Assessor
    note: str = ""
    others: tuple[Assessment, ...] = ()  # strategies that `auto` has considered
    why: str = ""  # reason of the choice of `auto`
    why_batch: str = ""  # reason of the micro-batch, if it was chosen here
    compilation: Compilation = field(default_factory=partial(Compilation, False))
    rests: Mapping[str, int] = field(default_factory=dict)  # bytes by class between backward and step
    off_device: Mapping[str, object] = field(default_factory=dict)  # offloaded bytes of a rank, and how they are held

    @property
    def peak_bytes(self) -> int | None:
        """Planned peak of allocated memory; None if activations are unknown."""
        return None if self.note else self.entry.memory.peak.total

    @property
    def activation_bytes(self) -> int | None:
        """The part of the peak that is not in `rests`: activations and temporary tensors."""
        return None if self.peak_bytes is None else max(self.peak_bytes - sum(self.rests.values()), 0)


@dataclass(frozen=True, slots=True)
class Draft:
    """Inputs of a plan, before anything is on the device."""

    subject: Subject
    machine: Machine | None  # None: `auto` will measure it
    training: Training
    note: str
    clips: bool  # the norm of the gradients is computed, to clip them or to show it
    strategy: str | dict[str, str]  # with offload and wire
    compilation: Compilation
    may_enlarge_chunks: bool
    batches: Sequence[tuple[int, int]]  # to choose from: micro-batch size and number
    why_batch: str

    @property
    def name(self) -> str:
        return self.strategy if isinstance(self.strategy, str) else "mixed"

    @property
    def workload(self) -> Batch:
        """The argument `batch` of `sw.shard`, for "auto": this model as it will run, or sizes if that is unknown."""
        asked = self.training
        sizes = (asked.micro_batch, asked.seq, asked.num_micro_batches)
        return sizes if self.note else Workload(self.subject, asked, self.clips, self.batches)

    def with_best_batch(self) -> "Draft":
        """Return the draft with the best of its batches; with the strategy `auto`, both are chosen later."""
        if self.machine is None or len(self.batches) == 1:
            return self
        assess = Assessor(self.subject, self.machine, clips=self.clips)
        choice = choices(self.training, (self.training.checkpointing,), self.batches)
        return replace(self, training=assess_named(assess, self.strategy, choice).training)

    def compiled(self, compilation: Compilation) -> "Draft":
        return replace(self, compilation=compilation, training=replace(self.training, compile=compilation.is_on))


def draft(
    built: Built,
    settings: Settings,
    checked: Checked,
    optimizer: Any,
    machine: Machine | None,
    num_steps: int,
    device_name: str = "",
) -> Draft:
    """Collect the inputs of a plan before the model is sharded, compiled, or set to activation checkpointing.

    `num_steps` decides whether compilation pays. `device_name`: of the GPU; "": there is none.
    """
    batching, seq = checked.batching, checked.seq_length
    training = Training(
        seq=seq,
        micro_batch=batching.micro_size * settings.rows_per_sample,
        num_micro_batches=batching.num_micro,
        precision=settings.precision or "bf16",
        reduce=settings.reduce_dtype,
        optimizer=settings.optimizer,
        checkpointing=settings.gradient_checkpointing,
        loss="plain" if path_of(built.model).how == "plain" else "chunked",
        loss_chunk="small" if settings.loss_chunk == "auto" else settings.loss_chunk,
        speculation=speculation_of(settings),
    )
    if training.loss == "plain" and settings.loss_chunk == "large":
        raise ConfigurationError(
            f"loss_chunk large: the loss of {settings.model} needs all logits, so it has no chunks; leave it out"
        )
    training = replace(training, moments=num_moments(optimizer, training.formats))
    units = tuple(find_units(built.model, parse_units(settings.units)))
    facts = {"name": settings.model, "num_params": built.num_params}
    known = known_blocks(built, units)
    works, note = _works_or_note(built.model, known, training, units)
    head_dim = {} if known is None else {"head_dim": known.shape.head_dim}
    subject = Subject(settings.model, units, works, built.flops_per_token(seq), facts, **head_dim)
    compilation = Compilation(settings.compile == "on")
    if settings.compile == "auto":
        compilation = decide(note or gain_of(built.model, known, works, training, device_name), num_steps)
    samples: Sequence[tuple[int, int]] = [(batching.micro_size, batching.num_micro)]
    if settings.per_device_train_batch_size == "auto" and settings.gradient_accumulation_steps is None:
        samples = batches_of(training, batching.global_size, batching.num_ranks)
        if note:
            raise ConfigurationError(f"per_device_train_batch_size auto: {note}: give a number")
    sizes = ", ".join(str(size) for size, _ in samples)
    batches = [(size * settings.rows_per_sample, number) for size, number in samples]
    drafted = Draft(
        subject, machine, training, note, not updates_early(settings), strategy_of(settings), compilation,
        may_enlarge_chunks=settings.loss_chunk == "auto" and training.loss == "chunked" and not note,
        batches=batches, why_batch=f"auto: the fastest of {sizes} that fits, as planned" if len(batches) > 1 else "",
    )  # fmt: skip
    return drafted.compiled(compilation)


def _works_or_note(
    model: nn.Module, known: KnownBlocks | None, training: Training, units: Sequence[UnitSpec]
) -> tuple[Works, str]:
    names = [unit.name for unit in units]
    try:
        works = _works_of(model, known, training, units)
        left_out = [name for name in names if name not in works(training)]
        if not left_out:
            return works, ""
        reason = f"{left_out[0]} was not run"
    except Exception as error:  # noqa: BLE001  the probe runs the model's own code
        reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
    nothing = {name: Work(0, 0, 0, 0) for name in names}
    return lambda _: nothing, f"no plan of activations: where the model was tried out, {reason[:200]}"


def _works_of(model: nn.Module, known: KnownBlocks | None, training: Training, units: Sequence[UnitSpec]) -> Works:
    """Return the work by unit. Compiled blocks cannot be probed: their work follows from their sizes, if these are
    known. Others count as uncompiled."""
    bare, paths = on_meta(model, training.formats.compute.torch), find_blocks(model)

    @cache
    def probed(asked: Training) -> Mapping[str, Work]:
        checkpoint_blocks(bare, asked.checkpointing)
        return probe_works(bare, asked)

    def works(asked: Training) -> Mapping[str, Work]:
        found = probed(replace(asked, num_micro_batches=1, optimizer="adamw", moments=None, reduce=None, compile=False))
        if not asked.compile or known is None:
            return found
        first, other = known.works(asked)
        blocks = [assign_to_units(other if index else first, path, units) for index, path in enumerate(paths)]
        return {**found, **{name: work for block in blocks for name, work in block.items()}}

    return works


def plan_before(draft: Draft) -> RunPlan | None:
    """Plan the strategy that the user named, before the model is sharded. With `auto` there is none: None."""
    if draft.machine is None:
        return None
    assess = Assessor(draft.subject, draft.machine, clips=draft.clips)
    entry = assess(draft.name, layouts_for(draft.strategy, assess.unit_names), draft.training)
    return RunPlan(entry, assess, draft.note, why_batch=draft.why_batch, compilation=draft.compilation)


def plan_of(draft: Draft, model: nn.Module) -> RunPlan:
    """Plan the sharded model that runs."""
    engine, training, chosen = engine_of(model), draft.training, chosen_plan(model)
    host, units = engine.host, engine.schedule.units
    machine, name, why = draft.machine, draft.name, ""
    found: tuple[Assessment, ...] = ()
    if machine is None:
        assert chosen is not None
        assert chosen.recommended is not None
        machine, name, why, found = chosen.machine, chosen.recommended.name, chosen.why, chosen.found
        training = training if draft.note else chosen.recommended.training
    assess = Assessor(draft.subject, machine, clips=draft.clips)
    entry = assess(name, [unit.layout for unit in units], training)
    if draft.may_enlarge_chunks:
        best = _with_best_chunk(entry, assess)
        # Devices may differ: large chunks on all ranks, or on none.
        entry = best if all(exchange(engine.mesh.world, best.training.loss_chunk == "large")) else entry
        training = entry.training
    others = tuple(assess(entry.name, entry.layouts, training) for entry in found if entry.name != name)
    # The engine's own schedule may follow another order after the first step.
    entry = replace(entry, schedule=engine.schedule)
    # The state as `sw.memory` plans it, and all buffers.
    state = state_bytes([flat for unit in units for flat in unit.flats], training.num_moments)
    rests = {**asdict(state), "buffers": memory(model).planned_buffers}
    off_device: dict[str, object] = {}
    if host.size.host:
        off_device |= {"host_bytes": host.size.host, "pinned": host.arena.is_pinned, "cores": num_cores()}
        off_device |= {"spare_bytes": host.spare_bytes} if host.spare_bytes else {}
    if host.disk is not None:
        off_device |= {"disk_bytes": host.size.disk, "folder": str(host.disk.folder), "direct": host.disk.is_direct}
    return RunPlan(entry, assess, draft.note, others, why, draft.why_batch, draft.compilation, rests, off_device)


def _with_best_chunk(entry: Assessment, assess: Assessor) -> Assessment:
    """Return the plan with large chunks of the loss if its step is faster, and it needs no more memory or surely fits.
    On CPUs chunks stay small, and losses what they were."""
    if not assess.machine.has_reserve:
        return entry
    large = assess(entry.name, entry.layouts, replace(entry.training, loss_chunk="large"))
    is_free = large.memory.peak.total <= entry.memory.peak.total
    most_s = entry.step_s if is_free else (1 - MIN_CHUNK_GAIN) * entry.step_s
    return large if large.step_s < most_s and (is_free or not large.is_tight) else entry


# The part of a step that larger chunks of the loss must save if they need memory.
MIN_CHUNK_GAIN = 0.01
# Numbers of a strategy that are unknown without activations.
_UNKNOWN = ("activations", "loss", "peak_active", "peak_reserved", "peak_reserved_low", "peak_reserved_high")
_UNKNOWN_TIMES = ("step_seconds", "unclipped_step_seconds", "compute_seconds", "tokens_per_second_per_gpu", "mfu")
_UNKNOWN_ROOM = ("room_bytes", "error_bytes")


def write_plan(folder: Path, planned: RunPlan, first_step: int) -> None:
    """Write the plan. `starts` has each strategy and rank count so far, with its first step; the last is this one."""
    entry, assess = planned.entry, planned.assess
    why, training = planned.why or "it was asked for", entry.training
    found, choice = (entry, *planned.others), ((training,),)
    text = plan_as_json(Plan(assess.subject, assess.machine, training, found, entry, assess, choice, reason=why))
    text["strategies"][0] |= {"rests": dict(planned.rests), "off_device": dict(planned.off_device)}
    if planned.note:
        text["why"] = planned.note
        for row in text["strategies"]:
            row["per_gpu_bytes"] |= dict.fromkeys(_UNKNOWN)
            row |= dict.fromkeys((*_UNKNOWN_TIMES, *_UNKNOWN_ROOM)) | {"peak": {}, "instants": [], "timeline": []}
    runs = text["strategies"][0]
    what = {"name": runs["name"], "layout": runs["layout"], "training": text["training"]}
    now = json.loads(json.dumps({"first_step": first_step, "num_ranks": assess.machine.cluster.world_size, **what}))
    starts = [start for start in _starts(folder / PLAN) if start["first_step"] < first_step]
    if not starts or {**starts[-1], "first_step": first_step} != now:
        starts.append(now)
    replace_file(folder / PLAN, json.dumps({**text, "starts": starts}, indent=1) + "\n")
    (folder / TRAFFIC).unlink(missing_ok=True)  # it belongs to the earlier start


def _starts(file: Path) -> list[dict[str, Any]]:
    """Read `starts` from the plan that is there; plans of older versions have none."""
    try:
        found: list[dict[str, Any]] = json.loads(file.read_text())["starts"]
        return [start for start in found if isinstance(start["first_step"], int)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def write_traffic(folder: Path, model: nn.Module, run_plan: RunPlan) -> None:
    """Write the traffic of the last step, measured and planned: between ranks, and between a rank's memories."""
    engine, entry = engine_of(model), run_plan.entry
    events = step_events(engine.schedule, entry.training.num_micro_batches, clips=entry.clips)
    planned, seen = add_up(call for event in events for call in event.calls), traffic(model)
    text: dict[str, Any] = {
        "seen": [asdict(row) for row in seen.rows],
        "planned": [asdict(row) for row in planned.rows],
    }
    if seen.moves:
        moved = replace(entry, schedule=engine.schedule).moved
        ways = {way: getattr(moved, way) for way in sorted(get_args(Way)) if getattr(moved, way)}
        text["moves"] = {"seen": dict(seen.moves), "planned": ways}
    replace_file(folder / TRAFFIC, json.dumps(text, indent=1) + "\n")
