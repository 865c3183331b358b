"""One rank's life: set up, train, and report how it ended. Whatever can be refused is refused before the loop.

If one rank refuses, all ranks refuse with its message, because the others would wait for it. A run that diverges leaves
a folder `diverged/` in the run folder:

report.json        the complaint, the last steps, the samples of the last one, parameters that are not finite
checkpoint/        weights and optimizer as they are now; earlier checkpoints are left alone
"""

import dataclasses
import json
import math
import sys
import time
from pathlib import Path

import torch

from ..base.errors import DivergenceError, SaveError, ShardwiseError
from ..checkpoint.saving import save
from ..core import mesh
from ..core.engine.guards import engine_of
from ..core.wire.collectives import exchange
from .checks import completed
from .job import Job
from .loop import Ending, StepCallbacks, run_steps
from .out_of_memory import FailureContext, OutOfMemoryHereError, explain, is_out_of_memory
from .profile import Profile
from .run_folder import failed_write
from .run_summary import banner, end_of, start_of, summary
from .settings import Settings, settings_from_json
from .setup import set_up
from .signals import has_launcher
from .step_callbacks import Run
from .step_records import StepResult


def run_rank(text: str) -> int:
    """Return the exit code of a rank. A crash is raised, so that a launcher may start the rank again."""
    was_joined = mesh.is_joined()
    try:
        return _run(settings_from_json(text))
    except ShardwiseError as error:
        if error.exit_code == ShardwiseError.exit_code:
            raise
        # Every rank has the same message; under our launcher all but the first write it into their logs. Before the
        # ranks have met, it may be the message of one rank alone, and so may a lack of memory.
        is_alone = not mesh.is_joined() or isinstance(error, OutOfMemoryHereError)
        if has_launcher() or mesh.is_first() or is_alone:
            print(f"shardwise: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    finally:
        if not was_joined:
            mesh.leave()


def _run(settings: Settings) -> int:
    settings = completed(settings, torch.cuda.is_available())
    mesh.init(device=settings.device, timeout_s=settings.timeout)
    context = FailureContext(settings)
    try:
        return _train(settings, context)
    except (OSError, SaveError) as error:
        explained = None if context.folder is None else failed_write(context.folder, error)
        if explained is None:
            raise
        raise explained from error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise explain(error, context) from error


def _train(settings: Settings, context: FailureContext) -> int:
    began = time.perf_counter()
    run = context.run = set_up(settings, context)
    job = run.job
    if run.is_first:
        run.progress.say(banner(start_of(run)))
    is_profiled = settings.profile and run.is_first
    profile = Profile(run.folder, is_profiled, job.device.type, run.finish_collectives, run.finish_host_updates)
    callbacks = StepCallbacks(run.evaluate, run.save, run.show)
    try:
        with run.progress, profile:
            ending = run_steps(job, run.records, run.exchange, callbacks, job.first_step, profile)
            run.finish_saving()
            if ending.complaint:
                place = _write_divergence(run, ending)
                raise DivergenceError(f"{ending.complaint}; a report and a checkpoint are in {place}")
            if ending.stop is None:
                run.finish(ending.step)
    finally:
        run.finish_removing()
        run.metrics.close()
    run.progress.say(summary(end_of(run, ending, time.perf_counter() - began)))
    return ending.stop or 0


def _write_divergence(run: Run, ending: Ending) -> Path:
    """Write the folder of a run that diverged. All ranks call it; the first one writes the report."""
    names = sorted({name for part in exchange(run.hosts, _params_not_finite(run.job)) for name in part})
    place = run.folder / "diverged"
    if run.is_first:
        place.mkdir(parents=True, exist_ok=True)
        report = {
            "complaint": ending.complaint,
            "last_steps": [_json_numbers(result) for result in run.records.last],
            "samples": run.job.samples_of(run.records.last[-1].step - 1),
            "parameters_not_finite": names,
        }
        (place / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    save(place / "checkpoint", run.job.model, run.job.optimizer, extra=run.extra(ending.step))
    return place


def _json_numbers(result: StepResult) -> dict[str, float | None]:
    """Replace NaN and infinity, which JSON lacks, by None."""
    values = dataclasses.asdict(result).items()
    return {name: value if value is not None and math.isfinite(value) else None for name, value in values}


def _params_not_finite(job: Job) -> list[str]:
    """Return the parameters of which this rank's part holds a NaN or an infinity."""
    return [
        state.flat.params[index].name
        for unit in engine_of(job.model).units
        for state in unit.states
        for index, held in state.held.items()
        if not bool(state.master_part(held).isfinite().all())
    ]
