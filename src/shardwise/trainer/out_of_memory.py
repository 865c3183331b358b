"""Out of memory, explained: what lay there by class, against the plan at that instant, and what would help.

It is caught wherever it comes, also while the run is set up. The report lies in the run folder, for `shardwise doctor
oom`; every rank that fails writes its own.
"""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..base.errors import MemoryExceededError
from ..core.engine.guards import find_engine
from ..core.engine.memory_report import memory
from ..core.engine.runtime import Engine
from .largest_blocks import largest, pool_here
from .oom_diagnosis import FRAGMENTS, blame_of, text_of
from .oom_remedies import Fix, fixes
from .run_folder import OOM_FILES, oom_file
from .run_plan import RunPlan
from .settings import Settings

if TYPE_CHECKING:
    from .step_callbacks import Run

SET_UP = "the set-up"

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
# What libraries say who take memory past the allocator.
_OTHERS_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory", "CUDNN_STATUS_ALLOC_FAILED")


@dataclass(slots=True)
class Scene:
    """What is known of a run when its memory ends. It grows while the run is set up."""

    settings: Settings
    rank: int = 0
    folder: Path | None = None
    planned: RunPlan | None = None
    model: nn.Module | None = None
    optimizer: Any = None
    run: "Run | None" = None


class OutOfMemoryHereError(MemoryExceededError):
    """Of this rank, the first of all: the others know nothing of it."""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OTHERS_WORDS)


def explain(error: BaseException, scene: Scene) -> MemoryExceededError:
    """In words, which are also left in the run folder, for `shardwise doctor oom`."""
    try:
        report = _report(error, scene)
    except Exception as other:  # noqa: BLE001  whatever fails in here must not hide what failed first
        text = f"does not fit: {error}\n  more cannot be told: {other!r}"
        report = {"time": time.time(), "rank": scene.rank, "text": text}
    is_first = True
    if scene.folder is not None:
        is_first = not any(scene.folder.glob(OOM_FILES))
        try:
            scene.folder.mkdir(parents=True, exist_ok=True)
            oom_file(scene.folder, scene.rank).write_text(json.dumps(report, indent=1) + "\n")
        except OSError:  # the words are printed in any case
            pass
    text = str(report["text"])
    return OutOfMemoryHereError(text) if is_first else MemoryExceededError(text)


def _report(error: BaseException, scene: Scene) -> dict[str, Any]:
    planned, engine = scene.planned, None if scene.model is None else find_engine(scene.model)
    instant = _instant(error.__traceback__, scene, engine)
    seen = None if scene.model is None or engine is None else memory(scene.model, scene.optimizer)
    expected = _expected(planned, instant)
    pool = pool_here()
    asked_bytes = _asked_bytes(str(error))
    room = None
    if pool is not None:
        # What there was beyond the plan will be there after any change, too.
        room = pool.limit - max(pool.allocated + asked_bytes - sum(expected.values()), 0)
    blame = blame_of(seen, expected, pool, asked_bytes, planned)
    helps = [] if planned is None else fixes(planned, room)
    if pool is not None and pool.unused > FRAGMENTS * pool.limit and not pool.grows:
        words = "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment"
        helps.insert(0, Fix(words, pool.unused, 1.0, None))
    report: dict[str, Any] = {
        "time": time.time(),
        "rank": scene.rank,
        "step": None if scene.run is None else scene.run.step + 1,
        "instant": instant,
        "error": str(error).partition("\n")[0],
        "asked_bytes": asked_bytes,
        "seen": {} if seen is None else seen.by_class(),
        "planned": expected,
        "planned_peak": None if planned is None or planned.note else sum(planned.at_peak().values()),
        "pool": None if pool is None else asdict(pool),
        "largest": largest(engine, scene.optimizer),
        "blame": blame,
        "fixes": [asdict(fix) for fix in helps],
    }
    return {**report, "text": text_of(report, planned, helps)}


def _instant(trace: TracebackType | None, scene: Scene, engine: Engine | None) -> str:
    """In the planner's words, as far as it has some."""
    if engine is None or scene.run is None:
        return SET_UP
    if scene.run.doing:
        return scene.run.doing
    functions = list(_frames(trace))
    modules = [module for _, module in functions if module is not None]
    by_module = {id(unit.module): unit.name for unit in engine.units}
    within = [by_module[id(module)] for module in modules if id(module) in by_module]
    if any(name == "_engine_run_backward" for name, _ in functions):
        index = engine.unit_in_backward()
        return "backward loss" if index is None else f"backward {engine.units[index].name}"
    if not within:
        return "the gradients' norm" if any(name == "clip_grad_norm" for name, _ in functions) else "update"
    units = [unit for unit in engine.schedule.units if not unit.holds_units]
    if within[-1] in {unit.name for unit in units} or not units:
        return f"forward {within[-1]}"
    # Of what belongs to no unit of its own: before the first of them, or behind the last.
    order = {id(module): place for place, module in enumerate(scene.model.modules())} if scene.model else {}
    last = max(order.get(id(engine.units[engine.schedule.leaves[-1]].module), 0), 0)
    return "forward loss" if order.get(id(modules[-1]), 0) > last else f"forward {within[-1]}"


def _frames(trace: TracebackType | None) -> Iterator[tuple[str, nn.Module | None]]:
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        yield trace.tb_frame.f_code.co_name, owner if isinstance(owner, nn.Module) else None
        trace = trace.tb_next


def _expected(planned: RunPlan | None, instant: str) -> dict[str, int]:
    if planned is None:
        return {}
    known = {entry.name for entry in planned.entry.memory.instants}
    found = planned.by_class(instant if instant in known else planned.entry.memory.peak.name)
    unknown = {"activations"} if planned.note else {"activations", "grads"} if instant == SET_UP else set()
    return {name: num_bytes for name, num_bytes in found.items() if name not in unknown}


def _asked_bytes(text: str) -> int:
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (\w+)", text)
    return round(float(found[1]) * _UNITS.get(found[2], 0)) if found else 0
