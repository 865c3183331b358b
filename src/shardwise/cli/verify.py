"""`shardwise verify`: whether a checkpoint can be relied on."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .files import require_there, say, streaming

if TYPE_CHECKING:
    from ..checkpoint.verification import Report


def verify(
    path: Annotated[Path, typer.Argument(help="A checkpoint, a run folder, or its checkpoints/; anybody's.")],
    as_json: Annotated[bool, typer.Option("--json", help="JSON to the standard output.")] = False,
) -> None:
    """Read a checkpoint to its end: complete, every checksum, every number finite.

    All that is wrong is listed, and the exit code is 5; it is 0 where all
    is well. Of a folder of the Trainer's or of Accelerate's, the checkpoint
    in it and the weights beside it are read. Files of others have no
    checksums: their structure and their numbers are looked at. Of a run,
    every checkpoint is verified, and the
    one is named that `train --resume-from-checkpoint latest` would take, or
    where it would stop: one of another format is not passed over. A save
    that did not finish is passed over there, and is no fault here.

        shardwise verify runs/tiny/checkpoints/step-000200

        shardwise verify runs/tiny --json
    """
    from ..checkpoint import verification as verifying

    require_there(path)
    places = verifying.checkpoints_in(path)
    reports = [_verified(place) for place in places or verifying.parts_of_others(path) or [path]]
    newest = reversed(reports) if places else iter(())
    decisive = next((report for report in newest if report.is_usable or report.is_refused), None)
    resumed, stops = (None, decisive) if decisive is not None and decisive.is_refused else (decisive, None)
    # Of a run's checkpoints, what did not finish is left alone; but one of them must be there to go on from.
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
            _tell(report)
        if places:
            say(f"train --resume-from-checkpoint latest would {_done(resumed, stops)}")
    raise typer.Exit(0 if is_good else 5)


def _done(resumed: "Report | None", stops: "Report | None") -> str:
    if stops is not None:
        return f"stop at {stops.path}, which it does not pass over: {stops.damage[0]}; to take an older one, name it"
    return f"take {resumed.path if resumed else 'none of them'}"


def _verified(place: Path) -> "Report":
    from ..checkpoint import verification as verifying

    report, opened = verifying.look_at(place)
    if opened is not None:
        with streaming(place.name, report.num_bytes) as tell:
            verifying.verify(report, opened, tell)
    return report


def _as_json(report: "Report") -> dict[str, Any]:
    return {**dataclasses.asdict(report), "path": str(report.path), "is_usable": report.is_usable}


def _tell(report: "Report") -> None:
    from ..base.text import plural, size

    if not report.problems:
        checked = (
            f"{plural(report.num_checksums, 'checksum')} right"
            if report.num_checksums
            else "no checksums, as whoever wrote it makes none"
        )
        what = f"{plural(report.num_tensors, 'tensor')} in {plural(report.num_files, 'file')}, {size(report.num_bytes)}"
        say(f"{report.path}: good. {what}; {checked}, every number finite")
        return
    word = "not good" if report.is_complete else "incomplete"
    say(f"{report.path}: {word}, {plural(len(report.problems), 'problem')}")
    say(*(f"  {problem}" for problem in report.problems))
