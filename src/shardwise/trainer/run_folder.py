"""The run folder: which one a run gets, what is in it, and which checkpoint it resumes from.

config.json     the resolved settings; a new run can be started with it
plan.json       the plan of memory and time
traffic.json    bytes sent in a step, measured and planned
metrics.jsonl   a row every logging_steps steps
samples.jsonl   texts that were generated at each evaluation
oom-rank0.json  why a rank ran out of memory
checkpoints/    step-000100, ...
data/           the tokenised data
export/         the trained weights
logs/           output of all ranks but the first
"""

import dataclasses
import errno
import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

from ..base.documents import parse, read_object, read_text
from ..base.errors import CheckpointError, ConfigurationError, MemoryExceededError, SaveError
from ..checkpoint.folder import CHECKPOINTS, INDEX, all_steps, find, latest, read_index, step_folder
from .settings import AnyLossChunk, Compile, Settings

RUNS = Path("runs")
CONFIG, DATA, EXPORT, LOGS = "config.json", "data", "export", "logs"
PLAN, TRAFFIC, OOM_FILES = "plan.json", "traffic.json", "oom-rank*.json"
METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
LATEST, AUTO = "latest", "auto"


def choose(settings: Settings, num_restarts: int = 0) -> Settings:
    """Return the settings with the run folder and the checkpoint to resume from. Nothing is written."""
    folder, checkpoint = _choice(settings, num_restarts)
    needed = dict.fromkeys((".", CHECKPOINTS, DATA, EXPORT, LOGS), "folder")
    needed |= dict.fromkeys((CONFIG, PLAN, TRAFFIC, METRICS, SAMPLES), "file")
    for name, kind in needed.items():
        place = folder / name
        if place.exists() and place.is_dir() != (kind == "folder"):
            raise ConfigurationError(f"output_dir {folder}: {place} is no {kind}; move it, or name another folder")
    if checkpoint is not None and (saved := _config_in(Path(checkpoint))):
        # A resumed run computes as it did before. Old checkpoints were written with small chunks of the loss.
        before = {"loss_chunk": "small", **parse(saved[1])}
        for name, choices in (("compile", get_args(Compile)), ("loss_chunk", get_args(AnyLossChunk))):
            if getattr(settings, name) == "auto" and before.get(name) in choices:
                settings = dataclasses.replace(settings, **{name: before[name]})
    checkpoint = None if checkpoint is None else str(checkpoint)
    return dataclasses.replace(settings, output_dir=str(folder), resume_from_checkpoint=checkpoint)


def _choice(settings: Settings, num_restarts: int) -> tuple[Path, Path | str | None]:
    folder = Path(settings.output_dir).expanduser() if settings.output_dir is not None else None
    resume = settings.resume_from_checkpoint
    if num_restarts and folder is not None:
        # After a restart: prefer a checkpoint of this run to the one that the run itself was resumed from.
        return folder, _own(folder) or (None if resume in (LATEST, AUTO) else resume)
    if resume == AUTO:
        # For a job that the same command starts many times: the first start has nothing to resume from.
        if folder is None:
            raise ConfigurationError("resume_from_checkpoint auto: say in which folder with --output-dir")
        return folder, _own(folder)
    if resume == LATEST:
        runs = _runs() if folder is None else [folder]
        checkpoint = latest(runs[-1] / CHECKPOINTS) if runs else None
        if checkpoint is None:
            raise CheckpointError(
                f"resume_from_checkpoint latest: {folder or RUNS} holds no complete checkpoint; name one, or use auto "
                "with an --output-dir, which begins where there is none"
            )
        return runs[-1], checkpoint
    checkpoint = belongs_to = None
    if resume is not None:
        checkpoint = _checkpoint_in(resume)
        belongs_to = _run_of(checkpoint)
        if belongs_to is None:  # ours outside of a run, or one of another library, or no checkpoint at all
            from ..checkpoint.opened import open_checkpoint  # imports torch

            try:
                open_checkpoint(checkpoint)
            except CheckpointError as error:
                raise CheckpointError(
                    f"resume_from_checkpoint {resume}: {error}; give 'latest', or a folder as "
                    "runs/NAME/checkpoints/step-000100"
                ) from error
    name = Path(settings.model).stem if settings.model.endswith(".json") else Path(settings.model).name
    folder = folder or belongs_to or RUNS / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    is_own = belongs_to is not None and folder.resolve() == belongs_to.resolve()
    is_taken = (folder / CONFIG).is_file() or (resume is None and (folder / CHECKPOINTS).is_dir())
    if is_taken and not is_own:
        raise ConfigurationError(
            f"output_dir {folder} holds another run: continue it (--resume-from-checkpoint latest, or auto if it has "
            "no checkpoint yet), or name another folder"
        )
    return folder, checkpoint


def resume_candidates(asked: Settings, chosen: Settings) -> list[str]:
    """Return the checkpoints to try: the one that the user named, otherwise all of the run, the newest first.

    If one is damaged, the next is tried. Unfinished ones are included so that they are reported.
    """
    checkpoint, named = chosen.resume_from_checkpoint, asked.resume_from_checkpoint
    if checkpoint is None:
        return []
    if named not in (None, LATEST, AUTO) and Path(named).expanduser() == Path(checkpoint):
        return [checkpoint]
    root = Path(checkpoint).parent
    return [str(step_folder(root, step)) for step in reversed(all_steps(root))]


def config_of_resumed_run(settings: Settings) -> tuple[str, str] | None:
    """Return the settings of the run to resume, as a file name and its text. They replace defaults. A checkpoint has
    a copy of them, for the case that it was moved out of its run."""
    resume, folder = settings.resume_from_checkpoint, settings.output_dir
    if resume is None:
        return None
    if resume in (LATEST, AUTO):
        runs = [Path(folder).expanduser()] if folder is not None else _runs()[-1:]
    elif (named := _run_of(_checkpoint_in(resume))) is not None:
        runs = [named]
    else:
        return _config_in(_checkpoint_in(resume))
    file = next((run / CONFIG for run in runs if (run / CONFIG).is_file()), None)
    return None if file is None else (str(file), read_text(file))


def _config_in(checkpoint: Path) -> tuple[str, str] | None:
    """Return the copy of the settings in a checkpoint, without output_dir and resume_from_checkpoint."""
    if find(checkpoint) is None:
        return None
    try:
        place, text = read_index(checkpoint)
        noted = parse(text)["extra"]["configuration"]
        kept = {key: value for key, value in noted.items() if key not in ("output_dir", "resume_from_checkpoint")}
    except (CheckpointError, ValueError, KeyError, TypeError, AttributeError):
        return None  # not saved by the trainer; opening it reports other mistakes
    return str(place / INDEX), json.dumps(kept)


def replace_file(file: Path, text: str) -> None:
    """Replace a file atomically: a reader finds the old text or the new one."""
    draft = file.with_name(f"{file.name}.draft")
    draft.write_text(text)
    draft.replace(file)


def claim(settings: Settings) -> None:
    """Take the chosen folder for this run and write config.json. One rank calls it, after all checks.

    A new run can be started with config.json, so it leaves out this folder and the checkpoint to resume from.
    """
    run_folder(settings).mkdir(parents=True, exist_ok=True)
    again = dataclasses.replace(settings, output_dir=None, resume_from_checkpoint=None)
    replace_file(run_folder(settings) / CONFIG, again.to_json() + "\n")


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turn an OSError into a ConfigurationError that names the run folder."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"output_dir {folder}: cannot be written: {error.strerror or error}") from error


def oom_reports(folder: Path) -> list[dict[str, Any]]:
    """Return the reports of all ranks that ran out of memory since the last start, ordered by time."""
    found = []
    for file in folder.glob(OOM_FILES):
        try:
            report = read_object(file, "it")
            found.append((float(report["time"]), int(report["rank"]), str(report["text"]), report))
        except (ConfigurationError, ValueError, KeyError, TypeError, OverflowError) as error:
            why = error if isinstance(error, ConfigurationError) else repr(error)
            raise ConfigurationError(f"{file} is no report of a rank: {why}") from None
    return [report for *_, report in sorted(found, key=lambda entry: entry[:3])]


def next_steps(folder: Path, code: int) -> dict[str, str]:
    """Return the commands that follow a run with this exit code; none if it was refused before it began."""
    if code == ConfigurationError.exit_code or not (folder / CONFIG).is_file():
        return {}
    place, has_weights = shlex.quote(str(folder)), latest(folder / CHECKPOINTS) is not None
    commands = {
        "resume": code and f"train --output-dir {place} --resume-from-checkpoint auto",
        "memory": code == MemoryExceededError.exit_code and f"doctor oom {place}",
        "verify": code == CheckpointError.exit_code and f"verify {place}",
        "generate": has_weights and f"generate {place} --prompt 'Once upon a time'",
        "report": f"report {place}",
        "export": has_weights and not (folder / EXPORT).is_dir() and f"export {place} {place}/{EXPORT}",
    }
    return {name: f"shardwise {command}" for name, command in commands.items() if command}


def run_folder(settings: Settings) -> Path:
    assert settings.output_dir is not None, "choose() comes first"
    return Path(settings.output_dir)


def failed_write(folder: Path, error: OSError | SaveError) -> SaveError | None:
    """Return an error that names the file and the fix; None if the error is not about a file of this run."""
    text = str(error)
    if isinstance(error, OSError):
        if isinstance(error.filename, str | Path) and Path(error.filename).is_relative_to(folder):
            text = f"cannot write {error.filename}: {error.strerror}"
        elif error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT):  # write() names no file
            text = f"cannot write a file of this run: {error.strerror}"
        else:
            return None
    fix = f"then continue with --output-dir {folder} --resume-from-checkpoint auto"
    if not folder.is_dir():
        return SaveError(f"{text}; the run folder {folder} was moved or removed under the run: move it back, {fix}")
    return SaveError(f"{text}; see to it that {folder} can be written, {fix}")


def _own(folder: Path) -> Path | None:
    """Return the newest complete checkpoint of this run; None if no save ever finished. If all are broken, raise."""
    root = folder / CHECKPOINTS
    own = latest(root)
    broken = [path.name for path in (step_folder(root, step) for step in all_steps(root)) if path.is_dir()]
    if own is None and broken:
        raise CheckpointError(
            f"{root} holds no complete checkpoint, but what is left of {', '.join(broken)}: name a checkpoint to "
            "resume from, or move that folder to start over"
        )
    return own


def _run_of(checkpoint: Path) -> Path | None:
    """Return the run folder of a checkpoint; None if it was moved out of it, or if another library wrote it."""
    run = checkpoint.absolute().parent.parent  # checkpoints/ itself may be a link
    return run if find(checkpoint) is not None and (run / CONFIG).is_file() else None


def _checkpoint_in(resume: str) -> Path:
    """Return the newest checkpoint if `resume` is a run folder, otherwise the path itself."""
    path = Path(resume).expanduser()
    return latest(path / CHECKPOINTS) or path


def _runs() -> list[Path]:
    """Return the runs that have a complete checkpoint, the newest last."""
    runs = [path.parent for path in RUNS.glob(f"*/{CHECKPOINTS}") if latest(path) is not None]
    return sorted(runs, key=lambda run: (run / CONFIG).stat().st_mtime if (run / CONFIG).is_file() else 0.0)
