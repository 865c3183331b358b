"""One rank's life: set up, train, and what comes at the end. Whatever can be refused is refused before the loop.

What one rank refuses all ranks refuse, with its sentence, because the others would wait for it.
"""

import sys
import time

import torch

from ..base.errors import DivergenceError, SaveError, ShardwiseError
from ..core import mesh
from .banner import banner, summary
from .checks import completed
from .loop import run_steps
from .out_of_memory import OutOfMemoryHereError, Scene, explain, is_out_of_memory
from .postmortem import write_postmortem
from .profile import Profile
from .run_folder import failed_write
from .run_summary import end_of, start_of
from .settings import Settings, settings_from_json
from .setup import set_up
from .signals import has_launcher


def run_rank(text: str) -> int:
    """The exit code of a rank. A crash is raised, so that a launcher may start it again."""
    was_joined = mesh.is_joined()
    try:
        return _run(settings_from_json(text))
    except ShardwiseError as error:
        if error.exit_code == ShardwiseError.exit_code:
            raise
        # Every rank has the same sentence; under a launcher of ours all but the first write it into their logs.
        # Before they have met it may be one rank's alone, and so may a lack of memory.
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
    scene = Scene(settings)
    try:
        return _train(settings, scene)
    except (OSError, SaveError) as error:
        told = None if scene.folder is None else failed_write(scene.folder, error)
        if told is None:
            raise
        raise told from error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise explain(error, scene) from error


def _train(settings: Settings, scene: Scene) -> int:
    began = time.perf_counter()
    run = scene.run = set_up(settings, scene)
    job = run.job
    if run.is_first:
        run.progress.say(banner(start_of(run)))
    try:
        with (
            run.progress,
            Profile(
                run.folder, settings.profile and run.is_first, job.device.type, run.wait, run.wait_for_host
            ) as profile,
        ):
            ending = run_steps(job, run.book, run.rounds, run.between, run.first_step, profile)
            run.finish_saving()
            if ending.complaint:
                place = write_postmortem(run.folder, ending, job, run.book, run.hosts, run.extra(ending.step))
                raise DivergenceError(f"{ending.complaint}; what is needed to look into it is in {place}")
            if ending.stop is None:
                run.finish(ending.step)
    finally:
        run.finish_removing()
        run.metrics.close()
    run.progress.say(summary(end_of(run, ending, time.perf_counter() - began)))
    return ending.stop or 0
