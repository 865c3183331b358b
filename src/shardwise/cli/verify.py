"""`shardwise verify`: check that checkpoints are complete and undamaged."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .shared import JSON_HELP, progress_bar, require_exists, say

if TYPE_CHECKING:
    from ..checkpoint.verification import Report


def verify(
    path: Annotated[Path, typer.Argument(help="A checkpoint of any library, a run folder, or its checkpoints/.")],
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Check that a checkpoint is complete, with correct checksums and finite numbers.

    Problems are listed, and the exit code is 5; without any it is 0. In a
    folder of the Hugging Face Trainer or Accelerate, the checkpoint and the
    weights next to it are read. Files of other libraries have no checksums:
    their structure and numbers are checked. For a run, every checkpoint is
    verified, and the command prints which one
    `train --resume-from-checkpoint latest` would load. An unfinished save is
    skipped there, and is not a problem here; a checkpoint of another format
    is not skipped.

        shardwise verify runs/tiny/checkpoints/step-000200

        shardwise verify runs/tiny --json
    """
    from ..checkpoint import verification as verifying

    require_exists(path)
    places = verifying.checkpoints_in(path)
    reports = [_verified(place) for place in places or verifying.parts_of_others(path) or [path]]
    newest = reversed(reports) if places else iter(())
    decisive = next((report for report in newest if report.is_usable or report.is_refused), None)
    resumed, stops = (None, decisive) if decisive is not None and decisive.is_refused else (decisive, None)
    # An unfinished save of a run is not a problem, but at least one checkpoint must be complete.
    counted = [report for report in reports if report.is_complete] if places else reports
    is_good = bool(counted) and not any(report.problems for report in counted)
    if as_json:
        about: dict[str, Any] = {
            "is_good": is_good,
            "checkpoints": [_as_json(report) for report in reports],
            "resumes_from": None if resumed is None else str(resumed.path),
            "stops_at": None if stops is None else str(stops.path),
        }
        print(json.dumps(about, indent=1))
    else:
        for report in reports:
            _print(report)
        if places:
            say(f"train --resume-from-checkpoint latest would {_resumption(resumed, stops)}")
    raise typer.Exit(0 if is_good else 5)


def _resumption(resumed: "Report | None", stops: "Report | None") -> str:
    if stops is not None:
        return f"stop at {stops.path}: {stops.damage[0]}; to load an older checkpoint, name it"
    return f"load {resumed.path if resumed else 'none of them'}"


def _verified(place: Path) -> "Report":
    from ..checkpoint import verification as verifying

    report, opened = verifying.look_at(place)
    if opened is not None:
        with progress_bar(place.name, report.num_bytes) as advance:
            verifying.verify(report, opened, advance)
    return report


def _as_json(report: "Report") -> dict[str, Any]:
    return {**dataclasses.asdict(report), "path": str(report.path), "is_usable": report.is_usable}


def _print(report: "Report") -> None:
    from ..base.text import plural, size

    if not report.problems:
        checked = (
            f"{plural(report.num_checksums, 'checksum')} correct"
            if report.num_checksums
            else "no checksums in this format"
        )
        what = f"{plural(report.num_tensors, 'tensor')} in {plural(report.num_files, 'file')}, {size(report.num_bytes)}"
        say(f"{report.path}: good. {what}; {checked}, every number finite")
        return
    word = "not good" if report.is_complete else "incomplete"
    say(f"{report.path}: {word}, {plural(len(report.problems), 'problem')}")
    say(*(f"  {problem}" for problem in report.problems))
