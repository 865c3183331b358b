"""Out of memory, explained: the memory of the rank by class, compared with the plan, and changes that would help.

The error is caught wherever it is raised, also during the set-up. Every rank that fails writes a report into the run
folder, which `shardwise doctor oom` shows again. The planner computes what each change would save and cost.

The largest blocks are named after the tensors that Python sees. Tensors that autograd saves for the backward are not
among them, and have no name. A CPU's allocator has no list of blocks, so on a CPU only tensors with a name are found.
"""

import gc
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from textwrap import TextWrapper
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..api.memory_report import Memory, memory
from ..base.errors import MemoryExceededError
from ..base.text import column_table, labelled_lines, non_breaking, plural, size, terminal_width
from ..core.engine.guards import find_engine
from ..core.engine.runtime import Engine
from ..core.layout import Layout
from ..core.mesh import device
from ..planner import changes as planner
from ..planner.assess import Assessment, Assessor
from ..planner.plan_json import at
from ..planner.planning import plan_for
from ..planner.search import MODES
from ..planner.training import Training
from .run_folder import OOM_FILES
from .run_plan import RunPlan
from .start_status import StartStatus

if TYPE_CHECKING:
    from .run_state import Run

SET_UP = "the set-up"
NUM_LARGEST = 5
# Fragmentation is a cause above this share of the memory; one large unit, from this share of the parameters on.
FRAGMENTED_SHARE, ONE_UNIT_SHARE = 0.1, 0.5

# Flags of `shardwise train` for the fields of a training.
FLAGS = {
    "checkpointing": "--gradient-checkpointing",
    "micro_batch": "--per-device-train-batch-size",
    "num_micro_batches": "--gradient-accumulation-steps",
    "reduce": "--reduce-dtype",
    "optimizer": "--optimizer",
    "loss_chunk": "--loss-chunk",
}
MIN_SAVED_SHARE = 0.005  # changes that save less are left out
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
# Messages of libraries that allocate outside of torch's allocator.
_MESSAGES = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory", "CUDNN_STATUS_ALLOC_FAILED")


@dataclass(slots=True)
class FailureContext:
    """Facts about a run for the report of a failure. They are added while the run is set up."""

    status: StartStatus = field(default_factory=lambda: StartStatus(is_shown=False))
    rank: int = 0
    folder: Path | None = None
    planned: RunPlan | None = None
    model: nn.Module | None = None
    optimizer: Any = None
    run: "Run | None" = None


class FirstOutOfMemoryError(MemoryExceededError):
    """This rank ran out of memory, and was the first: the others do not know yet."""


def is_out_of_memory(error: BaseException) -> bool:
    is_message = isinstance(error, RuntimeError) and any(words in str(error) for words in _MESSAGES)
    return is_message or isinstance(error, torch.OutOfMemoryError | MemoryError)


def explain(error: BaseException, context: FailureContext) -> MemoryExceededError:
    """Return the explanation as an error, and write it into the run folder."""
    try:
        report = _report(error, context)
    except Exception as other:  # noqa: BLE001  a failure in here must not hide the first one
        text = f"does not fit: {error}\n  no details, because of {other!r}"
        report = {"time": time.time(), "rank": context.rank, "text": text}
    is_first = True
    if context.folder is not None:
        is_first = not any(context.folder.glob(OOM_FILES))
        with suppress(OSError):  # the text is printed in any case
            context.folder.mkdir(parents=True, exist_ok=True)
            (context.folder / f"oom-rank{context.rank}.json").write_text(json.dumps(report, indent=1) + "\n")
    text = str(report["text"])
    return FirstOutOfMemoryError(text) if is_first else MemoryExceededError(text)


def _report(error: BaseException, context: FailureContext) -> dict[str, Any]:
    planned, model = context.planned, context.model
    engine = None if model is None else find_engine(model)
    held = None if model is None or engine is None else memory(model, context.optimizer)
    instant = _instant(error.__traceback__, context, engine)
    expected = _expected(planned, instant)
    pool = allocator_pool()
    requested = re.search(r"[Tt]ried to allocate ([\d.]+) (\w+)", str(error))
    asked_bytes = round(float(requested[1]) * _UNITS.get(requested[2], 0)) if requested else 0
    room, changes = None, []
    if pool is not None:
        # If the run used more memory than planned, assume that it uses this much more after any change, too.
        room = pool.limit - max(pool.allocated + asked_bytes - sum(expected.values()), 0)
        if pool.unused > FRAGMENTED_SHARE * pool.limit and not pool.grows:
            words = "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment"
            changes.append(Remedy(words, pool.unused, 1.0, None))
    if planned is not None:
        changes += remedies(planned, room)
    report: dict[str, Any] = {
        "time": time.time(),
        "rank": context.rank,
        "step": None if context.run is None else context.run.step + 1,
        "instant": instant,
        "error": str(error).partition("\n")[0],
        "asked_bytes": asked_bytes,
        "seen": {} if held is None else held.by_class(),
        "planned": expected,
        "planned_peak": None
        if planned is None or planned.note
        else sum(_expected(planned, planned.entry.memory.peak.name).values()),
        "pool": None if pool is None else asdict(pool),
        "largest": _largest_blocks(engine, context.optimizer),
        "blame": cause_of(held, expected, pool, asked_bytes, planned),
        "fixes": [asdict(change) for change in changes],
    }
    return {**report, "text": _text(report, planned, changes)}


def _instant(trace: TracebackType | None, context: FailureContext, engine: Engine | None) -> str:
    """Name the instant of the failure: as the planner does, where the planner has it."""
    if engine is None or context.run is None:
        return SET_UP
    if context.run.activity:
        return context.run.activity
    names, modules = set(), []
    while trace is not None:
        names.add(trace.tb_frame.f_code.co_name)
        owner = trace.tb_frame.f_locals.get("self")
        modules += [owner] if isinstance(owner, nn.Module) else []
        trace = trace.tb_next
    by_module = {id(unit.module): unit.name for unit in engine.units}
    within = [by_module[id(module)] for module in modules if id(module) in by_module]
    if "_engine_run_backward" in names:
        index = engine.unit_in_backward()
        return "backward loss" if index is None else f"backward {engine.units[index].name}"
    if not within:
        return "the gradients' norm" if "clip_grad_norm" in names else "update"
    units = [unit for unit in engine.schedule.units if not unit.holds_units]
    if within[-1] in {unit.name for unit in units} or not units:
        return f"forward {within[-1]}"
    # A module without a unit of its own: before the first unit, or after the last.
    order = {id(module): place for place, module in enumerate(context.model.modules())} if context.model else {}
    last = order.get(id(engine.units[engine.schedule.leaves[-1]].module), 0)
    return "forward loss" if order.get(id(modules[-1]), 0) > last else f"forward {within[-1]}"


def _expected(planned: RunPlan | None, name: str) -> dict[str, int]:
    """Return the predicted bytes, in the classes of `sw.memory`, at the instant of this name, else at the peak."""
    if planned is None:
        return {}
    named = [instant for instant in planned.entry.memory.instants if instant.name == name]
    held = max(named, key=lambda instant: instant.total, default=planned.entry.memory.peak).by_class()
    expected = {name: held[name] for name in ("params", "grads", "optimizer")}
    expected["buffers"] = held["gathered"] + held["reduce"]
    expected["activations"] = held["activations"] + held["loss"]
    unknown = {"activations"} if planned.note else {"activations", "grads"} if name == SET_UP else set()
    return {name: num_bytes for name, num_bytes in expected.items() if name not in unknown}


@dataclass(frozen=True, slots=True)
class AllocatorPool:
    """Numbers of a GPU's allocator."""

    allocated: int
    reserved: int
    limit: int  # maximum memory of this process
    grows: bool  # segments are expandable, so that nearly nothing is lost between blocks

    @property
    def unused(self) -> int:
        return self.reserved - self.allocated


def allocator_pool() -> AllocatorPool | None:
    where = device()
    if where.type != "cuda":
        return None
    grows = any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())
    allocated, reserved = torch.cuda.memory_allocated(where), torch.cuda.memory_reserved(where)
    free, total = torch.cuda.mem_get_info(where)
    allowed = round(torch.cuda.get_per_process_memory_fraction(where) * total)
    return AllocatorPool(allocated, reserved, min(reserved + free, allowed), grows)


def _largest_blocks(engine: Engine | None, optimizer: Any) -> list[dict[str, Any]]:
    """Return the largest memory blocks on the device, named if possible. Equal ones are one entry with a count."""
    names: dict[int, tuple[str, int]] = {}  # by storage address; the engine's names take priority
    with torch._C.DisableTorchFunctionSubclass():
        # Not isinstance: it may run code of the object, and so load a lazy module. Fake tensors have no memory.
        others = [value for value in gc.get_objects() if issubclass(type(value), Tensor)]
        others = [value for value in others if not issubclass(type(value), FakeTensor)]
        described = [(value, f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}") for value in others]
        for tensor, name in [*_engine_tensors(engine, optimizer), *described]:
            if tensor.device.type == device().type:
                storage = tensor.untyped_storage()
                with suppress(RuntimeError):  # stand-ins have no address
                    if storage.nbytes():
                        names.setdefault(storage.data_ptr(), (name, storage.nbytes()))
    blocks = {address: num_bytes for address, (_, num_bytes) in names.items()}
    if device().type == "cuda":
        allocated = {
            block["address"]: block.get("requested_size", block["size"])
            for segment in torch.cuda.memory_snapshot()
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        }
        blocks = allocated or blocks
    nameless = ("kept for the backward, or on its way", 0)
    named = Counter((num_bytes, names.get(address, nameless)[0]) for address, num_bytes in blocks.items())
    found = sorted(named.items(), key=lambda block: -block[0][0])[:NUM_LARGEST]
    return [{"bytes": num_bytes, "name": name, "count": count} for (num_bytes, name), count in found]


def _engine_tensors(engine: Engine | None, optimizer: Any) -> Iterator[tuple[Tensor, str]]:
    if engine is None:
        return
    unit_of: dict[int, str] = {}
    for unit in engine.units:
        for state in unit.states:
            kind = "parameters" if state.flat.master == state.flat.compute else "masters"
            if state.flat.master_on != "disk":
                yield state.master, f"{kind} of {unit.name}"
            unit_of.update((id(param), unit.name) for param in state.resting_params)
            if state.rest is not None:
                yield state.rest, f"parameters at rest of {unit.name}"
            if state.gradient.grads is not None:
                yield state.gradient.grads, f"gradients of {unit.name}"
    yield from ((slot, "a slot for gathered units") for slot in engine.gathers.memory.slots)
    yield from ((own, f"{engine.units[index].name}, gathered") for index, own in engine.gathers.memory.own.items())
    yield from ((slot, "a slot for reductions") for slot in engine.reductions.memory.slots if slot is not None)
    for param, entries in ({} if optimizer is None else optimizer.inner.state).items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                yield value, f"{key} of {unit_of.get(id(param), 'the optimizer')}"


def cause_of(
    held: Memory | None, expected: dict[str, int], pool: AllocatorPool | None, asked_bytes: int, planned: RunPlan | None
) -> str:
    if pool is not None and asked_bytes and pool.unused >= asked_bytes and pool.unused > FRAGMENTED_SHARE * pool.limit:
        unused, asked = size(pool.unused), size(asked_bytes)
        return f"fragmentation: {unused} are reserved and unused, none of it {asked} in one piece"
    measured = {} if held is None else {name: num for name, num in held.by_class().items() if num}
    by_class = {**expected, **measured}
    if not by_class:
        return "not known: nothing was set up yet"
    units = () if planned is None else planned.entry.schedule.units
    sizes = {unit.name: sum(flat.num_elems for flat in unit.flats) for unit in units}
    share = max(sizes.values(), default=0) / max(sum(sizes.values()), 1)
    # If one unit holds most of the model, gathering it gathers nearly everything.
    if share >= ONE_UNIT_SHARE and by_class.get("buffers", 0) >= ONE_UNIT_SHARE * max(by_class.values()):
        return (
            f"wrapping: unit {max(sizes, key=sizes.__getitem__)!r} holds {share:.0%} of the parameters "
            f"({plural(len(units), 'unit')} in all), and all of it is gathered at once; give the model smaller blocks "
            "that repeat"
        )
    activations = by_class.get("activations", 0)
    state = sum(by_class.get(name, 0) for name in ("params", "grads", "optimizer"))
    total = max(sum(by_class.values()), 1)
    if activations < state:
        return f"the state: parameters, gradients and optimizer are {size(state)} of {size(total)}"
    more = ""
    if held is not None and held.activations is not None and (usual := expected.get("activations")):
        more = f", {size(activations - usual)} more than planned" if activations > 1.05 * usual else ", as planned"
    return f"activations: {size(activations)} of {size(total)}{more}"


def _text(report: dict[str, Any], planned: RunPlan | None, changes: "list[Remedy]") -> str:
    error, asked_bytes = str(report["error"]).partition(". ")[0], report["asked_bytes"]
    more = f", {size(asked_bytes)} more were asked for" if asked_bytes else ""
    where = f"rank {report['rank']}, {at(report['instant'])}"
    if report["step"] is not None:
        where += f", step {report['step']:,}"
    if report["planned_peak"] is not None and planned is not None:
        most, limit = at(planned.entry.memory.peak.name), size(planned.entry.machine.memory_bytes)
        where += f"; planned at most {size(report['planned_peak'])} of {limit}, at {most}"
    largest = ", ".join(
        non_breaking(f"{block['count']} x " * (block["count"] > 1) + f"{size(block['bytes'])} {block['name']}")
        for block in report["largest"]
    )
    lines = [f"does not fit: {error}{more}", *labelled_lines({"where": where})]
    if names := list(dict.fromkeys([*report["planned"], *report["seen"]])):
        rows = {"memory": [*names, "together"]}
        for label, held in (("  predicted", report["planned"]), ("  measured", report["seen"])):
            numbers = [*(held.get(name) for name in names), sum(held.values()) if held else None]
            rows[label] = ["-" if number is None else size(number) for number in numbers]
        lines += column_table(rows)
    if (pool := report["pool"]) is not None:
        unused = size(pool["reserved"] - pool["allocated"])
        lines.append(f"    allocator {size(pool['reserved'])} reserved of {size(pool['limit'])}, {unused} of it unused")
    is_chosen = planned is not None and planned.why_batch
    batch = (
        f"{FLAGS['micro_batch']} {planned.entry.training.micro_batch} ({is_chosen})" if planned and is_chosen else ""
    )
    lines += labelled_lines({"largest": largest, "micro-batch": batch, "to blame": report["blame"]})
    if not changes:
        return "\n".join([*lines, "  what would help: split more, a smaller micro-batch, or more ranks"])
    lines.append("  what would help, as planned:")
    wrapper = TextWrapper(terminal_width(), initial_indent=4 * " ", subsequent_indent=6 * " ", break_on_hyphens=False)
    lines += [line for change in changes for line in wrapper.wrap(str(change))]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Remedy:
    words: str
    saved_bytes: int
    times: float | None  # time per token, relative to the run as it is
    fits: bool | None  # None: unknown

    def __str__(self) -> str:
        words = [f"{size(self.saved_bytes)} less"] if self.saved_bytes else []
        if self.times is not None:
            about = f"{self.times:.2f}x"
            words.append("the same time" if about == "1.00x" else f"{about} the time")
        verdict = {True: "fits", False: "not enough alone", None: ""}[self.fits]
        effect = "; ".join(part for part in (", ".join(words), verdict) if part)
        return f"{self.words}: {effect}" if effect else self.words


def remedies(planned: RunPlan, room: int | None = None) -> list[Remedy]:
    """Return the changes that help. `room`: memory that the run may use; default: the free memory before the run.

    Changes after which the run fits come first, the cheapest of them before the others; then those that save most.
    State that moves to host memory has to fit there, too. More ranks cost more than any other change: they come last.
    """
    entry, machine = planned.entry, planned.assess.machine
    room = entry.machine.memory_bytes if room is None else room

    def remedy(words: str, changed: Assessment) -> list[Remedy]:
        saved = entry.needed_bytes - changed.needed_bytes
        if saved <= MIN_SAVED_SHARE * entry.needed_bytes:
            return []
        if planned.note:  # time and needed memory are unknown without activations
            return [Remedy(words, saved, None, None)]
        return [Remedy(words, saved, entry.tokens_per_s / changed.tokens_per_s, changed.needed_bytes <= room)]

    found = []
    for words, changed in _changes(planned):
        if not changed.machine.lacks(0, changed.host_bytes, changed.disk_bytes):
            found += remedy(words, changed)
    found.sort(key=lambda it: (not it.fits, round(it.times or 1.0, 2) if it.fits else 0, -it.saved_bytes))
    no_single_change_fits = not planned.note and not entry.fits and not any(helps.fits for helps in found)
    if no_single_change_fits and (
        together := planner.nearest_change(planned.assess, entry, FLAGS, "--nnodes", offload_flag)
    ):
        found.insert(0, Remedy(f"together: {together}", 0, None, None))
    cluster = machine.cluster
    name = "num_nodes" if cluster.num_nodes > 1 else "node_size"
    twice = replace(machine, cluster=replace(cluster, **{name: 2 * getattr(cluster, name)}))
    doubled = planned.assess.on(twice)(entry.name, entry.layouts, entry.training)
    more = remedy(f"twice the ranks ({2 * cluster.world_size})", doubled)
    return found + [replace(helps, times=None) for helps in more]


def _changes(planned: RunPlan) -> Iterator[tuple[str, Assessment]]:
    entry, assess = planned.entry, planned.assess
    for training in _other_trainings(entry.training):
        try:
            yield planner.flags_for(entry.training, training, FLAGS), assess(entry.name, entry.layouts, training)
        except Exception:  # noqa: BLE001  the model's own code runs there, or it has no blocks to checkpoint
            continue
    # The same strategy with more and more state in host memory. Only the search offloads a part of the optimizer.
    layout = entry.layouts[0]
    if len(set(entry.layouts)) == 1 and not layout.uses_disk:
        more = list(planner.on_host(layout))
        more += [replace(other, activations_on="host") for other in (layout, more[-1])]
        instead = "" if entry.is_on_device else " in place of what is moved now"
        for moved in dict.fromkeys(more):
            if moved != layout:
                changed = assess(moved.name, [moved] * len(entry.layouts), entry.training)
                yield f"{offload_flag(moved)}{instead}", changed
    # The fastest other strategy that fits; if none does, the one that needs the least memory.
    plan = plan_for(Assessor(assess.subject, assess.machine), entry.training, ((entry.training,),), only_exact=True)
    other = plan.recommended or min(plan.found, key=lambda found: found.needed_bytes)
    if other.layouts != entry.layouts:
        is_preset = len(set(other.layouts)) == 1
        words = f"--strategy {other.name}" if is_preset else f"--strategy auto, which is then {other.name}"
        words += "" if entry.is_on_device else " --offload none"
        yield words if entry.is_exact else f"{words} --wire none", other


def offload_flag(layout: Layout) -> str:
    """Return the flag of `shardwise train` for this offload. `--strategy` and `--wire` stay as they are."""
    return f"--offload {','.join(layout.moves)}"


def _other_trainings(training: Training) -> Iterator[Training]:
    if training.loss_chunk == "large":
        yield replace(training, loss_chunk="small")
    for mode in MODES[MODES.index(training.checkpointing) + 1 :]:
        yield replace(training, checkpointing=mode)
    if training.micro_batch % 2 == 0:
        num = 2 * training.num_micro_batches
        yield replace(training, micro_batch=training.micro_batch // 2, num_micro_batches=num)
    elif training.micro_batch > 1:
        yield planner.with_single_sequences(training)
    if planner.can_reduce_in_bf16(training):
        yield replace(training, reduce="bf16")
    if training.optimizer == "adamw":
        yield planner.with_adamw8bit(training)
